"""`metanudge report`: the page of all results, drawn from the saved rows."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class ReportOptions:
    """Draw every figure anew from the saved rows and write report.html and RESULTS.md. Nothing is
    measured.

    examples:
      metanudge report                                  results/ → results/report.html
      metanudge report --results other --out page.html
    """

    results: Path = Path("results")
    """Where metanudge reproduce put its rows."""

    out: Path | None = None
    """Where the page goes; report.html in the folder of the results when left out."""

    open: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Open the page in the browser."""


def run(argv: list[str]) -> int:
    """Run the command."""
    options = tyro.cli(
        ReportOptions,
        args=argv,
        prog="metanudge report",
        description=cleandoc(ReportOptions.__doc__ or ""),
    )
    from metanudge.training.errors import UserError
    from metanudge_lab.report.write import MARKDOWN, PAGE, write

    if not options.results.is_dir():
        raise UserError(
            f"There is no folder {options.results}. Measure something first: metanudge reproduce"
            " all --quick."
        )
    file = options.out if options.out is not None else options.results / PAGE
    if file.is_dir():
        raise UserError(f"--out {file} is a folder. Name a file, such as {file / PAGE}.")
    entries = write(options.results, file)
    run = [entry for entry in entries if entry.result is not None]
    print(f"{len(run)} of {len(entries)} experiments have results.")
    print(f"page: {file}   text: {options.results / MARKDOWN}")
    if options.open:
        import webbrowser

        webbrowser.open(file.resolve().as_uri())
    return 0
