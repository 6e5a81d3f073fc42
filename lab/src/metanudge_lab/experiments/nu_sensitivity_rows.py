"""What the rows of the error against ν say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from metanudge_lab.experiments.base import Result, Row, numbers
from metanudge_lab.experiments.spread import Spread

QUADRATIC, SINGLE, NOISY = "quadratic", "quadratic in float32", "quadratic with noise"
SMOOTH, KINKED = "softplus net", "ReLU net"


def errors_at(
    result: Result[Any], name: str, steps: int, target: str = "error_exact"
) -> dict[float, float]:
    """Median error of the loss nudge at every ν of the grid."""
    return medians(result, target, problem=name, nudge="loss", steps=steps)


def grid(result: Result[Any], target: str, **where: Any) -> dict[float, Spread]:
    """The errors' spread over the seeds at every ν; a ν at which any solve diverged has an infinite
    one.
    """
    every = result.rows(kind="grid", **where)
    rows = [row for row in every if not _unknown(row, target, every)]
    by_nu = {nu: [row for row in rows if row["nu"] == nu] for nu in result.config.nus}
    return {nu: Spread.of(numbers(found, target)) for nu, found in by_nu.items() if found}


def medians(result: Result[Any], target: str, **where: Any) -> dict[float, float]:
    """Median errors over the seeds at every ν."""
    return {nu: spread.median for nu, spread in grid(result, target, **where).items()}


def best_of(errors: dict[float, float]) -> tuple[float, float]:
    """The best ν and its error."""
    return min(errors.items(), key=lambda found: found[1])


def target_of(name: str) -> str:
    """The error that is told where there is room for one: kinks have no implicit gradient."""
    return "error_steps" if name == KINKED else "error_exact"


def _unknown(row: Row, target: str, rows: Sequence[Row]) -> bool:
    """Whether the target itself could not be had for the row's seed, rather than this one
    estimate.
    """
    return all(other[target] is None for other in rows if other["seed"] == row["seed"])
