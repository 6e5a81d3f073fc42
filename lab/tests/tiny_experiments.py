"""Settings with which every experiment takes a second or two: changes to its quick
configuration.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from metanudge_lab.experiments import load

TINY: dict[str, dict[str, Any]] = {
    "along-training": {
        "networks": ("mnist1d",), "points": (1,), "seeds": 1, "tasks": 1, "quality_tasks": 1,
        "reach": 2, "channels": 2, "queries": 1, "width": 4, "length": 4,
    },
    "ablation": {
        "starts": ("theta",), "stencils": ("symmetric", "tangent"), "nus": ("0.1", "auto"),
        "steps": (1,), "reach": 2, "error_tasks": 1,
        "channels": 2, "pretraining": 1, "iterations": 1, "tasks": 1, "test_tasks": 2,
    },
    "auto-nu": {"steps": (2,), "problems": ("quadratic", "relu"), "tasks": 1},
    "bias-constants": {"sizes": (1.0, 2.0), "multiples": (2.0,), "deltas": (1e-6,),
    "nus": (1e-3, 1e-2, 0.1), "seeds": 1},
    "bias-rates": {"nus": (0.01, 0.02), "multiples": (1.0, 2.0, 4.0), "deltas": 2, "steps": (2, 4),
    "problems": ("logistic regression",)},
    "complexity": {"conditions": (4.0, 9.0), "most_steps": 8, "dim": 3, "memory_steps": (1, 2),
    "memory_examples": (5, 10)},
    "convergence": {"steps": 3, "rates": (0.1, 1.0), "dim": 2, "tasks": 2, "floor_nus": (0.1,),
    "floor_steps": 1, "radii": (1.0,)},
    "outer-rates": {"epsilons": (0.5, 0.4), "chains": 2, "most_steps": 50},
    "gradient-quality": {"steps": (1, 3), "lams": (0.2,), "seeds": 1, "tasks": 1, "dim": 4},
    "inner-rates": {
        "inner_rates": (0.1,), "meta_rates": (0.01,), "iterations": (2, 1), "tuning": (1, 1),
        "tasks": (1, 1), "val_tasks": 2, "test_tasks": 2, "at_steps": (1, 5),
    },
    "intents": {"folds": 2, "shots": (1,), "looks": (1,), "tasks": 2, "inner_rates": (0.1,),
    "val_tasks": 4, "test_tasks": 6},
    "inner-noise": {"at": (4, 8), "nus": (0.1, 0.2), "chains": 2},
    "lambda-networks": {"lams": (2.0, 8.0), "rates": (0.1,), "iterations": 1, "tasks": 1,
    "val_tasks": 2, "test_tasks": 2},
    "lambda-effect": {"lams": (0.5, 10.0), "meta_steps": 1, "inner_steps": 5, "dim": 4, "tasks": 1},
    "memory-mnist1d": {"shots": (1, 2), "queries": 2, "steps": 1},
    "memory-cnn": {"channels": (2,), "steps": 1, "shots": (2, 1), "queries": 2, "image_size": 16},
    "memory-length": {"lengths": (4, 8), "width": 8, "hidden": 8, "steps": 1, "shots": 1,
    "queries": 1},
    "memory-steps": {"steps": (1, 2), "channels": 2, "shots": 1, "queries": 1, "image_size": 16},
    "memory-width": {"widths": (8, 16), "length": 4, "hidden": 8, "steps": 1, "shots": 1,
    "queries": 1},
    "mnist1d": {
        "inner_rates": (0.1,), "meta_rates": (0.01,), "iterations": 1, "grid_iterations": 1,
        "at": (0, 1), "tasks": 1, "test_tasks": 2,
    },
    "nu-sensitivity": {
        "nus": (0.01, 0.1, 1.0), "steps": (2, 3), "network_steps": (2,), "channels": 1, "dim": 4,
        "tasks": 1, "network_tasks": 1,
    },
    "omniglot": {
        "methods": ("FO-B-MAML", "FO-MAML"), "second_order": ("iMAML, 5 CG steps",), "once": (),
        "inner_rates": (0.1, 0.4),
        "tuning": (1,), "val_tasks": 1, "iterations": 2, "tasks": 1, "queries": 1, "channels": 2,
        "watch_tasks": 2, "test_tasks": 2,
    },
    "omniglot-long": {
        "shorten": 12000, "tuning": (1,), "val_tasks": 1, "tasks": 1, "queries": 1, "channels": 2,
        "watch_tasks": 2, "test_tasks": 2,
        "adapt_steps": (1, 5),
    },
    "longer": {
        "methods": ("FO-B-MAML", "FO-MAML", "MAML"), "adapt_steps": (0, 5, 16),
        "curved_at": (0, 5), "curved_tasks": 1, "tuning": 1, "seeds": 1,
        "val_tasks": 1, "iterations": 1, "tasks": 1, "test_tasks": 2,
    },
    "outer-loss": {"iterations": 2, "steps": 3, "seeds": 1, "tasks": 1, "dim": 4, "rates": (0.1,
    1.0), "limit_steps": (3,)},
    "transformer": {
        "inner_rates": (0.1,), "meta_rates": (1e-3, 3e-3), "tuning": 1, "iterations": 2, "seeds": 1,
        "methods": ("MAML by differences", "MAML"),
        "points": (0, 2), "tasks": 1, "quality_tasks": 1, "val_tasks": 1, "test_tasks": 2,
        "symbols": 8, "length": 4, "sequences": 2, "width": 4, "heads": 1, "steps": 2,
    },
}  # fmt: skip


def tiny(name: str) -> Any:
    """The config."""
    return dataclasses.replace(load(name).config.quick(), **TINY[name])
