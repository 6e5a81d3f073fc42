"""What the rows of the outer loss say."""

from __future__ import annotations

import math
from typing import Any

from metanudge_lab.experiments import quadratics as q
from metanudge_lab.experiments.base import Result
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


def best_rate(result: Result[Any], method: str, loss: str) -> float:
    """The rate whose last loss has the smallest median over the seeds; chosen alike for every
    method.
    """
    rates = [rate for rate in result.config.rates if result.rows(method=method, rate=rate)]
    return min(rates, key=lambda rate: last_of(result, method, loss, rate))


def last_of(result: Result[Any], method: str, loss: str, rate: float) -> float:
    """The median over the seeds of the last loss with a rate."""
    last = result.config.iterations
    return result.spread(loss, method=method, rate=rate, iteration=last).median
