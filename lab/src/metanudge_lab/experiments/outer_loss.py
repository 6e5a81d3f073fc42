"""Figure 1, below: the outer loss against meta-iterations with 20 inner steps; and where it would
end, for other numbers of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

import metanudge as mn
from metanudge_lab.experiments import quadratics as q
from metanudge_lab.experiments.base import Cell, Experiment, Row, Settings
from metanudge_lab.experiments.equal_cost import COUNTED
from metanudge_lab.experiments.outer_loss_figures import draw, table
from metanudge_lab.experiments.outer_loss_rows import LIMITED, LOSSES, drawn
from metanudge_lab.experiments.outer_loss_verdict import compare, judge

# of differences; Newton steps; what may be left of the estimate, relative to that at θ = 0
STEP, LONGEST, CLOSE = (1e-3, 60, 1e-8)
DIVERGED = 1e6  # times the loss at the start


@dataclass(frozen=True)
class Config(Settings):
    """Sizes of the measurement. In full eight minutes on one core.

    `rates` are meta-learning rates in units of 1/curvature of the outer loss, the same grid for
    every method.
    """

    iterations: int = 20
    rates: tuple[float, ...] = (0.03, 0.1, 0.3, 1.0, 3.0)
    steps: int = 20
    limit_steps: tuple[int, ...] = (5, 10, 20, 50)
    lam: float = q.LAM
    nu: float = q.NU
    dim: int = 20
    tasks: int = 16
    seeds: int = 3
    methods: tuple[str, ...] = tuple(q.methods(q.NU))

    @classmethod
    def quick(cls) -> Config:
        """A minute; without ES-MAML, which takes as long as all the others together."""
        methods = tuple(method for method in cls.methods if method != q.ES_MAML)
        return cls(iterations=12, limit_steps=(5, 20, 50), tasks=8, seeds=1, methods=methods)


def cells(config: Config) -> list[Cell]:
    """One for each seed, method and meta-learning rate; and one for each seed, method and number of
    inner steps for the limit.
    """
    limited = [m for m in config.methods if m in LIMITED]
    runs: list[Cell] = [
        {"method": m, "seed": s, "rate": r}
        for s in range(config.seeds)
        for m in config.methods
        for r in config.rates
    ]
    return runs + [
        {"method": m, "seed": s, "steps": k}
        for s in range(config.seeds)
        for m in limited
        for k in config.limit_steps
    ]


def measure(cell: Cell, config: Config, device: torch.device) -> list[Row]:
    """Both outer losses, above their lowest values: on the way, or where gradient descent with a
    small rate would end.
    """
    seed = int(cell["seed"] or 0)
    problem = q.Problem(seed, dim=config.dim, tasks=config.tasks, lam=config.lam, device=device)
    estimator = q.methods(config.nu, seed=seed)[str(cell["method"])]
    if "steps" in cell:
        steps = int(cell["steps"] or 0)
        return [_limit(problem, problem.learner(estimator, steps), _losses(problem, steps))]
    return _descent(
        problem, problem.learner(estimator, config.steps), float(cell["rate"] or 0), config
    )


def _descent(problem: q.Problem, learner: mn.MetaLearner, rate: float, config: Config) -> list[Row]:
    """Gradient descent on θ; the losses at the iterations that are drawn."""
    losses = _losses(problem, config.steps)
    (theta,) = learner.parameters()
    meta_rate = rate / losses["exact"].curvature
    rows, kept = [_row(0, theta, losses)], drawn(config.iterations)
    most = DIVERGED * losses["exact"].excess(theta.detach())
    for iteration in range(1, config.iterations + 1):
        try:
            theta.data.sub_(meta_rate * _estimate(problem, learner))
            diverged = not losses["exact"].excess(theta.detach()) < most
        except mn.NonFiniteError:
            diverged = True
        if diverged:
            return rows + [
                {"iteration": k, **dict.fromkeys(LOSSES, math.nan)} for k in kept if k >= iteration
            ]
        if iteration in kept:
            rows.append(_row(iteration, theta, losses))
    return rows


def _limit(problem: q.Problem, learner: mn.MetaLearner, losses: dict[str, q.OuterLoss]) -> Row:
    """The losses where the method's estimate of the meta-gradient vanishes, and whether descent
    along it ends there.

    Newton's method from the minimum of the outer loss, with a Jacobian by differences that is kept:
    all estimates but iMAML's, whose CG steps depend on the right-hand side, are affine in θ.
    """
    (theta,) = learner.parameters()
    exact = losses["exact"]
    theta.data.copy_(-torch.linalg.solve(exact.hessian, exact.linear))
    base, columns = _estimate(problem, learner), []
    for unit in torch.eye(len(theta), dtype=theta.dtype, device=theta.device):
        theta.data.add_(STEP * unit)
        columns.append((_estimate(problem, learner) - base) / STEP)
        theta.data.sub_(STEP * unit)
    jacobian, scale, left = torch.stack(columns, 1), float(exact.linear.norm()), 1.0
    for _ in range(LONGEST):
        theta.data.sub_(torch.linalg.solve(jacobian, base))
        base = _estimate(problem, learner)
        left = float(base.norm()) / scale
        if left < CLOSE:
            break
    found = {
        name: float(f"{loss.excess(theta.detach()):.5g}") if left < CLOSE else math.nan
        for name, loss in losses.items()
    }
    return {**found, "left": left, "stable": bool((torch.linalg.eigvals(jacobian).real > 0).all())}


def _losses(problem: q.Problem, steps: int) -> dict[str, q.OuterLoss]:
    return {"exact": problem.outer(), "adapted": problem.outer(steps)}


def _estimate(problem: q.Problem, learner: mn.MetaLearner) -> torch.Tensor:
    (gradient,) = learner.meta_gradient(problem.tasks, metrics=False)[0].values()
    return gradient


def _row(iteration: int, theta: torch.Tensor, losses: dict[str, q.OuterLoss]) -> Row:
    values = {name: loss.excess(theta.detach()) for name, loss in losses.items()}
    return {
        "iteration": iteration,
        **{name: float(f"{value:.5g}") for name, value in values.items()},
    }


EXPERIMENT = Experiment(
    name="outer-loss",
    title="Outer loss during meta-training",
    where="Figure 1, below",
    claim=(
        "With 20 inner steps on the synthetic linear regression, FO-B-MAML is highly competitive"
        " with iMAML, and outperforms it when iMAML is restricted to 2 or 5 conjugate-gradient"
        " steps; more inner steps serve it, but not FO-MAML or Reptile."
    ),
    config=Config,
    cells=cells,
    measure=measure,
    draw=draw,
    table=table,
    judge=judge,
    compare=compare,
    notes=(
        "The paper's sentences speak of the whole of Figure 1; we apply them to the outer loss in"
        " its lower half. The problem is that of the upper half; plain gradient descent on θ over"
        " all tasks; for every method the best of the same grid of meta-learning rates, in units of"
        " 1/curvature of the outer loss. Two readings of “outer loss” are measured, both in closed"
        " form: at the inner solution, which FO-B-MAML and iMAML aim at, and after the 20 inner"
        " steps, which MAML aims at. Shown is what is above the lowest value. The limit is where"
        " the method's own estimate vanishes, found by Newton's method, and checked to be stable"
        " under descent with a small rate; it depends on neither the rate nor the number of"
        " iterations. The verdict is at equal meta-iterations, the paper's axis; at equal cost"
        " every method has as many backward passes as the cheapest takes for all iterations, and"
        " the best rate for that. Methods share the tasks of a seed, so ratios are paired by it. "
        + COUNTED
    ),
)
