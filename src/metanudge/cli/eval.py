"""`metanudge eval RUN`: how well a trained learner does on tasks it has never seen."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from metanudge.cli.flags import OfARun, parse
from metanudge.cli.program import report as say
from metanudge.names import printable
from metanudge.training.errors import UserError, refused

if TYPE_CHECKING:
    from metanudge.training.evaluation import EvaluationReport, Progress
    from metanudge.training.runs import Run

PLOTS = (".png", ".svg", ".pdf")

EXAMPLES = """
examples:
  metanudge eval runs/first                                  1000 test tasks
  metanudge eval runs/first --tasks 5000 --steps 0 1 5 20    a smaller interval, other steps
  metanudge eval runs/first --split val --json result.json   all of it, for a program to read
  metanudge eval runs/any --ways 12 --shots 5                other tasks (--head prototypes)
  metanudge eval runs/photos --data more_photos/             data that were not trained on
"""


@dataclass(frozen=True, kw_only=True)
class EvalOptions(OfARun):
    """Adapt to unseen tasks and measure: mean with its 95 % confidence interval, worst decile,
    every class, every number of steps; R² and RMSE in regression; baselines beside it. RUN keeps it
    as eval-SPLIT.json for `metanudge page`.

    Models with BatchNorm are measured twice: transductive (queries normalised together, the usual
    MAML protocol) and inductive (normalised with the statistics of the support set, as when the
    learner is used).
    """

    tasks: int = 1000
    """Number of tasks, or all where there are fewer; the confidence interval shrinks with its root.
    """

    split: Literal["train", "val", "test"] = "test"
    """Where the tasks are drawn from."""

    data: str | None = None
    """Other data of the same kind, prepared as in training. All of their classes (given tasks: all
    tasks) are test ones.
    """

    ways: int | str | None = None
    """Classes per task, or a range such as 3-10; others than in training need a run that was
    trained with --head prototypes.
    """

    shots: int | str | None = None
    """Support examples per class, or a range."""

    queries: int | None = None
    """Query examples per class."""

    steps: tuple[int, ...] = ()
    """Numbers of adaptation steps to measure; a few around the run's own when left out."""

    baselines: Literal["all", "none"] = "all"
    """Measure simple methods on the same tasks, for comparison. none: leave them out."""

    json: Path | None = None
    """Also write everything to this file; replaced if it exists."""

    plot: Path | None = None
    """Where the plot against steps goes; RUN/eval-SPLIT.png when left out."""


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
    from metanudge.training.evaluation import plot_steps, write_report
    from metanudge.training.use import check_new_file

    trained = runs.load(
        options.run, checkpoint=options.checkpoint, device=options.device, trust=options.trust
    )
    if options.data is not None and options.split != "test":
        raise UserError(
            f"--split {options.split} and --data {options.data} contradict each other: other data"
            " are all test data. Leave --split out."
        )
    others = {name: getattr(options, name) for name in ("data", "ways", "shots", "queries")}
    others = {name: value for name, value in others.items() if value is not None}
    if others:
        trained = trained.elsewhere(**others)
    plot = options.plot or trained.folder / f"{'-'.join(_name(options))}.png"
    if plot.suffix.lower() not in PLOTS:
        raise UserError(
            f"--plot {plot} is not a kind of picture that can be drawn. Let its name end in one of:"
            f" {', '.join(PLOTS)}."
        )
    check_new_file(plot, overwrite=True, flag="--plot")
    report = _measure(trained, options)
    print(f"{options.run}, weights after {trained.state.step} meta-steps")
    if others:
        print(printable(f"on {trained.config.data}: {trained.source.sizes()}"))
    print(printable(str(report)))
    title = f"{Path(trained.config.data).name}: {report.tasks} {options.split} tasks"
    try:
        plot_steps(report, plot, title=title)
    except OSError as error:
        raise UserError(
            f"--plot {plot} cannot be written ({error.strerror}). Name a file in a folder you can"
            " write to."
        ) from error
    try:
        if not others:
            write_report(trained, report, options.split)
    except OSError as error:  # somebody else's folder, perhaps
        say(
            f"note: {options.run} takes no results ({error.strerror}), so that `metanudge page`"
            " will not show them."
        )
    also = f"   json: {options.json}" if options.json else ""
    print(f"\nplot: {plot}{also}   ({report.seconds:.0f} s)")
    return 0


def _name(options: EvalOptions) -> Iterator[str]:
    """What an evaluation is called, so that those of other tasks have files of their own."""
    yield from ("eval", options.split)
    if options.data is not None:
        yield Path(options.data).stem
    for name in ("ways", "shots", "queries"):
        if (value := getattr(options, name)) is not None:
            yield f"{value}{name}"


def _measure(trained: Run, options: EvalOptions) -> EvaluationReport:
    """The report, also written to the file of --json, which is there as long as it takes."""
    from metanudge.training.evaluation import evaluate_run
    from metanudge.training.use import new_file

    with ExitStack() as stack:
        file = None
        if options.json is not None:
            file = stack.enter_context(new_file(options.json, overwrite=True, flag="--json"))
        with refused(f"--split {options.split}: ", ValueError):  # too few classes
            trained.source.task(0, options.split)
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
            about |= {"data": trained.config.data, "tasks_of": trained.source.sizes()}
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
