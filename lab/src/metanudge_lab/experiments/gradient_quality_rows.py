"""What the rows of the meta-gradients' errors say."""

from __future__ import annotations

from typing import Any

from metanudge_lab.experiments import quadratics as q
from metanudge_lab.experiments.base import Result
from metanudge_lab.experiments.spread import Spread, short

PAPER_STEPS = 20  # inner steps of the lower half of the figure
WARM = "FO-B-MAML from the solution"
SPLIT = (q.SYMMETRIC, WARM, q.GRADIENT, q.IMAML_5)  # whose errors are drawn in parts
ROUNDING = 1e-12
RIVALS = {q.IMAML_2: "2", q.IMAML_5: "5"}


def median(result: Result[Any], key: str, method: str, lam: float, steps: int) -> float:
    """Over the seeds."""
    return result.spread(key, method=method, lam=lam, steps=steps).median


def split_at(result: Result[Any]) -> int:
    """The K at which parts of errors are told: that of the paper where it was measured, else the
    last.
    """
    return PAPER_STEPS if PAPER_STEPS in result.config.steps else result.config.steps[-1]


def split(result: Result[Any], method: str, lam: float) -> str:
    """An error and its parts in words."""
    keys = ("error", "part_inner", "part_linear", "part_nu")
    total, inner, linear, nu = (
        part_text(median(result, key, method, lam, split_at(result))) for key in keys
    )
    system = "CG" if method.startswith("iMAML") else "the linear system"
    return f"{total} (unfinished inner solves {inner}, {system} {linear}" + (
        ")" if method.startswith("iMAML") else f", ν {nu})"
    )


def part_text(size: float) -> str:
    """A part of an error in words."""
    return short(size) if size > ROUNDING else "0"


def by_seed(result: Result[Any], method: str, lam: float) -> dict[int, list[float]]:
    """The errors for every number of steps, seed by seed."""
    found: dict[int, list[float]] = {}
    for row in sorted(result.rows(method=method, lam=lam), key=lambda row: int(row["steps"])):
        found.setdefault(row["seed"], []).append(row["error"])
    return found


def medians(result: Result[Any], lam: float) -> dict[str, list[float]]:
    """The errors of every method."""
    return {
        method: [spread.median for spread in curve(result, method, lam).values()]
        for method in result.distinct("method")
    }


def curve(result: Result[Any], method: str, lam: float, key: str = "error") -> dict[int, Spread]:
    """The spread over the seeds for every number of steps."""
    return result.spreads(key, "steps", result.config.steps, method=method, lam=lam)
