"""What a meta-gradient of some precision takes: steps, gradients, Hessian products, time; and how
that grows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from metanudge.testing.problems import log_slope
from metanudge_lab.experiments.base import Result, Row
from metanudge_lab.experiments.spread import Spread

MAML, IMAML, FO_MAML, REPTILE = "MAML", "iMAML", "FO-MAML", "Reptile"
FORWARD, SYMMETRIC, FIVE_POINT = (
    f"FO-B-MAML {kind}" for kind in ("forward", "symmetric", "five-point")
)
GRADIENT, TANGENT = (f"FO-B-MAML {kind}" for kind in ("gradient nudge", "tangent"))
METHODS = (MAML, IMAML, FORWARD, SYMMETRIC, FIVE_POINT, GRADIENT, TANGENT, FO_MAML, REPTILE)
BIASED = (FO_MAML, REPTILE)
GD, NESTEROV = "gradient descent", "Nesterov"
PRECISION, MEMORY = "precision", "memory"


def kappa(condition: float) -> float:
    """Of the inner problem, (1 + λ)/(1/c + λ) with λ = 1/c.

    Example:
        >>> kappa(9.0)
        5.0
    """
    return (condition + 1) / 2


@dataclass(frozen=True)
class Spent:
    """What a method spends to reach a precision, interpolated between the numbers of steps that
    were tried; infinite if it never does.
    """

    steps: float
    gradients: float
    products: float
    seconds: float


NEVER = Spent(math.inf, math.inf, math.inf, math.inf)


def spent(rows: Sequence[Row], precision: float) -> Spent:
    """Between the last number of steps after which the error is above the precision and the next;
    errors fall geometrically.

    Example:
        >>> known = {"products": 0, "tolerance": None}
        >>> rows = [{"steps": k, "error": 10.0**-k, "gradients": 2 * k, "seconds": 0.1 * k,
        ...     **known} for k in (1, 3)]
        >>> spent(rows, 1e-2)
        Spent(steps=2.0, gradients=4.0, products=0.0, seconds=0.2)
    """
    rows = [row for row in rows if row["tolerance"] in (None, precision)]
    above = [place for place, row in enumerate(rows) if not row["error"] <= precision]
    if not above:
        return _between(rows[0], rows[0], 0.0) if rows else NEVER
    if above[-1] + 1 == len(rows):
        return NEVER
    before, after = rows[above[-1]], rows[above[-1] + 1]
    share = math.log(before["error"] / precision) / math.log(before["error"] / after["error"])
    return _between(before, after, share)


def _between(before: Row, after: Row, share: float) -> Spent:
    keys = ("steps", "gradients", "products", "seconds")
    return Spent(*(float(f"{(1 - share) * before[key] + share * after[key]:.6g}") for key in keys))


def reach(
    result: Result[Any], method: str, solver: str, condition: float, precision: float
) -> Spent | None:
    """The median over the seeds; None where nothing was measured."""
    found = []
    for seed in result.distinct("seed"):
        rows = result.rows(
            what=PRECISION, method=method, solver=solver, condition=condition, seed=seed
        )
        if rows:
            found.append(spent(rows, precision))
    if not found:
        return None
    return Spent(
        *(
            Spread.of([getattr(one, key) for one in found]).median
            for key in ("steps", "gradients", "products", "seconds")
        )
    )


@dataclass(frozen=True)
class Exponents:
    """Fitted powers; NaN where a precision is never reached, or too little was measured.

    Attributes:
        kappa: of the steps in κ, at the last precision.
        log_precision: of the steps in log(1/ε), at the largest κ.
        straight: R² of the steps as a linear function of log(1/ε).
        delta: of the error in δ, at the largest κ.
    """

    kappa: float
    log_precision: float
    straight: float
    delta: float


def exponents(result: Result[Any], method: str, solver: str) -> Exponents:
    """Of a method with a solver."""
    conditions, precisions = result.config.conditions, result.config.precisions
    by_kappa = [_steps(reach(result, method, solver, c, min(precisions))) for c in conditions]
    by_precision = [_steps(reach(result, method, solver, max(conditions), e)) for e in precisions]
    logs = [math.log(1 / e) for e in precisions]
    slopes = []
    for seed in result.distinct("seed"):
        rows = result.rows(
            what=PRECISION, method=method, solver=solver, condition=max(conditions), seed=seed
        )
        rows = [
            row
            for row in rows
            if row["tolerance"] in (None, min(precisions))
            and 1e-9 < row["delta"] < 0.1 * rows[0]["delta"]
        ]
        slopes.append(_slope([row["delta"] for row in rows], [row["error"] for row in rows]))
    finite = [slope for slope in slopes if math.isfinite(slope)]
    return Exponents(
        kappa=_slope([kappa(c) for c in conditions], by_kappa),
        log_precision=_slope(logs, by_precision),
        straight=_straight(logs, by_precision),
        delta=Spread.of(finite).median if finite else math.nan,
    )


def _steps(found: Spent | None) -> float:
    return math.nan if found is None else found.steps


def _slope(x: Sequence[float], y: Sequence[float]) -> float:
    return (
        log_slope(x, y)
        if len(x) > 1 and all(math.isfinite(value) and value > 0 for value in y)
        else math.nan
    )


def _straight(x: Sequence[float], y: Sequence[float]) -> float:
    """R² of the best straight line."""
    a, b = (torch.tensor(values, dtype=torch.float64) for values in (x, y))
    if len(x) < 3 or not bool(torch.isfinite(b).all()):
        return math.nan
    a, b = a - a.mean(), b - b.mean()
    return float((a @ b) ** 2 / ((a @ a) * (b @ b)))


def memory_exponent(result: Result[Any], method: str, key: str) -> float:
    """The power of the peak memory in the number of "steps" or "examples"."""
    rows = result.rows(what=MEMORY, method=method)
    fixed = {"steps": "examples", "examples": "steps"}[key]
    rows = [row for row in rows if row[fixed] == min(other[fixed] for other in rows)]
    return _slope([row[key] for row in rows], [row["memory"] for row in rows])


def memory(result: Result[Any], method: str, steps: float = math.inf) -> float:
    """In copies of θ at a number of steps, between those measured on a straight line, beyond them
    as at the last; NaN if not measured.

    Example:
        >>> from metanudge_lab.experiments.base import FinishedCell
        >>> rows = [{"steps": k, "examples": 50, "memory": 3.0 + k} for k in (2, 4)]
        >>> result = Result("x", "quick", None,
        ...     [FinishedCell({"what": MEMORY, "method": "MAML"}, rows, 0.1, 0)])
        >>> memory(result, "MAML", 3), memory(result, "MAML")
        (6.0, 7.0)
    """
    rows = result.rows(what=MEMORY, method=method)
    rows = sorted(
        (row for row in rows if row["examples"] == min(r["examples"] for r in rows)),
        key=lambda row: int(row["steps"]),
    )
    if not rows:
        return math.nan
    after = next((place for place, row in enumerate(rows) if row["steps"] >= steps), len(rows))
    if after in (0, len(rows)):
        return float(rows[0 if after == 0 else -1]["memory"])
    (x, low), (y, high) = ((row["steps"], row["memory"]) for row in rows[after - 1 : after + 1])
    return float(low + (high - low) * (steps - x) / (y - x))
