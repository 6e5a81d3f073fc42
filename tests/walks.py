"""What the tests of MAML one step at a time share: networks, stiffnesses, tolerances."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import metanudge as mn
from problems import Setup, classification_tasks, conv_net, mlp, seeded, transformer

LR = 0.1
# Exact products: rounding times conditioning, ε_machine √(operations) over 20 steps. Differences:
# ε² and ε_machine/ε, both about 10⁻¹⁰ at ε = 10⁻⁵, times what 20 steps make of it.
EXACT, APART = 1e-10, 1e-6
PRODUCTS = {
    "autograd": (mn.MAML(products="autograd"), EXACT),
    "difference": (mn.MAML(products="difference", epsilon=1e-5), APART),
}
ON_PRODUCTS = pytest.mark.parametrize(("estimator", "tolerance"), PRODUCTS.values(), ids=PRODUCTS)

Parameters = dict[str, Tensor]


class Recurrent(nn.Module):
    """An LSTM and a linear head on its last output."""

    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(features, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """x `(n, positions, features)` → logits `(n, classes)`."""
        return self.head(self.recurrent(x)[0][:, -1])


def lstm(*, tasks: int = 3, seed: int = 0) -> Setup:
    model = seeded(seed, lambda: Recurrent(4, 5, 3))
    return Setup(model, F.cross_entropy, classification_tasks((3, 4), 3, tasks, 6, 9, seed))


MODELS = {"MLP": mlp, "conv": conv_net, "Transformer": transformer, "LSTM": lstm}


def tensor_stiffness(model: nn.Module) -> Parameters:
    return {
        n: torch.linspace(0.5, 2.5, p.numel(), dtype=p.dtype).view_as(p)
        for n, p in model.named_parameters()
        if p.requires_grad
    }


LAM: dict[str, Callable[[nn.Module], Any]] = {
    "none": lambda model: 0.0,
    "scalar": lambda model: 2.0,
    "tensor": tensor_stiffness,
}


def loss_at(setup: Setup, phi: Parameters, batch: Any) -> Tensor:
    x, y = batch
    buffers = {name: buffer.clone() for name, buffer in setup.model.named_buffers()}
    return setup.loss(functional_call(setup.model, {**phi, **buffers}, (x,)), y)


def quadratic_force(lam: Any) -> Callable[[Parameters, Parameters], Parameters]:
    def force(phi: Parameters, theta: Parameters) -> Parameters:
        each = lam if isinstance(lam, dict) else dict.fromkeys(phi, lam)
        return {n: each[n] * (p - theta[n]) for n, p in phi.items()}

    return force


def reversed_gradient(
    setup: Setup, estimator: mn.MAML, solver: Any, engine: str, **options: Any
) -> tuple[Parameters, mn.Stats]:
    seed = options.pop("seed", 0)
    learner = mn.MetaLearner(
        setup.model, setup.loss, solver=solver, estimator=estimator, engine=engine, **options
    )
    return learner.meta_gradient(setup.tasks, metrics=False, seed=seed)


def engines(model: str) -> tuple[str, ...]:
    return ("inplace",) if model == "LSTM" else ("inplace", "stacked")
