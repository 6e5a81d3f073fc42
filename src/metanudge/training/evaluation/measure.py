"""The evaluation itself: draw tasks, adapt, predict, count."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from metanudge.learner import MetaLearner
from metanudge.task import Task, TaskBatch
from metanudge.tasks import Episodes
from metanudge.tasks.classification import ClassEpisodes
from metanudge.tasks.episodes import Split, check_count, check_split
from metanudge.training.evaluation.adaptation import adapted
from metanudge.training.evaluation.predict import Predictor
from metanudge.training.evaluation.report import EvaluationReport
from metanudge.training.evaluation.tally import ClassTally, Tally

if TYPE_CHECKING:
    from metanudge.training.runs import Run

Progress = Callable[[int, int | None], None]
TASKS_AT_ONCE = 50


def evaluate_run(
    run: Run,
    *,
    tasks: int = 1000,
    split: Split = "test",
    steps: Sequence[int] | None = None,
    progress: Progress | None = None,
) -> EvaluationReport:
    """Evaluate a run's learner on episodes 0 … tasks−1 of a split of the run's own data.

    Args:
        run: from `metanudge.training.runs.load`.
        tasks: number of tasks; the confidence interval shrinks with its root.
        split: "train", "val" or "test".
        steps: numbers of adaptation steps to measure; default: a few around the solver's own, which
            is always among them.
        progress: called with (tasks done, tasks in all) as it goes.
    """
    check_count("tasks", tasks, why="An evaluation needs at least one task; 1000 are usual.")
    check_split(split)
    source: Episodes = run.source

    def batches() -> Iterator[tuple[TaskBatch, list[tuple[str, ...]] | None]]:
        for first in range(0, tasks, TASKS_AT_ONCE):
            indices = range(first, min(first + TASKS_AT_ONCE, tasks))
            yield source.batch(indices, split), episode_classes(source, indices, split)

    with run.precision():
        return _evaluate(
            run.learner, batches(), steps=steps, split=split, total=tasks, progress=progress
        )


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
    return source.episode_classes(indices, split) if isinstance(source, ClassEpisodes) else None


def _evaluate(
    learner: MetaLearner,
    batches: Iterable[tuple[TaskBatch, list[tuple[str, ...]] | None]],
    *,
    steps: Sequence[int] | None,
    split: str | None,
    total: int,
    progress: Progress | None,
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
    tallies = {(k, protocol): Tally() for k in wanted for protocol in predictor.protocols}
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
            by_class.add(main.hits[done + place], task.query[1], names[place] if names else None)
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
