"""The paper's figures and tables, measured anew: one file each. `metanudge_lab.experiments.base`
says how to write one.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from metanudge_lab.experiments.base import Experiment

# In the order of the page.
NAMES = (
    "gradient-quality",
    "outer-loss",
    "mnist1d",
    "omniglot",
    "omniglot-long",
    "longer",
    "memory-cnn",
    "memory-width",
    "memory-length",
    "memory-steps",
    "memory-mnist1d",
    "nu-sensitivity",
    "lambda-effect",
    "lambda-networks",
    "bias-rates",
    "bias-constants",
    "convergence",
    "outer-rates",
    "inner-noise",
    "complexity",
    "ablation",
    "auto-nu",
    "inner-rates",
    "intents",
    "transformer",
    "along-training",
)


def available() -> tuple[str, ...]:
    """The experiments whose files are there."""
    return tuple(
        name
        for name in NAMES
        if importlib.util.find_spec(f"{__name__}.{_module(name)}") is not None
    )


def load(name: str) -> Experiment[Any]:
    """The experiment of that name."""
    experiment: Experiment[Any] = importlib.import_module(f"{__name__}.{_module(name)}").EXPERIMENT
    assert experiment.name == name, f"{_module(name)}.py calls itself {experiment.name!r}"
    return experiment


def _module(name: str) -> str:
    return name.replace("-", "_")


__all__ = ["NAMES", "Experiment", "available", "load"]
