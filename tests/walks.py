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


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.2}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.8, "dampening": 0.1}),
    "nesterov": (
        torch.optim.SGD,
        {"lr": 0.05, "momentum": 0.8, "nesterov": True, "weight_decay": 0.1},
    ),
    "Adam": (torch.optim.Adam, {"lr": 0.03}),
    "Adam, decayed": (torch.optim.Adam, {"lr": 0.03, "weight_decay": 0.1, "betas": (0.8, 0.95)}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.03, "weight_decay": 0.3}),
}


class Inside:
    """One of the optimizers, as torch's documentation writes it down, on displacements."""

    def __init__(self, name: str) -> None:
        self.kind, given = OPTIMIZERS[name]
        defaults = self.kind([torch.zeros(1)], **given).param_groups[0]
        self.options = {**defaults, **given}
        self.state: dict[str, list[Tensor]] = {}
        self.time = 0

    def step(self, d: Parameters, g: Parameters, rates: Parameters | None = None) -> Parameters:
        self.time += 1
        each = dict.fromkeys(d, self.options["lr"]) if rates is None else rates
        return {n: self._moved(n, leaf, g[n], each[n]) for n, leaf in d.items()}

    def _moved(self, name: str, d: Tensor, g: Tensor, rate: Any) -> Tensor:
        o = self.options
        if self.kind is torch.optim.AdamW:
            d = d - rate * o["weight_decay"] * d
        else:
            g = g + o["weight_decay"] * d
        if self.kind is torch.optim.SGD:
            if o["momentum"]:
                before = self.state.get(name)
                buffer = g
                if before is not None:
                    buffer = o["momentum"] * before[0] + (1 - o["dampening"]) * g
                self.state[name] = [buffer]
                g = g + o["momentum"] * buffer if o["nesterov"] else buffer
            return d - rate * g
        b1, b2 = o["betas"]
        m, v = self.state.get(name, [torch.zeros_like(g), torch.zeros_like(g)])
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        self.state[name] = [m, v]
        high = v / (1 - b2**self.time)
        # the root has no derivative at zero
        there = high > 0
        root = torch.where(there, torch.where(there, high, torch.ones_like(high)).sqrt(), 0.0)
        return d - rate * (m / (1 - b1**self.time)) / (root + o["eps"])


def solver_of(name: str, steps: int) -> mn.TorchOptimizer:
    kind, options = OPTIMIZERS[name]
    return mn.TorchOptimizer(kind, steps=steps, options=options)
