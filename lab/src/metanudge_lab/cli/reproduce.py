"""`metanudge reproduce NAME`: measure a figure or table of the paper anew, and judge its claim."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from metanudge.training.errors import EXIT_BAD_INPUT, UserError

if TYPE_CHECKING:
    from metanudge_lab.report import Entry

EXAMPLES = """
examples:
  metanudge reproduce gradient-quality --quick     one figure, in a minute or so
  metanudge reproduce all --quick                  everything at small sizes
  metanudge reproduce omniglot --device cuda       all of it; stop and repeat the command to go on
"""


@dataclass(frozen=True)
class ReproduceOptions:
    """Measure experiments, draw their figures, say whether the paper's claims held, and write the
    page of all results.

    Rows are saved after every unit of work; the same command goes on where an earlier one stopped.
    """

    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="NAME")] = ()
    """Experiments, or all; leave it out for a list."""

    quick: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Small sizes: a minute or so each on two CPU cores."""

    device: str = "auto"
    """auto (CUDA where there is one), cpu, cuda or cuda:1."""

    out: Path = Path("results")
    """Folder of rows, figures and page."""

    limit_seconds: float | None = None
    """Stop between units of work before so many seconds are over."""

    cells: str = "*"
    """Only units of work whose label contains or matches this, such as seed=0."""

    restart: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Forget what was measured before."""


def run(argv: list[str]) -> int:
    """Run the command."""
    description = f"{cleandoc(ReproduceOptions.__doc__ or '')}\n{EXAMPLES}"
    options = tyro.cli(
        ReproduceOptions, args=argv, prog="metanudge reproduce", description=description
    )
    from metanudge_lab.experiments.run import check_names

    if not options.names:
        _list()
        return EXIT_BAD_INPUT
    names = check_names(options.names)
    failures = _measure(names, options)
    from metanudge_lab.report.write import PAGE, write

    entries = {entry.name: entry for entry in write(options.out)}
    _print([entries[name] for name in names])
    print(f"page: {options.out / PAGE}")
    if failures:
        raise UserError("; ".join(failures))
    return 0


def _measure(names: Sequence[str], options: ReproduceOptions) -> list[str]:
    """Measure one after the other; what the user can put right does not keep the others from being
    measured.
    """
    from metanudge_lab.experiments import load
    from metanudge_lab.experiments.run import Options
    from metanudge_lab.experiments.run import run as measure
    from metanudge_lab.progress import progress

    started, show, failures = time.monotonic(), progress(), []
    for name in names:
        left = (
            None
            if options.limit_seconds is None
            else max(0.0, started + options.limit_seconds - time.monotonic())
        )
        how = Options(
            mode="quick" if options.quick else "full",
            folder=options.out,
            device=options.device,
            limit_seconds=left,
            pattern=options.cells,
            restart=options.restart,
        )
        try:
            measure(load(name), how, progress=show)
        except UserError as error:
            if len(names) == 1:
                raise
            failures.append(f"{name}: {error}")
    return failures


def _print(entries: Sequence[Entry]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 1, 0), expand=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("the paper", ratio=4)
    table.add_column("ours", ratio=6)
    for entry in entries:
        quick = " (quick)" if entry.result is not None and entry.result.mode == "quick" else ""
        table.add_row(
            f"{entry.name}\n{entry.status}{quick}",
            entry.experiment.claim,
            f"{entry.measured} {entry.reason}".strip() or "–",
        )
    Console(highlight=False, markup=False).print(table)


def _list() -> None:
    from metanudge_lab.experiments import available, load

    print("Which experiment? metanudge reproduce NAME, or all.\n")
    for name in available():
        experiment = load(name)
        print(f"  {name:<17} {experiment.where:<18} {experiment.title}")
