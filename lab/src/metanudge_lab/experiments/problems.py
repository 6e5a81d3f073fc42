"""A network with and without kinks, and what the inner problems look like around θ or a
solution.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import metanudge as mn
from metanudge.engines import Cost, StackedEngine
from metanudge.engines.vmapped import StackedInner
from metanudge.params import flatten, norm
from metanudge.solvers import Solver
from metanudge.task import TaskBatch
from metanudge.testing.problems import Setup, classification_tasks, seeded


def conv_net(*, smooth: bool, channels: int = 4, size: int = 8) -> nn.Module:
    """Two convolutions and three classes: with softplus and average pooling, or with ReLU and
    max-pooling, and else the same.
    """
    activation, pooling = (nn.Softplus, nn.AvgPool2d) if smooth else (nn.ReLU, nn.MaxPool2d)
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        activation(),
        pooling(2),
        nn.Conv2d(channels, channels, 3, padding=1),
        activation(),
        pooling(2),
        nn.Flatten(),
        nn.Linear((size // 4) ** 2 * channels, 3),
    )


def small_conv_net(
    *,
    smooth: bool,
    channels: int = 4,
    tasks: int = 3,
    support: int = 15,
    query: int = 30,
    seed: int = 0,
) -> Setup:
    """`conv_net` on 8 × 8 images."""
    return Setup(
        seeded(seed, lambda: conv_net(smooth=smooth, channels=channels)),
        F.cross_entropy,
        classification_tasks((1, 8, 8), 3, tasks, support, query, seed),
    )


@dataclass(frozen=True)
class Landscape:
    """The inner problems where a solver stopped, task by task.

    Attributes:
        distance: ‖φ − θ‖, `(tasks,)`.
        residual: ‖∇g‖, `(tasks,)`.
        steps: taken by the solver, `(tasks,)`.
        eigenvalues: of the support loss's Hessian, ascending, `(tasks, n)`; those of the inner
            problem are larger by λ.
    """

    distance: Tensor
    residual: Tensor
    steps: Tensor
    eigenvalues: Tensor


def landscape(learner: mn.MetaLearner, tasks: TaskBatch, solver: Solver | None = None) -> Landscape:
    """Around the solver's solutions of the un-nudged problems; without a solver, around θ."""
    parts = []
    with StackedEngine().session(learner.problem(), tasks, width=1, seed=0, cost=Cost()) as groups:
        for inner in groups:
            assert isinstance(inner, StackedInner)
            solution = None if solver is None else inner.solve(solver)
            d = inner.zeros(inner.tasks) if solution is None else solution.displacement
            _, slope = inner.oracle().gradient(d)
            steps = torch.zeros(inner.tasks) if solution is None else solution.steps
            lam = flatten({n: inner.problem.lam[n].expand_as(leaf) for n, leaf in d.items()})
            curvature = torch.linalg.eigvalsh(inner.hessian(d) - torch.diag_embed(lam))
            parts.append((norm(d), norm(slope), steps, curvature))
    return Landscape(*(torch.cat(column) for column in zip(*parts, strict=True)))


def displacements(learner: mn.MetaLearner, tasks: TaskBatch, solver: Solver) -> Tensor:
    """φ − θ of every task where the solver stopped, `(tasks, n)`."""
    with StackedEngine().session(learner.problem(), tasks, width=1, seed=0, cost=Cost()) as groups:
        return torch.cat([flatten(inner.solve(solver).displacement) for inner in groups])


def stable_rate(learner: mn.MetaLearner, tasks: TaskBatch, lam: float) -> float:
    """1/(L̂ + λ), L̂ the largest curvature of the tasks' support losses at θ."""
    return 1 / (float(landscape(learner, tasks).eigenvalues.abs().max()) + lam)
