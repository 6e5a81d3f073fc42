"""The meta-optimizers of the convergence experiment: runs on a meta-objective, and each one's best
step size of a common grid.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metanudge import optim
from metanudge_lab.experiments.base import Result, Row
from metanudge_lab.experiments.meta_objectives import MetaObjective
from metanudge_lab.experiments.outer_loss_rows import drawn
from metanudge_lab.experiments.spread import Spread

GD, CLIPPED, NORMALIZED, SNGDM, ADAM = "GD", "ClippedGD", "NormalizedGD", "SNGDM", "Adam"
Make = Callable[[list[Tensor], float], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    GD: lambda parameters, rate: torch.optim.SGD(parameters, lr=rate),
    CLIPPED: lambda parameters, rate: optim.ClippedGD(parameters, lr=rate, max_norm=1.0),
    NORMALIZED: lambda parameters, rate: optim.NormalizedGD(parameters, lr=rate, smoothing=1.0),
    SNGDM: lambda parameters, rate: optim.SNGDM(parameters, lr=rate),
    ADAM: lambda parameters, rate: torch.optim.Adam(parameters, lr=rate),
}
MEMORIES: dict[str, dict[str, Make]] = {
    SNGDM: {
        "momentum 0.5": lambda parameters, rate: optim.SNGDM(parameters, lr=rate, momentum=0.5),
        "no momentum": lambda parameters, rate: optim.SNGDM(parameters, lr=rate, momentum=0.0),
    },
    ADAM: {
        "β = (0.9, 0.9)": lambda parameters, rate: torch.optim.Adam(
            parameters, lr=rate, betas=(0.9, 0.9)
        ),
        "β = (0.5, 0.5)": lambda parameters, rate: torch.optim.Adam(
            parameters, lr=rate, betas=(0.5, 0.5)
        ),
    },
}
"""The optimizers whose averages remember past gradients, with shorter memories."""
SCHEDULES = {
    "constant": None,
    "decaying": 1.0,
    "decaying in a third": 1 / 3,
    "decaying in a tenth": 1 / 10,
}
"""Name of a schedule → in which share of the steps the step size falls to 0, linearly."""
FINER = tuple(10 ** (k / 12) for k in range(-4, 5) if k)
"""Factors to the best step size of the grid that are tried as well."""


def run(
    objective: MetaObjective,
    make: Make,
    rate: float,
    *,
    steps: int,
    horizon: int | None,
    seed: int | None,
) -> list[float]:
    """‖∇F(θ)‖ before each step and at the end, or until it overflows; with a seed each step sees
    one task drawn at random.

    The step size falls linearly to 0 within `horizon` steps, after which θ stands still; None keeps
    it constant.
    """
    theta = objective.start.clone().requires_grad_()
    optimizer = make([theta], rate)
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    norms: list[float] = []
    for step in range(steps + 1):
        gradients = objective.gradients(theta.detach())
        mean = gradients.mean(0)
        norms.append(float(mean.norm()))
        if step == steps or not norms[-1] < 1e12:
            break
        if horizon is not None:
            if step >= horizon:
                return [*norms, *norms[-1:] * (steps - step)]
            optimizer.param_groups[0]["lr"] = rate * (1 - step / horizon)
        task = (
            None
            if generator is None
            else int(torch.randint(objective.tasks, (), generator=generator))
        )
        theta.grad = mean if task is None else gradients[task]
        optimizer.step()
    return norms


def search(
    score: Callable[[float, str], tuple[float, ...]],
    rates: Sequence[float],
    schedules: Sequence[str],
) -> tuple[float, ...]:
    """The lowest score over the grid of step sizes and schedules, and then over finer step sizes
    around the best.
    """
    scores = {
        (rate, schedule): score(rate, schedule)
        for rate, schedule in itertools.product(rates, schedules)
    }
    rate, schedule = min(scores, key=lambda tried: scores[tried])
    return min(*scores.values(), *(score(rate * factor, schedule) for factor in FINER))


def horizon_of(schedule: str, steps: int) -> int | None:
    """The steps within which a schedule falls to 0."""
    share = SCHEDULES[schedule]
    return None if share is None else max(1, round(share * steps))


def tuned(
    objective: MetaObjective,
    optimizer: str,
    *,
    rates: Sequence[float],
    steps: int,
    epsilon: float,
    sampled: int | None,
) -> list[Row]:
    """A row for each step size and schedule, and the curve of the best; `sampled` is the seed of
    sampled tasks, None for all tasks.
    """
    rows: list[Row] = []
    curves: dict[tuple[float, ...], list[float]] = {}

    def score(rate: float, schedule: str) -> tuple[float, ...]:
        norms = run(
            objective,
            OPTIMIZERS[optimizer],
            rate,
            steps=steps,
            horizon=horizon_of(schedule, steps),
            seed=sampled,
        )
        reached, last = first_below(norms, epsilon), mean_of_last(norms, steps)
        rows.append(
            {"kind": "run", "rate": rate, "schedule": schedule, "reached": reached, "last": last}
        )
        found = (
            math.inf if reached is None or sampled is not None else reached,
            last if math.isfinite(last) else math.inf,
        )
        curves.setdefault(found, norms)
        return found

    norms = curves[search(score, rates, tuple(SCHEDULES))]
    kept = [0, *drawn(steps)]
    return [
        *rows,
        *(
            {"kind": "curve", "step": k, "norm": float(f"{norms[k]:.5g}")}
            for k in kept
            if k < len(norms)
        ),
    ]


def fastest(
    objective: MetaObjective, make: Make, *, rates: Sequence[float], steps: int, epsilon: float
) -> int | None:
    """The fewest steps to ε, all tasks every step; None where no run arrives."""

    def score(rate: float, schedule: str) -> tuple[float, ...]:
        norms = run(
            objective, make, rate, steps=steps, horizon=horizon_of(schedule, steps), seed=None
        )
        reached, last = first_below(norms, epsilon), mean_of_last(norms, steps)
        return (math.inf if reached is None else reached, last if math.isfinite(last) else math.inf)

    reached = search(score, rates, tuple(SCHEDULES))[0]
    return int(reached) if math.isfinite(reached) else None


def lowest_end(
    objective: MetaObjective, make: Make, *, rates: Sequence[float], steps: int, seed: int
) -> float:
    """The lowest ‖∇F‖ at the end, one task a step, step sizes that decay to the end; infinite where
    every run overflows.
    """

    def score(rate: float, schedule: str) -> tuple[float, ...]:
        end = mean_of_last(
            run(objective, make, rate, steps=steps, horizon=horizon_of(schedule, steps), seed=seed),
            steps,
        )
        return (end if math.isfinite(end) else math.inf,)

    return search(score, rates, ("decaying",))[0]


def first_below(norms: Sequence[float], epsilon: float) -> int | None:
    """The first step at which ‖∇F‖ ≤ ε; None where that never happens.

    Example:
        >>> first_below([3.0, 0.5, 0.7], 1.0), first_below([3.0], 1.0)
        (1, None)
    """
    return next((step for step, norm in enumerate(norms) if norm <= epsilon), None)


def mean_of_last(norms: Sequence[float], steps: int) -> float:
    """The mean ‖∇F‖ over the last tenth of the steps; NaN where a run overflowed before its end."""
    if len(norms) <= steps:
        return math.nan
    tail = norms[-max(1, steps // 10) :]
    return math.fsum(tail) / len(tail)


@dataclass(frozen=True)
class Best:
    """An optimizer's best step size on a problem, the median over the seeds.

    Attributes:
        reached: steps to ε; infinite where it was not reached.
        last: mean ‖∇F‖ over the last tenth of the steps.
        rate: the step size.
        edge: whether it lies at an end of the grid or beyond.
    """

    reached: float
    last: float
    rate: float
    edge: bool


def best(result: Result[Any], problem: str, optimizer: str, *, sampled: bool) -> Best | None:
    """Of the same grid and the same schedules for everyone: fewest steps to ε; where tasks are
    sampled, the lowest ‖∇F‖ at the end.
    """
    chosen = list(_chosen(result, problem, optimizer, sampled=sampled).values())
    if not chosen:
        return None
    rates = result.config.rates
    reached, last, rate = (
        Spread.of([_number(row[key]) for row in chosen]).median
        for key in ("reached", "last", "rate")
    )
    return Best(
        reached, last, rate, edge=any(not rates[0] < row["rate"] < rates[-1] for row in chosen)
    )


def reached_by_seed(result: Result[Any], problem: str, optimizer: str) -> list[float]:
    """The fewest steps to ε, for every seed; infinite where it was not reached."""
    return [_number(r["reached"]) for r in _in_order(result, problem, optimizer, sampled=False)]


def ends_by_seed(result: Result[Any], problem: str, optimizer: str) -> list[float]:
    """The lowest ‖∇F‖ at the end with one task a step, for every seed."""
    return [_number(r["last"]) for r in _in_order(result, problem, optimizer, sampled=True)]


def _in_order(result: Result[Any], problem: str, optimizer: str, *, sampled: bool) -> list[Row]:
    found = _chosen(result, problem, optimizer, sampled=sampled)
    return [found[seed] for seed in sorted(found)]


def _chosen(result: Result[Any], problem: str, optimizer: str, *, sampled: bool) -> dict[int, Row]:
    """The best run of every seed."""

    def order(row: Row) -> tuple[float, float]:
        return (math.inf if sampled else _number(row["reached"]), _number(row["last"]))

    found: dict[int, Row] = {}
    wanted = (problem, sampled, "run")
    for row in result.rows(what=optimizer):
        if (row["problem"], row["sampled"], row["kind"]) != wanted:
            continue
        seed = row["seed"]
        if seed not in found or order(row) < order(found[seed]):
            found[seed] = row
    return found


def _number(value: float | None) -> float:
    return math.inf if value is None else value
