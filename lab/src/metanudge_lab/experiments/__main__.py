"""`python -m metanudge_lab.experiments NAME …`: measure and save rows, with nothing but torch and
numpy installed.

Figures and the page are drawn from the rows later, by `metanudge report`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from metanudge.cli.program import finish, prepare
from metanudge.training.errors import EXIT_BAD_INPUT, UserError


def main(argv: list[str] | None = None) -> int:
    """Measure; returns the exit code."""
    from metanudge_lab.experiments import available

    parser = argparse.ArgumentParser(
        prog="python -m metanudge_lab.experiments",
        description=__doc__.splitlines()[0] if __doc__ else None,
    )
    parser.add_argument(
        "names", nargs="+", metavar="NAME", help=f"all, or some of: {', '.join(available())}"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a minute or so each on two CPU cores, instead of the full measurement",
    )
    parser.add_argument(
        "--device", default="auto", help="auto, cpu, cuda or cuda:1 (default: auto)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("results"),
        metavar="FOLDER",
        help="where NAME.json goes (default: results)",
    )
    parser.add_argument(
        "--limit-seconds",
        type=float,
        metavar="N",
        help="stop between cells before N seconds are over",
    )
    parser.add_argument(
        "--cells",
        default="*",
        metavar="PATTERN",
        help="only cells whose label contains or matches it, such as 'seed=0'",
    )
    parser.add_argument(
        "--take",
        type=Path,
        nargs="+",
        metavar="FOLDER",
        help="measure nothing; add the cells of NAME.json in these folders to that of --out",
    )
    parser.add_argument("--restart", action="store_true", help="forget what was measured before")
    options = parser.parse_args(argv)
    try:
        return _measure(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT


def _measure(arguments: argparse.Namespace) -> int:
    import time

    from metanudge.names import clock
    from metanudge_lab.experiments import load
    from metanudge_lab.experiments.run import Options, check_names, run, take
    from metanudge_lab.experiments.store import result_file
    from metanudge_lab.progress import progress

    end = None if arguments.limit_seconds is None else time.monotonic() + arguments.limit_seconds
    show = progress()
    for name in check_names(arguments.names):
        options = Options(
            mode="quick" if arguments.quick else "full",
            folder=arguments.out,
            device=arguments.device,
            limit_seconds=None if end is None else max(0.0, end - time.monotonic()),
            pattern=arguments.cells,
            restart=arguments.restart,
        )
        if arguments.take:
            result = take(load(name), options, arguments.take)
        else:
            result = run(load(name), options, progress=show)
        missing = f"{len(result.missing)} cells missing" if result.missing else "complete"
        show.note(
            f"{name}: {missing}, {clock(result.seconds)} of measuring, in"
            f" {result_file(arguments.out, name, options.mode)}"
        )
    return 0


if __name__ == "__main__":
    prepare()
    sys.exit(finish(main()))
