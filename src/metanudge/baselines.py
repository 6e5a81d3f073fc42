"""What simple methods reach on the same tasks, so that everyone sees whether meta-learning was
worth it.

Linear methods work on the inputs, flattened (of texts, on counts of their tokens). Inputs of a fit
are centred and scaled so that their mean squared length is 1, so penalties mean the same for all
data; they are chosen on validation tasks. Everything is computed in float64 for all tasks of one
shape at once: ridge regression in closed form, logistic regression by accelerated gradient steps
preconditioned with a bound of its Hessian (Böhning 1992).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from metanudge.evaluation import ci95
from metanudge.task import Batch, Task, TaskBatch, own_inputs, tensors
from metanudge.token_bags import token_bags

PENALTIES: dict[str, tuple[float, ...]] = {
    "classification": (1e-3, 1e-2, 1e-1, 1.0),
    "regression": (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0),
}
_STEPS, _TOLERANCE = 500, 1e-4  # of logistic regression; the latter for each entry of the gradient
Kind = Literal["classification", "regression"]
_CHOSEN_ON, _POOLED, _UNTRAINED, _AT_ONCE = 32, 500, 200, 50  # tasks
_WIDEST = 1000  # inputs of the pooled methods
_NUMBERS = 1 << 23  # of inputs at once; wide ones, such as photographs, go a few tasks at a time
_Scored = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Inputs and targets of support sets, then of query sets, in; one number a task out."""


@dataclass(frozen=True)
class Linear:
    """Affine maps of inputs, one for each leading index: `(x − centre) @ weight + offset`."""

    weight: Tensor  # (..., features, outputs)
    offset: Tensor  # (..., 1, outputs)
    centre: Tensor  # (..., 1, features)

    def __call__(self, x: Tensor) -> Tensor:
        """Outputs `(..., n, outputs)` for inputs `(..., n, features)`."""
        return (x - self.centre) @ self.weight + self.offset


def ridge(x: Tensor, y: Tensor, penalty: float) -> Linear:
    """Minimises `mean ‖z w + b − y‖² + penalty ‖w‖²` over w and b, z the centred and scaled inputs.

    Args:
        x: inputs `(..., n, features)`.
        y: targets `(..., n, targets)`.
        penalty: 0 or more.

    Example:
        >>> x = torch.tensor([[0.0], [1.0], [2.0]]).double()
        >>> fit = ridge(x, 3 * x + 1, penalty=0.0)
        >>> round(float(fit(torch.tensor([[10.0]]).double())), 6)
        31.0
    """
    axes = _Axes.of(x)
    offset = y.mean(-2, keepdim=True)
    along = axes.z.mT @ (y - offset) / y.shape[-2]
    denominator = axes.variance + penalty
    # no penalty and no spread: nothing is known along this axis
    w = along / denominator.where(denominator > 0, 1.0)[..., None]
    return Linear(axes.back @ w, offset, axes.centre)


def logistic(x: Tensor, labels: Tensor, classes: int, penalty: float) -> Linear:
    """Minimises the mean cross-entropy `+ ½ penalty (‖w‖² + ‖b‖²)` of `z w + b` over w and b.

    Args:
        x: inputs `(..., n, features)`.
        labels: class numbers `(..., n)`.
        classes: how many there are.
        penalty: positive.
    """
    axes, n = _Axes.of(x), x.shape[-2]
    # z is centred, so the constant is orthogonal to it and the bound of the Hessian diagonal
    z = torch.cat([axes.z, torch.ones_like(axes.z[..., :1])], -1)
    variance = torch.cat([axes.variance, torch.ones_like(axes.variance[..., :1])], -1)
    bound = (0.5 * variance + penalty)[..., None]
    root = (penalty / bound.amax(-2, keepdim=True)).sqrt()
    momentum = (1 - root) / (1 + root)
    wanted = one_hot(labels, classes).to(x)
    w = ahead = x.new_zeros(*z.shape[:-2], z.shape[-1], classes)
    for step in range(_STEPS):
        gradient = z.mT @ ((z @ ahead).softmax(-1) - wanted) / n + penalty * ahead
        if step % 10 == 9 and bool(gradient.abs().amax() <= _TOLERANCE):
            break
        before, w = w, ahead - gradient / bound
        ahead = w + momentum * (w - before)
    return Linear(axes.back @ ahead[..., :-1, :], ahead[..., -1:, :], axes.centre)


@dataclass(frozen=True)
class _Axes:
    """Inputs along the axes on which they vary independently."""

    z: Tensor  # (..., n, axes), columns orthogonal, mean squared length 1
    variance: Tensor  # (..., axes), of the columns
    back: Tensor  # (..., features, axes): z = (x − centre) @ back
    centre: Tensor  # (..., 1, features)

    @classmethod
    def of(cls, x: Tensor) -> _Axes:
        n, features = x.shape[-2:]
        centre = x.mean(-2, keepdim=True)
        spread = x - centre
        if features <= n:
            variance, back = torch.linalg.eigh(spread.mT @ spread / n)
            variance = variance.clamp(min=0)
        else:
            variance, rows = torch.linalg.eigh(spread @ spread.mT / n)
            variance = variance.clamp(min=0)
            # below this an axis is the rounding of the products
            there = variance > 1e-12 * variance.amax(-1, keepdim=True)
            variance = variance * there
            length = (n * variance).sqrt().where(there, 1.0)
            back = spread.mT @ rows * (there / length)[..., None, :]
        total = variance.sum(-1, keepdim=True)
        total = total.where(total > 0, 1.0)
        back = back / total.sqrt()[..., None]
        return cls(spread @ back, variance / total, back, centre)


def centroids(x: Tensor, labels: Tensor, classes: int) -> Callable[[Tensor], Tensor]:
    """Scores by distance to the mean of each class: the nearest has the highest; classes without
    examples have none.
    """
    members = one_hot(labels, classes).to(x)
    counts = members.sum(-2)
    means = members.mT @ x / counts.clamp(min=1)[..., None]
    absent = (counts == 0)[..., None, :]

    def score(query: Tensor) -> Tensor:
        distance = means.square().sum(-1)[..., None, :] - 2 * query @ means.mT
        return (-distance).masked_fill(absent, -torch.inf)

    return score


@dataclass(frozen=True)
class Baselines:
    """Simple methods, their penalties chosen on validation tasks.

    Attributes:
        kind: of the tasks.
        classes: outputs in classification.
        penalties: of the method fitted to each task, and of the pooled one.
        pooled: a linear model of all training tasks together, which does not adapt; None where
            classes mean something else in every task.

    Example:
        >>> from metanudge.tasks import Sinusoid
        >>> source = Sinusoid(noise=0.1)
        >>> train, val, test = (source.batch(range(50), s) for s in ("train", "val", "test"))
        >>> scores = Baselines.fit("regression", val, train=train).scores(test)
        >>> sorted(scores), scores["ridge regression"].shape
        (['mean predictor', 'pooled ridge', 'ridge regression'], torch.Size([50]))
    """

    kind: Kind
    classes: int
    penalties: Mapping[str, float]
    pooled: Linear | None

    @classmethod
    def fit(
        cls, kind: Kind, val: TaskBatch, *, train: TaskBatch | None = None, classes: int = 0
    ) -> Baselines:
        """Choose the penalties.

        Args:
            kind: what the tasks are.
            val: tasks to choose penalties on.
            train: tasks to fit the pooled model to; None for none.
            classes: outputs in classification.
        """
        own, grid = cls(kind, classes, {}, None), PENALTIES[kind]
        alone = [own._place(val, own._fitted(penalty)) for penalty in grid]
        penalties = {own._single: grid[own._best(alone)]}
        if train is None:
            return cls(kind, classes, penalties, None)
        x, y = _rows(train)
        fits = [own._fit(x, y, penalty) for penalty in grid]
        chosen = own._best([own._place(val, own._applied(fit)) for fit in fits])
        return cls(kind, classes, penalties | {own._all: grid[chosen]}, fits[chosen])

    @property
    def _single(self) -> str:
        return "logistic regression" if self.kind == "classification" else "ridge regression"

    @property
    def _all(self) -> str:
        return "pooled logistic" if self.kind == "classification" else "pooled ridge"

    def scores(self, batch: TaskBatch) -> dict[str, Tensor]:
        """Per method one number for each task: accuracy on the query set, or for regression the
        mean squared error.
        """
        found = {self._single: self._fitted(self.penalties[self._single])}
        if self.kind == "classification":
            found["nearest centroid"] = lambda x, y, q, t: self._score(
                centroids(x, y, self.classes)(q), t
            )
            found["chance"] = self._most_frequent
        else:
            found["mean predictor"] = lambda x, y, q, t: self._score(y.mean(-2, keepdim=True), t)
        if self.pooled is not None:
            found[self._all] = self._applied(self.pooled)
        return {name: self._place(batch, function) for name, function in found.items()}

    def _fit(self, x: Tensor, y: Tensor, penalty: float) -> Linear:
        if self.kind == "regression":
            return ridge(x, y, penalty)
        return logistic(x, y, self.classes, penalty)

    def _fitted(self, penalty: float) -> _Scored:
        return lambda x, y, q, t: self._score(self._fit(x, y, penalty)(q), t)

    def _applied(self, fit: Linear) -> _Scored:
        return lambda x, y, q, t: self._score(fit(q), t)

    def _most_frequent(self, x: Tensor, y: Tensor, q: Tensor, t: Tensor) -> Tensor:
        """The class that the support set has most of; 1 / classes where all are as frequent."""
        return self._score(one_hot(y, self.classes).sum(-2, keepdim=True).double(), t)

    def _score(self, output: Tensor, target: Tensor) -> Tensor:
        if self.kind == "classification":
            return (output.argmax(-1) == target).double().mean(-1)
        return (output - target).square().mean((-2, -1))

    def _best(self, scores: Sequence[Tensor]) -> int:
        means = torch.stack([score.mean() for score in scores])
        return int(means.argmax() if self.kind == "classification" else means.argmin())

    def _place(self, batch: TaskBatch, function: _Scored) -> Tensor:
        """The scores of all tasks, in their order."""
        column = torch.zeros(len(batch), dtype=torch.float64)
        for stack in batch.stacks:
            size = max(1, _NUMBERS // max(1, _numbers(stack.task(0))))
            for first in range(0, len(stack), size):
                few = stack[first : first + size]
                values = function(*_pair(few.support), *_pair(few.query))
                column[list(few.places)] = values.double().cpu()
        return column


class Source(Protocol):
    """What tasks are measured of: `metanudge.tasks.Episodes`."""

    @property
    def kind(self) -> Kind:
        """What the tasks are."""

    @property
    def num_outputs(self) -> int:
        """Outputs a model needs."""

    def batch(self, indices: Iterable[int], split: Any = "train") -> TaskBatch:
        """Episodes."""

    def num_tasks(self, split: Any) -> int | None:
        """How many different ones there are."""

    def pooled(self, count: int) -> TaskBatch | None:
        """Training tasks to be thrown together."""


def measure(
    source: Source,
    count: int,
    split: str = "test",
    *,
    untrained: Callable[[TaskBatch], Tensor] | None = None,
) -> dict[str, Tensor]:
    """The scores of all baselines on episodes 0 … count−1 of a split, task by task.

    Args:
        source: where the tasks come from; penalties are chosen on its validation tasks (training
            tasks where it has none, others of the split where it has neither).
        count: of tasks.
        split: which to measure on.
        untrained: scores of the untrained network, adapted; measured on the first 200 tasks.
    """
    few = min(_CHOSEN_ON, source.num_tasks("val") or _CHOSEN_ON)
    val = _chosen_on(source, few, count, split)
    train = source.pooled(_POOLED)
    if train is not None and _width(train) > _WIDEST:
        train = None
    fitted = Baselines.fit(source.kind, val, train=train, classes=source.num_outputs)
    columns: dict[str, list[Tensor]] = {}
    once = min(_AT_ONCE, max(1, _NUMBERS // max(1, _numbers(val[0]))))
    for first in range(0, count, once):
        batch = source.batch(range(first, min(first + once, count)), split)
        found = fitted.scores(batch)
        if untrained is not None and first < _UNTRAINED:
            found["untrained network, adapted"] = untrained(batch)
        for name, scores in found.items():
            columns.setdefault(name, []).append(scores)
    return {name: torch.cat(parts) for name, parts in columns.items()}


def _chosen_on(source: Source, few: int, count: int, split: str) -> TaskBatch:
    for name in ("val", "train"):
        with suppress(ValueError):  # this split has no tasks
            return source.batch(range(few), name)
    return source.batch(range(count, count + few), split)


@dataclass(frozen=True)
class Comparison:
    """A learner beside baselines on the same tasks; a baseline may know the first of them only.

    Attributes:
        kind: accuracies are compared in classification, else losses.
        own: the learner's, task by task.
        others: those of the baselines.

    Example:
        >>> own, other = torch.tensor([0.5, 0.6, 0.5, 0.6]), torch.tensor([0.8, 0.7, 0.7, 0.8])
        >>> Comparison("classification", own, {"centroid": other}).verdict()
        'centroid is better here: 75.00% against 55.00%, by 20.00% ± 8.00% on the same tasks.'
    """

    kind: Kind
    own: Tensor
    others: Mapping[str, Tensor]

    def as_dict(self) -> dict[str, dict[str, float]]:
        """For each baseline its mean with a 95 % interval, and how much better the learner is,
        compared task by task.
        """
        return {
            name: {
                "tasks": len(scores),
                self._what: float(scores.mean()),
                f"{self._what}_ci95": ci95(scores),
                "learner_better_by": float(self._gain(scores).mean()),
                "learner_better_by_ci95": ci95(self._gain(scores)),
            }
            for name, scores in self._sorted()
        }

    def rows(self) -> list[tuple[str, str]]:
        """The baselines for a table, best first."""
        return [(name, f"{self._number(scores.mean())} ± {self._number(ci95(scores))}")
                for name, scores in self._sorted()]  # fmt: skip

    def verdict(self) -> str | None:
        """A sentence where a baseline is better than the learner beyond the interval; None where
        none is.
        """
        if not bool(self.own.isfinite().all()):
            many = int((~self.own.isfinite()).sum())
            return (
                f"The learner diverged on {many} of {len(self.own)} tasks; the baselines did not."
            )
        for name, scores in self._sorted():
            gain = self._gain(scores)
            better, interval = -float(gain.mean()), ci95(gain)
            if better > interval:
                own = self.own[: len(scores)].mean()
                return (
                    f"{name} is better here: {self._number(scores.mean())} against"
                    f" {self._number(own)}, by {self._number(better)} ± {self._number(interval)} on"
                    " the same tasks."
                )
        return None

    @property
    def _what(self) -> str:
        return "accuracy" if self.kind == "classification" else "loss"

    def _sorted(self) -> list[tuple[str, Tensor]]:
        worse = 1.0 if self.kind == "regression" else -1.0
        return sorted(self.others.items(), key=lambda item: worse * float(item[1].mean()))

    def _gain(self, scores: Tensor) -> Tensor:
        difference = self.own[: len(scores)] - scores
        return difference if self.kind == "classification" else -difference

    def _number(self, value: float | Tensor) -> str:
        return f"{float(value):.2%}" if self.kind == "classification" else f"{float(value):.4g}"


def _numbers(task: Task) -> int:
    """How many numbers the inputs of a task are."""
    return sum(tensors(part)[0].numel() for part in (task.support, task.query))


def _width(batch: TaskBatch) -> int:
    return tensors(batch[0].support)[0][0].numel()


def _pair(batch: Batch) -> tuple[Tensor, Tensor]:
    """Inputs `(tasks, n, features)`, labels `(tasks, n)` or targets `(tasks, n, targets)`."""
    inputs, y = own_inputs(batch[0]), batch[1]
    x, y = (token_bags(inputs) if isinstance(inputs, Mapping) else inputs).cpu(), y.cpu()
    return x.flatten(2).double(), y.double() if y.is_floating_point() else y


def _rows(batch: TaskBatch) -> tuple[Tensor, Tensor]:
    """All examples of all tasks."""
    pairs = [_pair(part) for stack in batch.stacks for part in (stack.support, stack.query)]
    x, y = zip(*pairs, strict=True)
    return torch.cat([t.flatten(0, 1) for t in x]), torch.cat([t.flatten(0, 1) for t in y])
