"""`metanudge eval RUN`: how well a trained learner does on tasks it has never seen."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

if TYPE_CHECKING:
    from metanudge.training.evaluation import Progress

PLOTS = (".png", ".svg", ".pdf")

EXAMPLES = """
examples:
  metanudge eval runs/first                                  1000 test tasks
  metanudge eval runs/first --tasks 5000 --steps 0 1 5 20    a smaller interval, other steps
  metanudge eval runs/first --split val --json result.json   all of it, for a program to read
"""


@dataclass(frozen=True)
class EvalOptions:
    """Adapt to unseen tasks and measure: mean with its 95 % confidence interval, worst decile,
    every class, every number of steps.

    Models with BatchNorm are measured twice: transductive (queries normalised together, the usual
    MAML protocol) and inductive (normalised with the statistics of the support set, as when the
    learner is used).
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The folder that metanudge train wrote."""

    tasks: int = 1000
    """Number of tasks; the confidence interval shrinks with its root."""

    split: Literal["train", "val", "test"] = "test"
    """Where the tasks are drawn from."""

    steps: tuple[int, ...] = ()
    """Numbers of adaptation steps to measure; a few around the run's own when left out."""

    json: Path | None = None
    """Also write everything to this file; replaced if it exists."""

    plot: Path | None = None
    """Where the plot against steps goes; RUN/eval-SPLIT.png when left out."""

    checkpoint: str = "best"
    """Which weights: best, last, or a step that was saved."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""

    trust: bool = False
    """Import and run the code that the run's config.json names as its model (module:attribute).
    Look at it first.
    """


def run(argv: list[str]) -> int:
    """Run the command."""
    options = tyro.cli(
        EvalOptions,
        args=argv,
        prog="metanudge eval",
        description=f"{cleandoc(EvalOptions.__doc__ or '')}\n{EXAMPLES}",
    )
    from metanudge.training import runs
    from metanudge.training.errors import UserError
    from metanudge.training.evaluation import evaluate_run, plot_steps
    from metanudge.training.output import printable
    from metanudge.training.use import check_new_file, new_file

    if options.tasks < 1:
        raise UserError(f"--tasks {options.tasks} is too small. Use 1 or more; 1000 are usual.")
    if any(k < 0 for k in options.steps):
        raise UserError(
            f"--steps {min(options.steps)} cannot be taken. Use 0 for the initialisation itself, or"
            " positive numbers."
        )
    trained = runs.load(
        options.run, checkpoint=options.checkpoint, device=options.device, trust=options.trust
    )
    plot = options.plot or trained.folder / f"eval-{options.split}.png"
    if plot.suffix.lower() not in PLOTS:
        raise UserError(
            f"--plot {plot} is not a kind of picture that can be drawn. Let its name end in one of:"
            f" {', '.join(PLOTS)}."
        )
    check_new_file(plot, overwrite=True, flag="--plot")
    with ExitStack() as stack:
        file = (
            None
            if options.json is None
            else stack.enter_context(new_file(options.json, overwrite=True, flag="--json"))
        )
        try:
            trained.source.task(0, options.split)
        except ValueError as error:  # too few classes
            raise UserError(f"--split {options.split}: {error}") from error
        with progress_bar("evaluating", "tasks") as progress:
            report = evaluate_run(
                trained,
                tasks=options.tasks,
                split=options.split,
                steps=options.steps or None,
                progress=progress,
            )
        if file is not None:
            json.dump(
                {"run": str(options.run), "step": trained.state.step, **report.as_dict()},
                file,
                indent=2,
                allow_nan=False,
            )
            file.write("\n")
    print(f"{options.run}, weights after {trained.state.step} meta-steps")
    print(printable(str(report)))
    try:
        plot_steps(
            report,
            plot,
            title=f"{Path(trained.config.data).name}: {report.tasks} {options.split} tasks",
        )
    except OSError as error:
        raise UserError(
            f"--plot {plot} cannot be written ({error.strerror}). Name a file in a folder you can"
            " write to."
        ) from error
    print(
        f"\nplot: {plot}"
        + (f"   json: {options.json}" if options.json else "")
        + f"   ({report.seconds:.0f} s)"
    )
    return 0


@contextmanager
def progress_bar(what: str, unit: str) -> Iterator[Progress | None]:
    """A function of (done, total) that draws a bar on a terminal; None where standard error is not
    one.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
