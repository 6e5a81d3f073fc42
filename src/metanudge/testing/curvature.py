"""How curved inner problems are: what a stable inner learning rate depends on."""

from __future__ import annotations

import torch

from metanudge.engines import Cost, Inner, StackedEngine
from metanudge.learner import MetaLearner
from metanudge.params import norm, per_row
from metanudge.task import TaskBatch


def curvature(learner: MetaLearner, tasks: TaskBatch) -> float:
    """The largest curvature of the tasks' support losses at θ, by power iteration."""
    with StackedEngine().session(learner.problem(), tasks, width=1, seed=0, cost=Cost()) as groups:
        return max(_largest_curvature(inner) for inner in groups)


def _largest_curvature(inner: Inner) -> float:
    theta, generator = inner.zeros(inner.tasks), torch.Generator().manual_seed(0)
    v = {
        n: torch.randn(leaf.shape, dtype=leaf.dtype, generator=generator).to(leaf.device)
        for n, leaf in theta.items()
    }
    for _ in range(30):
        size = norm(v)
        v = {n: leaf / per_row(size, leaf) for n, leaf in v.items()}
        _, _, v = inner.data_hvp(theta, v, None, 0, None)
    return float(norm(v).max())
