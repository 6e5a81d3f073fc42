"""Settings with which every experiment takes a second or two: changes to its quick configuration."""

from __future__ import annotations

import dataclasses
from typing import Any

from metanudge.experiments import load

TINY: dict[str, dict[str, Any]] = {
    "auto-nu": {"steps": (2,), "problems": ("quadratic", "relu"), "tasks": 1},
    "gradient-quality": {"steps": (1, 3), "lams": (0.2,), "seeds": 1, "tasks": 1, "dim": 4},
    "outer-loss": {"iterations": 2, "steps": 3, "seeds": 1, "tasks": 1, "dim": 4, "rates": (0.1, 1.0)},
}


def tiny(name: str) -> Any:
    """The config."""
    return dataclasses.replace(load(name).config.quick(), **TINY[name])
