"""What is measured of the meta-optimizers."""

from __future__ import annotations

import math
from typing import Any

from metanudge_lab.experiments.base import Result

EXPONENTIAL, QUARTIC, RIPPLED, LINEAR = PROBLEMS = ("exponential", "quartic", "rippled", "linear")
GROWING = (EXPONENTIAL, QUARTIC)
SMOOTHNESS, FLOOR, MEMORY, STEEPNESS = "smoothness", "floor", "memory", "steepness"


def count_of(steps: float, result: Result[Any]) -> str:
    """A number of steps in words, where it may not have been reached."""
    return f"{steps:.0f}" if math.isfinite(steps) else f"more than {result.config.steps}"
