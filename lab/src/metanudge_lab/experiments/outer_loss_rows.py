"""What the rows of the outer loss say."""

from __future__ import annotations

import math
from typing import Any

from metanudge_lab.experiments import quadratics as q
from metanudge_lab.experiments.base import Result
from metanudge_lab.experiments.equal_cost import common_budget, passes, within
from metanudge_lab.experiments.spread import Spread

LOSSES = {
    "exact": "outer loss at the inner solution",
    "adapted": "outer loss after the inner steps",
}
BRIEF = {"exact": "at the inner solution", "adapted": "after the inner steps"}
# ES-MAML never comes to rest
LIMITED = (q.SYMMETRIC, q.GRADIENT, q.IMAML_2, q.IMAML_5, q.IMAML_10, q.MAML, q.FO_MAML, q.REPTILE)
COMPETITIVE = 2.0  # "highly competitive": at most so many times the other's excess


def at_rest(result: Result[Any], method: str, loss: str, steps: int) -> float:
    """The excess loss in the limit; where descent would not end there, none."""
    rows = result.rows(method=method, steps=steps)
    return Spread.of(
        [
            math.nan if row[loss] is None or not row["stable"] else abs(float(row[loss]))
            for row in rows
        ]
    ).median


def trained(result: Result[Any]) -> list[str]:
    """The methods of which some descent is there."""
    return [
        method
        for method in result.distinct("method")
        if any("rate" in row for row in result.rows(method=method))
    ]


def best_rate(result: Result[Any], method: str, loss: str, at: int | None = None) -> float:
    """The rate whose loss after so many meta-iterations (all of them) has the smallest median over
    the seeds; chosen alike for every method.
    """
    rates = [rate for rate in result.config.rates if result.rows(method=method, rate=rate)]
    return min(rates, key=lambda rate: last_of(result, method, loss, rate, at))


def last_of(
    result: Result[Any], method: str, loss: str, rate: float, at: int | None = None
) -> float:
    """The median over the seeds of the loss with a rate, after all or so many iterations."""
    last = result.config.iterations if at is None else at
    return result.spread(loss, method=method, rate=rate, iteration=last).median


def best_ends(result: Result[Any], method: str, loss: str) -> list[float]:
    """The last losses at the best rate, seed by seed."""
    by_rate: dict[float, list[float]] = {}
    last = [r for r in result.rows(method=method) if r.get("iteration") == result.config.iterations]
    for row in sorted(last, key=lambda row: int(row["seed"])):
        value = math.nan if row[loss] is None else float(row[loss])
        by_rate.setdefault(row["rate"], []).append(value)
    return min(by_rate.values(), key=lambda values: Spread.of(values).median)


def cost(result: Result[Any], method: str) -> int:
    """Backward passes of a meta-iteration for one task."""
    return passes(q.methods(result.config.nu)[method], result.config.steps)


def affordable(result: Result[Any], method: str) -> int:
    """The last recorded iteration within what the cheapest method of all spends altogether."""
    each = {m: cost(result, m) for m in trained(result)}
    at = [0, *drawn(result.config.iterations)]
    budget = common_budget(each, result.config.iterations)
    return within({k: k for k in at}, each[method], budget) or 0


def drawn(iterations: int) -> list[int]:
    """Which iterations are recorded: every one of the first dozen, then ever fewer, and the last.

    Example:
        >>> drawn(20)
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 16, 18, 20]
    """
    chosen, at = [], 1
    while at < iterations:
        chosen.append(at)
        at += max(1, at // 6)
    return [*chosen, iterations]
