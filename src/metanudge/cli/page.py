"""`metanudge page RUN`: a run to look at, as one page that needs nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from metanudge.cli.flags import parse

EXAMPLES = """
examples:
  metanudge page runs/first                      runs/first/page.html
  metanudge eval runs/first                      before it, for accuracy by steps and by class
  metanudge page runs/first --out first.html --open
"""


@dataclass(frozen=True)
class PageOptions:
    """Write one self-contained page of a run: what was trained, the result beside the baselines,
    the curve, and what `metanudge eval` found.

    Nothing is computed and no data are read: what the run's folder holds is shown.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The folder that metanudge train wrote."""

    out: Path | None = None
    """Where the page goes, replaced if it exists; RUN/page.html when left out."""

    open: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Open the page in the browser."""


def run(argv: list[str]) -> int:
    """Run the command."""
    options = parse(PageOptions, "page", argv, EXAMPLES)
    from metanudge.page import read_run, run_page
    from metanudge.training.runs import PAGE
    from metanudge.training.use import new_file

    found = read_run(options.run)
    file = options.out if options.out is not None else options.run / PAGE
    with new_file(file, overwrite=True, flag="--out") as stream:
        stream.write(run_page(found))
    if not found.finished:
        print(f"unfinished: {found.steps} of {found.config.iterations} meta-steps")
    if found.evaluation is None:
        print(f"not evaluated yet: metanudge eval {options.run} adds steps, classes and mistakes")
    print(f"page: {file}")
    if options.open:
        import webbrowser

        webbrowser.open(file.resolve().as_uri())
    return 0
