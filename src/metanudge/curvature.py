"""How curved inner problems are, from gradients alone, and the inner learning rate that follows:
`GradientDescent(lr="auto")`.

Power iteration on the Hessian of each task's support loss at θ, its products by central differences
of gradients: no second derivatives, on either engine, with any model.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from metanudge.engines import Cost, Engine, Inner
from metanudge.params import Params, norm, per_row
from metanudge.problem import Problem
from metanudge.solvers import GradientDescent, Solver
from metanudge.task import TaskBatch

SHARE = 0.1
"""lr·(L + λ): a tenth of the step that solves the stiffest direction at once, since meta-training
finds places that are more curved than the first θ."""
_TASKS, _PROBES = 8, 10
_REACH = 1e-3  # of a difference, relative to ‖θ‖: kinks and third derivatives are averaged over it


def curvature(
    problem: Problem, tasks: TaskBatch, *, engine: Engine, probes: int = _PROBES, seed: int = 0
) -> float:
    """The largest curvature L of the tasks' support losses at θ; NaN where a loss is not finite.

    Cost: two gradients a task and probe.
    """
    with engine.session(problem, tasks, width=2, seed=seed, cost=Cost()) as groups:
        found = (float(largest_curvatures(inner, probes).max()) for inner in groups)
        return max(found, key=_nan_first)


def measured_rate(curved: float, lam: float) -> float:
    """The learning rate for inner problems of this curvature and stiffness, in two digits, so that
    rounding elsewhere gives the same.

    Example:
        >>> measured_rate(18.0, 2.0)
        0.005
    """
    return float(f"{SHARE / (curved + lam):.2g}")


def resolved(solver: Solver, problem: Problem, tasks: TaskBatch, engine: Engine) -> Solver:
    """The solver with a learning rate measured on the first few of these tasks."""
    assert isinstance(solver, GradientDescent)
    some = tasks if len(tasks) <= _TASKS else tasks[:_TASKS]
    curved, lam = curvature(problem, some, engine=engine), problem.largest_lam or 0.0
    if not 0 < curved + lam < math.inf:
        raise ValueError(
            f'lr="auto" found a curvature of {curved:g} of the support losses, from which no'
            " learning rate follows: a loss or its gradient is not finite, or zero, at the"
            " initialisation. Look at the data, or give lr a number."
        )
    return replace(solver, lr=measured_rate(curved, lam))


def _nan_first(value: float) -> float:
    return math.inf if math.isnan(value) else value


def largest_curvatures(inner: Inner, probes: int, at: Params | None = None) -> Tensor:
    """Of each task's support loss at θ, or at displacements from it, `(tasks,)`."""
    here, generator = inner.zeros(inner.tasks), torch.Generator().manual_seed(0)
    v: Params = {
        n: torch.randn(leaf.shape, dtype=leaf.dtype, generator=generator).to(leaf.device)
        for n, leaf in here.items()
    }
    size = norm(v)
    theta = {n: leaf.detach()[None].to(here[n].dtype) for n, leaf in inner.theta.items()}
    reach = _REACH * norm(theta).clamp_min(1e-3).expand_as(size)
    here = here if at is None else at
    for _ in range(probes):
        # a row without any curvature stays where it is
        v = {n: leaf / per_row(size.clamp_min(1e-30), leaf) for n, leaf in v.items()}
        apart = inner.support_difference(here, v, reach, 0, None)
        v = {n: apart[n] / per_row(2 * reach, apart[n]) for n in v}
        size = norm(v)
    return size
