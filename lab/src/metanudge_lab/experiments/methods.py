"""The methods that are compared on networks, with the paper's constants, and models and tasks made
from a seed alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import metanudge as mn
from metanudge.estimators import Estimator

LAM, NU, STEPS = 2.0, 0.1, 5  # λ, ν and K of the paper's experiments with networks

LOSS, GRADIENT = "FO-B-MAML", "FO-B-MAML gradient nudge"
MAML, IMAML, FO_MAML, REPTILE = "MAML", "iMAML, 5 CG steps", "FO-MAML", "Reptile"

ESTIMATORS: dict[str, Estimator] = {
    LOSS: mn.FOBMAML(nu=NU),
    GRADIENT: mn.FOBMAML(nu=NU, nudge="gradient"),
    MAML: mn.MAML(),
    IMAML: mn.IMAML(cg_steps=5),
    FO_MAML: mn.FOMAML(),
    REPTILE: mn.Reptile(),
}

DAMPED = f"{IMAML}, damped"
DAMPED_IMAML = mn.IMAML(cg_steps=5, damping=LAM + 20)  # as in the code that was released with it

FIRST_ORDER = (LOSS, GRADIENT, FO_MAML, REPTILE)


def seeded(seed: int, build: Callable[[], nn.Module], device: torch.device) -> nn.Module:
    """A model whose initial weights depend on the seed alone, whatever the device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().to(device)
