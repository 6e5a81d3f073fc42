"""What simple methods reach on the tasks of the experiment on intents, on the same features."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from metanudge.baselines import centroids, logistic, ridge
from metanudge.tasks import Labelled
from metanudge.tasks.episodes import Split
from metanudge_lab.experiments.base import Row

LOGISTIC, RIDGE, CENTROID = "logistic regression", "ridge regression", "nearest centroid"
BASELINES = (LOGISTIC, RIDGE, CENTROID)
PENALTIES = (1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
_AT_ONCE = 50  # tasks
_Fit = Callable[[Tensor, Tensor, int, float], Callable[[Tensor], Tensor]]


def _ridge(x: Tensor, labels: Tensor, ways: int, penalty: float) -> Callable[[Tensor], Tensor]:
    """On 0 and 1 as targets."""
    return ridge(x, one_hot(labels, ways).to(x), penalty)


_FITS: dict[str, _Fit] = {
    LOGISTIC: logistic,
    RIDGE: _ridge,
    CENTROID: lambda x, labels, ways, penalty: centroids(x, labels, ways),
}


def choose_penalty(name: str, source: Labelled, tasks: int) -> tuple[float, list[Row]]:
    """The one with the best validation accuracy, and what was tried; the nearest centroid has
    none.
    """
    tried: list[Row] = [
        {"kind": "tuning", "penalty": penalty,
         "accuracy": float(accuracies(name, penalty, source, "val", tasks).mean())}
        for penalty in (PENALTIES if name != CENTROID else (0.0,))
    ]  # fmt: skip
    best = max(tried, key=lambda row: float(row["accuracy"]))
    return float(best["penalty"]), tried


def accuracies(name: str, penalty: float, source: Labelled, split: Split, tasks: int) -> Tensor:
    """On the query sets of tasks 0 … tasks − 1, computed in float64."""
    found = []
    for first in range(0, tasks, _AT_ONCE):
        batch = source.batch(range(first, min(first + _AT_ONCE, tasks)), split)
        for stack in batch.stacks:
            (x, y), (q, t) = stack.support, stack.query
            scores = _FITS[name](x.cpu().double(), y.cpu(), source.ways, penalty)(q.cpu().double())
            found.append((scores.argmax(-1) == t.cpu()).double().mean(-1))
    return torch.cat(found)
