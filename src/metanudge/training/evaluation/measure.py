"""The evaluation itself: draw tasks, adapt on the engine that suits them, predict, count."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from metanudge.engines import Cost, Engine, Inner, InplaceEngine, StackingError
from metanudge.evaluation import ci95
from metanudge.learner import MetaLearner
from metanudge.params import Params
from metanudge.task import Task, TaskBatch
from metanudge.tasks import Episodes, Given
from metanudge.tasks.classification import ClassEpisodes
from metanudge.tasks.counts import check_count
from metanudge.tasks.episodes import Split, check_split
from metanudge.training.evaluation.class_tally import ClassTally
from metanudge.training.evaluation.predict import Predictor
from metanudge.training.evaluation.report import BatchNormProtocol, EvaluationReport, StepResult
from metanudge.training.runs import Run
from metanudge.training.summary import compared

Progress = Callable[[int, int | None], None]
TASKS_AT_ONCE = 50


def evaluate_run(
    run: Run,
    *,
    tasks: int = 1000,
    split: Split = "test",
    steps: Sequence[int] | None = None,
    progress: Progress | None = None,
    baselines: bool = False,
) -> EvaluationReport:
    """Evaluate a run's learner on episodes 0 … tasks−1 of a split of the run's own data.

    Args:
        run: from `metanudge.training.runs.load`.
        tasks: number of tasks, or all where a split has fewer; the confidence interval shrinks with
            its root.
        split: "train", "val" or "test".
        steps: numbers of adaptation steps to measure; default: a few around the solver's own, which
            is always among them.
        progress: called with (tasks done, tasks in all) as it goes.
        baselines: measure simple methods on the same tasks, too.
    """
    check_count("tasks", tasks, why="An evaluation needs at least one task; 1000 are usual.")
    check_split(split)
    source: Episodes = run.source
    tasks = min(tasks, source.num_tasks(split) or tasks)

    def batches() -> Iterator[tuple[TaskBatch, list[tuple[str, ...]] | None]]:
        for first in range(0, tasks, TASKS_AT_ONCE):
            indices = range(first, min(first + TASKS_AT_ONCE, tasks))
            yield source.batch(indices, split), episode_classes(source, indices, split)

    scale = run.shapes.target_scale
    with run.precision():
        report = _evaluate(
            run.learner,
            batches(),
            steps=steps,
            split=split,
            total=tasks,
            progress=progress,
            units=(1.0,) if scale is None else scale.scale,
        )
        if not baselines:
            return report
        own = report.task_accuracies if report.classification else report.task_losses
        config = dataclasses.replace(run.config, baselines="all")
        found = compared(config, source, torch.tensor(own, dtype=torch.float64), split)
    return dataclasses.replace(report, baselines=found)


def evaluate_tasks(
    learner: MetaLearner,
    tasks: TaskBatch | Task | Iterable[Task],
    *,
    steps: Sequence[int] | None = None,
    classes: Sequence[Sequence[str]] | None = None,
    progress: Progress | None = None,
) -> EvaluationReport:
    """Evaluate a learner on tasks of your own; see `evaluate_run`. The learner stays as it is.

    Args:
        learner: its loss must have the form `loss(output, target)`.
        tasks: a `TaskBatch`, a `Task`, or tasks.
        steps: numbers of adaptation steps to measure.
        classes: for each task the names of its classes, in the order of the labels.
        progress: called with (tasks done, tasks in all) as it goes.

    Example:
        >>> from torch import nn
        >>> from metanudge.models import MLP
        >>> from metanudge.tasks import MNIST1D
        >>> learner = MetaLearner(MLP(40, 3), nn.functional.cross_entropy)
        >>> source = MNIST1D(ways=3, shots=5, num_samples=2000, cache=False)
        >>> report = evaluate_tasks(learner, source.batch(range(20), "test"), steps=[0, 5])
        >>> [row.steps for row in report.rows], len(report.task_accuracies)
        ([0, 5], 20)
    """
    batch = TaskBatch.of(tasks)
    if classes is not None and len(classes) != len(batch):
        raise ValueError(
            f"classes has {len(classes)} entries for {len(batch)} tasks. Give the class names of"
            " every task."
        )

    def batches() -> Iterator[tuple[TaskBatch, list[tuple[str, ...]] | None]]:
        for first in range(0, len(batch), TASKS_AT_ONCE):
            chosen = slice(first, first + TASKS_AT_ONCE)
            yield (
                batch[chosen],
                None if classes is None else [tuple(names) for names in classes[chosen]],
            )

    return _evaluate(
        learner, batches(), steps=steps, split=None, total=len(batch), progress=progress
    )


def default_steps(own: int) -> tuple[int, ...]:
    """Numbers of steps worth looking at around a solver's own.

    Example:
        >>> default_steps(5), default_steps(1)
        ((0, 1, 2, 5, 10), (0, 1, 2))
    """
    return tuple(sorted({own, *(k for k in (0, 1, 2, 5, 10) if k <= 2 * own)}))


def episode_classes(
    source: Episodes, indices: Sequence[int], split: Split
) -> list[tuple[str, ...]] | None:
    """The names of the classes that episodes are made of, in the order of their labels; None for a
    source without classes.
    """
    if isinstance(source, Given) and source.labels:
        return [source.labels] * len(indices)
    return source.episode_classes(indices, split) if isinstance(source, ClassEpisodes) else None


def _evaluate(
    learner: MetaLearner,
    batches: Iterable[tuple[TaskBatch, list[tuple[str, ...]] | None]],
    *,
    steps: Sequence[int] | None,
    split: str | None,
    total: int,
    progress: Progress | None,
    units: Sequence[float] = (1.0,),
) -> EvaluationReport:
    problem = learner.problem()
    if problem.objective.takes_model:
        raise TypeError(
            "This evaluation looks at outputs, which loss(model, batch) hides. Use"
            " learner.evaluate(tasks) for losses, or give the learner a loss of the form"
            " loss(output, target)."
        )
    own = int(getattr(learner.solver, "steps"))  # noqa: B009 — not in the protocol, but every solver has it
    wanted = sorted({*(default_steps(own) if steps is None else _checked(steps)), own})
    predictor = Predictor(learner)
    tallies = {(k, protocol): Tally(units) for k in wanted for protocol in predictor.protocols}
    by_class = ClassTally()
    started, done = time.perf_counter(), 0
    main = tallies[own, predictor.protocols[0]]
    for batch, names in batches:
        problem.check_tasks(batch)
        for places, k, phi in adapted(learner, batch, wanted, first=done):
            tasks = [batch[place] for place in places]
            target = torch.stack([task.query[1] for task in tasks])
            results = predictor.group(phi, tasks, stacked=len(tasks) > 1)
            for protocol, (loss, output) in zip(predictor.protocols, results, strict=True):
                tallies[k, protocol].add([done + place for place in places], loss, output, target)
            if progress is not None and k == wanted[0]:
                progress(done + max(places) + 1, total)
        for place, task in enumerate(batch):
            predicted, own_names = main.predicted[done + place], names[place] if names else None
            by_class.add(done + place, predicted, task.query[1], own_names)
        done += len(batch)
    return EvaluationReport(
        tasks=done,
        split=split,
        steps=own,
        rows=tuple(tally.result(k, protocol) for (k, protocol), tally in tallies.items()),
        classes=by_class.classes,
        task_accuracies=tuple(main.accuracies),
        task_losses=tuple(main.losses[place] for place in sorted(main.losses)),
        seconds=time.perf_counter() - started,
    )


def _checked(steps: Sequence[int]) -> Sequence[int]:
    for k in steps:
        if k < 0:
            raise ValueError(
                f"steps={k} cannot be taken. Use 0 for the initialisation itself, or a positive"
                " number."
            )
    return steps


def adapted(
    learner: MetaLearner, batch: TaskBatch, steps: Sequence[int], *, first: int
) -> Iterator[tuple[list[int], int, Params]]:
    """Groups of tasks of a batch, as places in it, with their adapted parameters after each number
    of steps; largest number first.
    """
    problem = learner.problem()

    def groups(engine: Engine) -> Iterator[tuple[list[int], int, Params]]:
        with (
            torch.enable_grad(),
            engine.session(problem, batch, width=1, seed=0, cost=Cost(), first=first) as inners,
        ):
            for inner in inners:
                for k in sorted(steps, reverse=True):
                    yield [place - first for place in inner.places], k, _phi(inner, learner, k)

    engine, _ = learner.choose_engine(batch)
    begun = False
    try:
        for group in groups(engine):
            begun = True
            yield group
    except StackingError:
        if begun or learner.engine != "auto":
            raise
        yield from groups(InplaceEngine())


def _phi(inner: Inner, learner: MetaLearner, steps: int) -> Params:
    solver = learner.solver if steps == 0 else dataclasses.replace(learner.solver, steps=steps)  # type: ignore[type-var]
    d = inner.zeros(inner.tasks) if steps == 0 else inner.solve(solver).displacement
    theta = inner.theta
    return {n: (theta[n] + leaf).to(theta[n].dtype) for n, leaf in d.items()}


class Tally:
    """Losses, and hits or errors, of one (steps, protocol) cell, task by task; `units` are those of
    the targets.
    """

    def __init__(self, units: Sequence[float] = (1.0,)) -> None:
        self._units = torch.tensor(units, dtype=torch.float64)
        self._errors = Errors()
        self.losses: dict[int, float] = {}
        # (num_query,) class numbers per task, −1 where the outputs were not finite
        self.predicted: dict[int, Tensor | None] = {}
        self._hits: dict[int, float] = {}

    def add(self, places: Sequence[int], loss: Tensor, output: Tensor, target: Any) -> None:
        """Note tasks; `loss` is `(tasks,)`, `output` `(tasks, num_query, ...)`."""
        finite = torch.isfinite(output).flatten(1).all(1) & torch.isfinite(loss)
        self.losses.update(
            zip(places, torch.where(finite, loss.double(), math.nan).tolist(), strict=True)
        )
        if _is_classification(output, target):
            found = output.argmax(-1).where(finite[:, None], -1)
            self.predicted.update(zip(places, found.cpu(), strict=True))
            hits = (found == target).double().mean(-1).tolist()
            self._hits.update(zip(places, hits, strict=True))
        else:
            self.predicted.update((place, None) for place in places)
            self._hits.update((place, math.nan) for place in places)
            if isinstance(target, Tensor) and target.shape == output.shape:
                self._errors.add(
                    *(t[finite].double().cpu() * self._units for t in (output, target))
                )

    @property
    def accuracies(self) -> list[float]:
        """Per task, in the order of the tasks."""
        return [self._hits[place] for place in sorted(self._hits)]

    def result(self, steps: int, protocol: BatchNormProtocol | None) -> StepResult:
        """The summary over tasks."""
        accuracies = sorted(self.accuracies)
        worst = accuracies[: math.ceil(len(accuracies) / 10)]
        losses = [loss for loss in self.losses.values() if not math.isnan(loss)]
        return StepResult(
            steps,
            protocol,
            *_mean_and_ci95(losses),
            *_mean_and_ci95(accuracies),
            worst_decile=sum(worst) / len(worst),
            diverged=len(self.losses) - len(losses),
            r2=self._errors.r2,
            rmse=self._errors.rmse,
        )


class Errors:
    """Squared errors of every target over the examples of all tasks, and how far the targets are
    spread (added up as Chan, Golub and LeVeque, 1983, do).
    """

    def __init__(self) -> None:
        self.count = 0
        self.squares = self.mean = self.spread = torch.zeros(1, dtype=torch.float64)

    def add(self, output: Tensor, target: Tensor) -> None:
        """Note examples `(..., targets)`."""
        output, target = output.flatten(0, -2), target.flatten(0, -2)
        if not len(target):
            return
        count, own = self.count + len(target), target.mean(0)
        apart = own - self.mean
        self.squares = self.squares + (output - target).square().sum(0)
        self.spread = (
            self.spread
            + (target - own).square().sum(0)
            + apart.square() * (self.count * len(target) / count)
        )
        self.mean, self.count = self.mean + apart * (len(target) / count), count

    @property
    def r2(self) -> float:
        """Mean over the targets."""
        return float((1 - self.squares / self.spread).mean()) if self.count else math.nan

    @property
    def rmse(self) -> tuple[float, ...]:
        """One for each target."""
        return tuple((self.squares / self.count).sqrt().tolist()) if self.count else ()


def _is_classification(output: Tensor, target: Any) -> bool:
    """Whether `(tasks, n, classes)` outputs meet `(tasks, n)` integer labels."""
    integer = isinstance(target, Tensor) and not (
        target.is_floating_point() or target.is_complex() or target.dtype == torch.bool
    )
    return integer and output.ndim == 3 and target.ndim == 2 and output.shape[2] > 1


def _mean_and_ci95(values: Sequence[float]) -> tuple[float, float]:
    found = torch.tensor(values, dtype=torch.float64)
    return float(found.mean()), ci95(found)
