"""`metanudge bench`: speed and memory, side by side with every rival that is installed."""

from __future__ import annotations

import sys
from inspect import cleandoc
from typing import TYPE_CHECKING

import tyro

from metanudge_lab.bench.config import BenchConfig

if TYPE_CHECKING:
    from rich.console import Console

    from metanudge_lab.bench.tables import TextTable

EXAMPLES = """
examples:
  metanudge bench                                              every case, every contender
  metanudge bench --case omniglot --only 'fobmaml*' '*maml'    some of them
  metanudge bench --case omniglot --explain --only maml        where the time of a meta-step goes
  metanudge bench --case mnist1d --scaling                     against tasks, steps and shots
  metanudge bench --case omniglot --rounding                   what fp32, TF32, bf16 do to it
  metanudge bench --draw results/bench/omniglot-cuda-tf32.json
  python -m metanudge_lab.bench --device cuda                  where there is only torch and numpy
  pip install 'metanudge-lab[rivals]'                          the other libraries
"""


def run(argv: list[str]) -> int:
    """Run the command."""
    description = f"{cleandoc(BenchConfig.__doc__ or '')}\n{EXAMPLES}"
    config = tyro.cli(BenchConfig, args=argv, prog="metanudge bench", description=description)
    from rich.console import Console

    from metanudge_lab.bench.plots import draw
    from metanudge_lab.bench.run import read, show
    from metanudge_lab.bench.run import run as measure
    from metanudge_lab.progress import progress

    console = Console(highlight=False)
    results = (
        ((file, read(file)) for file in config.draw) if config.draw else measure(config, progress())
    )
    failed = 0
    for file, result in results:
        for table in show(result):
            _print(console, table)
        written = [file]
        if result["kind"] != "explain":
            written.append(file.with_suffix(".png"))
            draw(result, written[-1])
        print("   ".join(f"{path.suffix[1:]}: {path}" for path in written), "\n", flush=True)
        failed += sum(row["package"] == "metanudge" for row in result.get("failed", ()))
    return 1 if failed else 0


def _print(console: Console, table: TextTable) -> None:
    if not sys.stdout.isatty():
        print(f"\n{table}\n")
        return
    from rich.markup import escape
    from rich.table import Table as RichTable

    shown = RichTable(title=escape(table.title), title_justify="left", title_style="bold")
    for number, column in enumerate(table.columns):
        shown.add_column(escape(column), justify="left" if number in table.left else "right")
    for row in table.rows:
        style = "bold" if "metanudge" in row else None
        shown.add_row(*map(escape, row), style=style)
    console.print()
    console.print(shown)
    for note in table.notes:
        console.print(escape(note))
