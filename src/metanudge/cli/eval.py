"""`metanudge eval RUN`: how well a trained learner does on tasks it has never seen."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from metanudge.cli.flags import parse
from metanudge.names import printable
from metanudge.training.errors import UserError

if TYPE_CHECKING:
    from metanudge.training.evaluation import EvaluationReport, Progress
    from metanudge.training.runs import Run

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
    every class, every number of steps; R² and RMSE in regression; baselines beside it.

    Models with BatchNorm are measured twice: transductive (queries normalised together, the usual
    MAML protocol) and inductive (normalised with the statistics of the support set, as when the
    learner is used).
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The folder that metanudge train wrote."""

    tasks: int = 1000
    """Number of tasks, or all where there are fewer; the confidence interval shrinks with its root.
    """

    split: Literal["train", "val", "test"] = "test"
    """Where the tasks are drawn from."""

    steps: tuple[int, ...] = ()
    """Numbers of adaptation steps to measure; a few around the run's own when left out."""

    baselines: Literal["all", "none"] = "all"
    """Measure simple methods on the same tasks, for comparison. none: leave them out."""

    json: Path | None = None
    """Also write everything to this file; replaced if it exists."""

    plot: Path | None = None
    """Where the plot against steps goes; RUN/eval-SPLIT.png when left out."""

    checkpoint: str = "best"
    """Which weights: best, last, or a step that was saved."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""

    trust: bool = False
    """Import and run the code that the run's config.json names (model, data, loss … as
    module:attribute). Look at it first.
    """


def run(argv: list[str]) -> int:
    """Run the command."""
    options = parse(EvalOptions, "eval", argv, EXAMPLES)
    if options.tasks < 1:
        raise UserError(f"--tasks {options.tasks} is too small. Use 1 or more; 1000 are usual.")
    if any(k < 0 for k in options.steps):
        raise UserError(
            f"--steps {min(options.steps)} cannot be taken. Use 0 for the initialisation itself, or"
            " positive numbers."
        )
    from metanudge.training import runs
    from metanudge.training.evaluation import plot_steps
    from metanudge.training.use import check_new_file

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
    report = _measure(trained, options)
    print(f"{options.run}, weights after {trained.state.step} meta-steps")
    print(printable(str(report)))
    title = f"{Path(trained.config.data).name}: {report.tasks} {options.split} tasks"
    try:
        plot_steps(report, plot, title=title)
    except OSError as error:
        raise UserError(
            f"--plot {plot} cannot be written ({error.strerror}). Name a file in a folder you can"
            " write to."
        ) from error
    also = f"   json: {options.json}" if options.json else ""
    print(f"\nplot: {plot}{also}   ({report.seconds:.0f} s)")
    return 0


def _measure(trained: Run, options: EvalOptions) -> EvaluationReport:
    """The report, also written to the file of --json, which is there as long as it takes."""
    from metanudge.training.evaluation import evaluate_run
    from metanudge.training.use import new_file

    with ExitStack() as stack:
        file = None
        if options.json is not None:
            file = stack.enter_context(new_file(options.json, overwrite=True, flag="--json"))
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
                baselines=options.baselines == "all",
            )
        if file is not None:
            about = {"run": str(options.run), "step": trained.state.step}
            json.dump({**about, **report.as_dict()}, file, indent=2, allow_nan=False)
            file.write("\n")
    return report


@contextmanager
def progress_bar(what: str, unit: str) -> Iterator[Progress | None]:
    """A function of (done, total) that draws a bar on a terminal; None where standard error is not
    one.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn(what),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn(unit),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
