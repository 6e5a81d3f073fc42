"""How well a learner does on tasks it has never seen: accuracy with its confidence interval, by class and by number of steps.

Models with BatchNorm are judged twice, because the two numbers differ and papers rarely say which one they give:

- *transductive*: query examples are normalised with the statistics of the whole query set (the usual MAML protocol); a prediction
  then depends on the other queries.
- *inductive*: query examples are normalised with the statistics of the support set under the adapted weights; a prediction depends
  on the support set and the one example only, as it does when the learner is used.

Cost per task: one solve per entry of `steps`, and per entry one forward pass of the query set (three passes with BatchNorm).
"""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from metanudge.engines import Cost, Engine, Inner, InplaceEngine, StackingError
from metanudge.learner import MetaLearner
from metanudge.params import Params
from metanudge.problem import Objective
from metanudge.task import Batch, Task, TaskBatch
from metanudge.tasks import Episodes
from metanudge.tasks.classification import ClassEpisodes
from metanudge.tasks.draws import episode_keys, root_key
from metanudge.tasks.episodes import SPLITS, Split, check_count, check_split

if TYPE_CHECKING:
    from pathlib import Path

    from metanudge.training.runs import Run

BatchNormProtocol = Literal["transductive", "inductive"]
Progress = Callable[[int, int | None], None]
TASKS_AT_ONCE = 50


@dataclass(frozen=True)
class StepResult:
    """Results after some number of adaptation steps, over all tasks.

    Attributes:
        steps: adaptation steps taken; 0 is the initialisation itself.
        batch_norm: how BatchNorm layers normalised the queries; None for a model without them.
        loss, loss_ci95: mean query loss and the half-width of its 95 % confidence interval over tasks.
        accuracy, accuracy_ci95: the same for the accuracy; NaN for regression.
        worst_decile: mean accuracy over the tenth of the tasks that went worst.
        diverged: tasks whose outputs were not finite; their examples count as wrong, and their loss is left out.
    """

    steps: int
    batch_norm: BatchNormProtocol | None
    loss: float
    loss_ci95: float
    accuracy: float
    accuracy_ci95: float
    worst_decile: float
    diverged: int


@dataclass(frozen=True)
class ClassAccuracy:
    """Accuracy on the query examples of one class, over all the tasks it occurred in."""

    name: str
    accuracy: float
    examples: int


@dataclass(frozen=True)
class EvaluationReport:
    """What `evaluate_run` and `evaluate_tasks` found; `str` of it is a table.

    Attributes:
        tasks: number of tasks.
        split: the split they were drawn from, if from a source.
        steps: the solver's own number of steps, at which `accuracy`, `classes` and `task_accuracies` are taken.
        rows: one per number of steps and BatchNorm protocol.
        classes: per class, worst first; empty for regression. By place in the episode ("label 0") where classes have no names.
        task_accuracies, task_losses: per task, for comparisons of two learners task by task.
        seconds: how long it took.
    """

    tasks: int
    split: str | None
    steps: int
    rows: tuple[StepResult, ...]
    classes: tuple[ClassAccuracy, ...]
    task_accuracies: tuple[float, ...]
    task_losses: tuple[float, ...]
    seconds: float

    def at(self, steps: int, batch_norm: BatchNormProtocol | None = None) -> StepResult:
        """The row for a number of steps; of a BatchNorm model the transductive one unless `batch_norm` says otherwise."""
        for row in self.rows:
            if row.steps == steps and batch_norm in (None, row.batch_norm):
                return row
        known = sorted({row.steps for row in self.rows})
        raise ValueError(f"There is no result for steps={steps}, batch_norm={batch_norm!r}. Steps measured: {known}.")

    @property
    def main(self) -> StepResult:
        """The row at the solver's own number of steps."""
        return self.at(self.steps)

    @property
    def classification(self) -> bool:
        """Whether accuracies mean anything."""
        return not math.isnan(self.main.accuracy)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON-ready values; NaN becomes None."""
        plain: dict[str, Any] = _without_nan(dataclasses.asdict(self))
        return plain

    def __str__(self) -> str:
        return "\n".join([*self._headline(), "", *self._table(), *self._class_lines()])

    def _headline(self) -> Iterator[str]:
        where = f"{self.split} tasks" if self.split else "tasks"
        for row in self.rows:
            if row.steps == self.steps:
                how = f", BatchNorm {row.batch_norm}" if row.batch_norm else ""
                value = (
                    f"accuracy {row.accuracy:.2%} ± {row.accuracy_ci95:.2%}, worst decile {row.worst_decile:.2%}"
                    if self.classification
                    else f"query loss {row.loss:.4g} ± {row.loss_ci95:.2g}"
                )
                yield f"{value}  ({self.tasks} {where}, {self.steps} steps{how}, 95 % confidence)"

    def _table(self) -> Iterator[str]:
        """One line per number of steps, the BatchNorm protocols side by side."""
        protocols = list(dict.fromkeys(row.batch_norm for row in self.rows))
        titles = "accuracy           worst decile      loss" if self.classification else "query loss        "
        if protocols != [None]:
            yield "       " + "   │ ".join(f"{f'BatchNorm {protocol}':{len(titles)}}" for protocol in protocols).rstrip()
        yield "steps  " + "   │ ".join([titles] * len(protocols)).rstrip()
        for steps in dict.fromkeys(row.steps for row in self.rows):
            rows = [row for row in self.rows if row.steps == steps]
            line = f"{steps:5d}  " + "   │ ".join(self._cells(row) for row in rows)
            line += "   ← as trained" if steps == self.steps else ""
            diverged = max(row.diverged for row in rows)
            yield line.rstrip() + (f"   diverged on {diverged} of {self.tasks} tasks" if diverged else "")

    def _cells(self, row: StepResult) -> str:
        if not self.classification:
            return f"{row.loss:8.4g} ± {row.loss_ci95:<7.2g}"
        return f"{row.accuracy:7.2%} ± {row.accuracy_ci95:6.2%}   {row.worst_decile:12.2%}  {row.loss:8.4g}"

    def _class_lines(self) -> Iterator[str]:
        if not self.classes:
            return
        shown = self.classes if len(self.classes) <= 10 else (*self.classes[:5], None, *self.classes[-3:])
        width = max(len(c.name) for c in shown if c)
        yield ""
        yield f"accuracy by class, worst first ({len(self.classes)} classes)"
        for c in shown:
            yield f"  {c.name:{width}}  {c.accuracy:7.2%}  of {c.examples} examples" if c else "  …"


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
        steps: numbers of adaptation steps to measure; default: a few around the solver's own, which is always among them.
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
        return _evaluate(run.learner, batches(), steps=steps, split=split, total=tasks, progress=progress)


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
        raise ValueError(f"classes has {len(classes)} entries for {len(batch)} tasks. Give the class names of every task.")

    def batches() -> Iterator[tuple[TaskBatch, list[tuple[str, ...]] | None]]:
        for first in range(0, len(batch), TASKS_AT_ONCE):
            chosen = slice(first, first + TASKS_AT_ONCE)
            yield batch[chosen], None if classes is None else [tuple(names) for names in classes[chosen]]

    return _evaluate(learner, batches(), steps=steps, split=None, total=len(batch), progress=progress)


def default_steps(own: int) -> tuple[int, ...]:
    """Numbers of steps worth looking at around a solver's own.

    Example:
        >>> default_steps(5), default_steps(1)
        ((0, 1, 2, 5, 10), (0, 1, 2))
    """
    return tuple(sorted({own, *(k for k in (0, 1, 2, 5, 10) if k <= 2 * own)}))


def episode_classes(source: Episodes, indices: Sequence[int], split: Split) -> list[tuple[str, ...]] | None:
    """The names of the classes that episodes are made of, in the order of their labels; None for a source without classes."""
    if not isinstance(source, ClassEpisodes):
        return None
    keys = episode_keys(root_key(source.seed, SPLITS.index(split)), np.asarray(indices, dtype=np.int64))
    pool = source._pools[split]
    class_of_row = {
        int(row): c for c, (start, n) in enumerate(zip(pool.starts, pool.counts, strict=True)) for row in pool.rows[start : start + n]
    }
    first_of_each = source._rows(keys, split)[..., 0]  # (tasks, ways)
    return [tuple(pool.names[class_of_row[int(row)]] for row in rows) for rows in first_of_each]


def plot_steps(report: EvaluationReport, path: Path | str, *, title: str = "") -> None:
    """Draw accuracy (or query loss) against the number of adaptation steps, with confidence intervals, into an image file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(5.5, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    what = "accuracy" if report.classification else "loss"
    for protocol in dict.fromkeys(row.batch_norm for row in report.rows):
        rows = [row for row in report.rows if row.batch_norm == protocol]
        values = [getattr(row, what) for row in rows]
        errors = [getattr(row, f"{what}_ci95") for row in rows]
        label = f"BatchNorm {protocol}" if protocol else "mean, 95 % confidence"
        axes.errorbar([row.steps for row in rows], values, yerr=errors, marker="o", markersize=4, capsize=3, label=label)
    axes.axvline(report.steps, color="0.7", linewidth=1, linestyle=":", zorder=0, label="as trained")
    axes.set_xlabel("adaptation steps")
    axes.set_ylabel("query accuracy" if report.classification else "query loss")
    axes.set_title(title or f"{report.tasks} {report.split or ''} tasks")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def with_support_statistics(model: nn.Module, inputs: Any) -> nn.Module:
    """A copy of an adapted model in evaluation mode, its BatchNorm layers normalising with the statistics of the support set.

    This is the inductive protocol: what the copy says about an example does not depend on the other examples it is given.

    Args:
        model: an adapted model, as `MetaLearner.adapt` returns it.
        inputs: the inputs of the support set.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).double()
        >>> x = torch.tensor([[0.0, 1.0], [2.0, 0.0], [1.0, 3.0]], dtype=torch.float64)
        >>> frozen = with_support_statistics(net, x)
        >>> bool(torch.allclose(frozen(x), net(x))), bool(torch.allclose(frozen(x[:1]), frozen(x)[:1]))
        (True, True)
    """
    statistics = SupportStatistics(model)
    outputs = _Outputs(Objective(statistics.model, nn.functional.cross_entropy))
    measured = statistics.measure(lambda: outputs((inputs, None)))
    buffers = dict(statistics.model.named_buffers())
    with torch.no_grad():
        for name, value in measured.items():
            buffers[name].copy_(value)
    for norm in statistics.norms.values():
        norm.track_running_stats = True
    return statistics.model


class SupportStatistics:
    """A copy of a model that predicts in either BatchNorm protocol without touching any running statistics.

    Dropout is off in predictions. A layer that is in evaluation mode in the original is frozen and left alone.
    """

    def __init__(self, model: nn.Module) -> None:
        frozen = {name for name, m in model.named_modules() if isinstance(m, _BatchNorm) and not m.training}
        self.model = copy.deepcopy(model).eval()
        self.norms = {n: m for n, m in self.model.named_modules() if isinstance(m, _BatchNorm) and n not in frozen}
        for norm in self.norms.values():
            norm.track_running_stats = False  # in training mode: the batch's statistics, and no buffer is written
            if norm.running_mean is None:
                like = next(iter(self.model.parameters()))
                norm.register_buffer("running_mean", like.new_zeros(norm.num_features))
                norm.register_buffer("running_var", like.new_ones(norm.num_features))

    @contextmanager
    def batch_statistics(self) -> Iterator[None]:
        """BatchNorm normalises with the batch it is given."""
        for norm in self.norms.values():
            norm.training = True
        try:
            yield
        finally:
            for norm in self.norms.values():
                norm.training = False

    def measure(self, forward: Callable[[], Any]) -> dict[str, Tensor]:
        """Mean and variance that every BatchNorm layer sees in one forward pass, keyed like `state_dict`.

        The variance is the one the layer divides by (biased), so that evaluation mode reproduces the pass exactly.
        """
        measured: dict[str, Tensor] = {}

        def hook(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
            def note(_: nn.Module, inputs: tuple[Any, ...]) -> None:
                x: Tensor = inputs[0].detach()
                x = x.to(torch.promote_types(x.dtype, torch.float32))  # activations may be bf16
                axes = [axis for axis in range(x.ndim) if axis != 1]
                measured[f"{name}.running_mean"] = x.mean(axes)
                measured[f"{name}.running_var"] = x.var(axes, unbiased=False)

            return note

        handles = [norm.register_forward_pre_hook(hook(name)) for name, norm in self.norms.items()]
        try:
            with self.batch_statistics(), torch.no_grad():
                forward()
        finally:
            for handle in handles:
                handle.remove()
        return measured


class _Outputs(nn.Module):
    """Batch in, model output out, for whatever form of inputs `Objective` knows."""

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.objective = objective

    def forward(self, batch: Batch) -> Any:
        """The model's output."""
        return self.objective.output(batch)[0]


class _Predictor:
    """Query loss and output of one task at φ, in every protocol that applies to the model."""

    PREFIX = "objective.model."

    def __init__(self, learner: MetaLearner) -> None:
        self._statistics = SupportStatistics(learner.model)
        self._outputs = _Outputs(Objective(self._statistics.model, learner.loss)).eval()
        self._loss = learner.loss
        self._cannot_stack = False
        self.protocols: tuple[BatchNormProtocol | None, ...] = ("transductive", "inductive") if self._statistics.norms else (None,)

    def task(self, phi: Params, support: Batch, query: Batch) -> list[tuple[Tensor, Tensor]]:
        """(loss, output) per protocol; works inside `vmap` and outside."""
        parameters = {self.PREFIX + n: leaf for n, leaf in phi.items()}
        found = []
        if None not in self.protocols:
            with self._statistics.batch_statistics():
                found.append(functional_call(self._outputs, parameters, (query,)))
            measured = self._statistics.measure(lambda: functional_call(self._outputs, parameters, (support,)))
            parameters |= {self.PREFIX + n: leaf for n, leaf in measured.items()}
        found.append(functional_call(self._outputs, parameters, (query,)))
        return [(self._loss(output, query[1]), output) for output in found]

    def group(self, phi: Params, tasks: Sequence[Task], *, stacked: bool) -> list[tuple[Tensor, Tensor]]:
        """The same for tasks of equal shape; every tensor has a leading task axis."""
        with torch.no_grad():
            if stacked and len(tasks) > 1 and not self._cannot_stack:
                (stack,) = TaskBatch.of(tasks).stacks
                try:
                    return vmap(self.task, randomness="same")(phi, stack.support, stack.query)
                except RuntimeError:
                    self._cannot_stack = True  # the loop below gives the same numbers, or a better error
            each = [self.task({n: leaf[r] for n, leaf in phi.items()}, t.support, t.query) for r, t in enumerate(tasks)]
        columns = zip(*each, strict=True)
        return [(torch.stack([c[0] for c in column]), torch.stack([c[1] for c in column])) for column in columns]


class _Tally:
    """Losses and hits of one (steps, protocol) cell, task by task."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.hits: dict[int, Tensor | None] = {}  # (num_query,) bool per task

    def add(self, places: Sequence[int], loss: Tensor, output: Tensor, target: Any) -> None:
        """Note tasks; `loss` is `(tasks,)`, `output` `(tasks, num_query, ...)`."""
        finite = torch.isfinite(output).flatten(1).all(1) & torch.isfinite(loss)
        self.losses.update(zip(places, torch.where(finite, loss.double(), math.nan).tolist(), strict=True))
        if _is_classification(output, target):
            hits = (output.argmax(-1) == target) & finite[:, None]
            self.hits.update(zip(places, hits.cpu(), strict=True))
        else:
            self.hits.update((place, None) for place in places)

    @property
    def accuracies(self) -> list[float]:
        """Per task, in the order of the tasks."""
        return [math.nan if h is None else float(h.double().mean()) for _, h in sorted(self.hits.items(), key=lambda item: item[0])]

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
        )


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
            "This evaluation looks at outputs, which loss(model, batch) hides. Use learner.evaluate(tasks) for losses, or "
            "give the learner a loss of the form loss(output, target)."
        )
    own = int(getattr(learner.solver, "steps"))  # noqa: B009 — not in the protocol, but every solver has it
    wanted = sorted({*(default_steps(own) if steps is None else _checked(steps)), own})
    predictor = _Predictor(learner)
    tallies = {(k, protocol): _Tally() for k in wanted for protocol in predictor.protocols}
    by_class: dict[str, list[int]] = {}
    started, done = time.perf_counter(), 0
    for batch, names in batches:
        problem.check_tasks(batch)
        for places, k, phi in _adapted(learner, batch, wanted, first=done):
            tasks = [batch[place] for place in places]
            target = torch.stack([task.query[1] for task in tasks])
            results = predictor.group(phi, tasks, stacked=len(tasks) > 1)
            for protocol, (loss, output) in zip(predictor.protocols, results, strict=True):
                tallies[k, protocol].add([done + place for place in places], loss, output, target)
            if progress is not None and k == wanted[0]:
                progress(done + max(places) + 1, total)
        main = tallies[own, predictor.protocols[0]]
        for place, task in enumerate(batch):
            _count_classes(by_class, main.hits[done + place], task.query[1], names[place] if names else None)
        done += len(batch)
    main_tally = tallies[own, predictor.protocols[0]]
    classes = [ClassAccuracy(name, hits / count, count) for name, (hits, count) in by_class.items()]
    return EvaluationReport(
        tasks=done,
        split=split,
        steps=own,
        rows=tuple(tally.result(k, protocol) for (k, protocol), tally in tallies.items()),
        classes=tuple(sorted(classes, key=lambda c: (c.accuracy, c.name))),
        task_accuracies=tuple(main_tally.accuracies),
        task_losses=tuple(main_tally.losses[place] for place in sorted(main_tally.losses)),
        seconds=time.perf_counter() - started,
    )


def _adapted(learner: MetaLearner, batch: TaskBatch, steps: Sequence[int], *, first: int) -> Iterator[tuple[list[int], int, Params]]:
    """Groups of tasks of a batch, as places in it, with their adapted parameters after each number of steps; largest number first."""
    problem = learner.problem()

    def groups(engine: Engine) -> Iterator[tuple[list[int], int, Params]]:
        with torch.enable_grad(), engine.session(problem, batch, width=1, seed=0, cost=Cost(), first=first) as inners:
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
    theta = _theta(inner)
    return {n: (theta[n] + leaf).to(theta[n].dtype) for n, leaf in d.items()}


def _theta(inner: Inner) -> Params:
    # While the in-place engine is at work the module holds some φ; θ is what its guard keeps.
    guard = getattr(inner, "_guard", None)
    return inner.problem.theta if guard is None else guard.theta


def _count_classes(by_class: dict[str, list[int]], hits: Tensor | None, target: Tensor, names: Sequence[str] | None) -> None:
    if hits is None:
        return
    for label, hit in zip(target.tolist(), hits.tolist(), strict=True):
        counts = by_class.setdefault(names[label] if names else f"label {label}", [0, 0])
        counts[0] += hit
        counts[1] += 1


def _is_classification(output: Tensor, target: Any) -> bool:
    """Whether `(tasks, n, classes)` outputs meet `(tasks, n)` integer labels."""
    integer = isinstance(target, Tensor) and not (target.is_floating_point() or target.is_complex() or target.dtype == torch.bool)
    return integer and output.ndim == 3 and target.ndim == 2 and output.shape[2] > 1


def _mean_and_ci95(values: Sequence[float]) -> tuple[float, float]:
    n = len(values)
    if n == 0:
        return math.nan, math.nan
    mean = math.fsum(values) / n
    if n == 1:
        return mean, math.nan
    return mean, 1.96 * math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)


def _checked(steps: Sequence[int]) -> Sequence[int]:
    for k in steps:
        if k < 0:
            raise ValueError(f"steps={k} cannot be taken. Use 0 for the initialisation itself, or a positive number.")
    return steps


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
