"""Counting losses and hits task by task, and their summary with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from metanudge.evaluation import ci95
from metanudge.training.evaluation.report import BatchNormProtocol, ClassAccuracy, StepResult


class Tally:
    """Losses and hits of one (steps, protocol) cell, task by task."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}
        self.hits: dict[int, Tensor | None] = {}  # (num_query,) bool per task

    def add(self, places: Sequence[int], loss: Tensor, output: Tensor, target: Any) -> None:
        """Note tasks; `loss` is `(tasks,)`, `output` `(tasks, num_query, ...)`."""
        finite = torch.isfinite(output).flatten(1).all(1) & torch.isfinite(loss)
        self.losses.update(
            zip(places, torch.where(finite, loss.double(), math.nan).tolist(), strict=True)
        )
        if _is_classification(output, target):
            hits = (output.argmax(-1) == target) & finite[:, None]
            self.hits.update(zip(places, hits.cpu(), strict=True))
        else:
            self.hits.update((place, None) for place in places)

    @property
    def accuracies(self) -> list[float]:
        """Per task, in the order of the tasks."""
        return [
            math.nan if h is None else float(h.double().mean())
            for _, h in sorted(self.hits.items(), key=lambda item: item[0])
        ]

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


class ClassTally:
    """Hits and examples of every class, over all tasks."""

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}  # name: [hits, examples]

    def add(self, hits: Tensor | None, target: Tensor, names: Sequence[str] | None) -> None:
        """Note the query examples of one task; without `hits` (regression) nothing."""
        if hits is None:
            return
        for label, hit in zip(target.tolist(), hits.tolist(), strict=True):
            counts = self._counts.setdefault(names[label] if names else f"label {label}", [0, 0])
            counts[0] += hit
            counts[1] += 1

    @property
    def classes(self) -> tuple[ClassAccuracy, ...]:
        """Worst first."""
        found = [
            ClassAccuracy(name, hits / count, count) for name, (hits, count) in self._counts.items()
        ]
        return tuple(sorted(found, key=lambda c: (c.accuracy, c.name)))


def _is_classification(output: Tensor, target: Any) -> bool:
    """Whether `(tasks, n, classes)` outputs meet `(tasks, n)` integer labels."""
    integer = isinstance(target, Tensor) and not (
        target.is_floating_point() or target.is_complex() or target.dtype == torch.bool
    )
    return integer and output.ndim == 3 and target.ndim == 2 and output.shape[2] > 1


def _mean_and_ci95(values: Sequence[float]) -> tuple[float, float]:
    found = torch.tensor(values, dtype=torch.float64)
    return float(found.mean()), ci95(found)
