"""Live training problems with an upper level, and their hypergradient by autograd through K
functional steps, written down independently.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import metanudge as mn
from problems import Setup, conv_net, mlp, seeded
from walks import lstm

Parameters = dict[str, Tensor]
Forward = Callable[[Tensor], Tensor]
EXAMPLES = 9

MODELS: dict[str, Callable[[], Setup]] = {
    "MLP": lambda: mlp(tasks=1),
    "conv": lambda: conv_net(tasks=1),
    "LSTM": lambda: lstm(tasks=1),
    "dropout": lambda: conv_net(dropout=0.5, tasks=1),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.2),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8, dampening=0.1),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.8, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.03, weight_decay=0.1, betas=(0.8, 0.95)),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.03, weight_decay=0.3),
}


class Problem:
    """A network with labels, of which the upper level weighs the examples, sets a penalty for each
    tensor, or is a network that weighs examples by what it sees.
    """

    def __init__(self, model: str, optimizer: str, upper: str = "weights") -> None:
        setup = MODELS[model]()
        self.model, self.kind = setup.model, upper
        self.x, self.y = setup.tasks[0].query
        self.validation = setup.tasks[0].support
        names = list(dict(self.model.named_parameters()))
        self.upper: nn.Module | Tensor | Parameters
        if upper == "network":
            width = self.x[0].numel()
            self.upper = seeded(
                1,
                lambda: nn.Sequential(
                    nn.Flatten(), nn.Linear(width, 4), nn.Tanh(), nn.Linear(4, 1)
                ),
            )
        elif upper == "penalties":
            steps = torch.linspace(-3, -1, len(names), dtype=torch.float64)
            self.upper = {n: s.clone().requires_grad_() for n, s in zip(names, steps, strict=True)}
        else:
            self.upper = torch.linspace(-1, 1, EXAMPLES, dtype=torch.float64).requires_grad_()
        *first, last = self.model.parameters()
        groups = [{"params": first}, {"params": [last], "lr": 0.02, "weight_decay": 0.05}]
        self.optimizer = OPTIMIZERS[optimizer](groups)

    def batch(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        index = torch.tensor([(number + i) % EXAMPLES for i in range(6)])
        return self.x[index], self.y[index], index

    def batches(self, steps: int) -> list[Any]:
        return [self.batch(k) for k in range(steps)]

    def warm_up(self, steps: int = 3) -> None:
        """Plain steps, so that the optimizer has something to remember."""
        for number in range(steps):
            x, y, _ = self.batch(number + 4)
            self.optimizer.zero_grad()
            F.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()

    def lower(self, forward: Forward, phi: Parameters, upper: Any, batch: Any) -> Tensor:
        x, y, index = batch
        losses = F.cross_entropy(forward(x), y, reduction="none")
        if self.kind == "penalties":
            return losses.mean() + sum((upper[n].exp() * p.square()).sum() for n, p in phi.items())
        weights = upper(x)[:, 0] if self.kind == "network" else upper[index]
        return (torch.sigmoid(weights) * losses).mean()

    def outer(self, forward: Forward, upper: Any, batch: Any) -> Tensor:
        """With a direct part."""
        x, y = batch
        loss = F.cross_entropy(forward(x), y)
        if self.kind == "network":
            return loss + upper(x).square().mean()
        return loss + sum(t.square().sum() for t in leaves(upper)) / 100

    def lower_loss(self, batch: Any) -> Tensor:
        return self.lower(self.model, dict(self.model.named_parameters()), self.upper, batch)

    def upper_loss(self, batch: Any) -> Tensor:
        return self.outer(self.model, self.upper, batch)

    def loop(self, steps: int, **options: Any) -> mn.Unrolled:
        return mn.Unrolled(
            self.model,
            self.upper,
            self.lower_loss,
            self.upper_loss,
            self.optimizer,
            steps,
            **options,
        )

    def plainly(self, batches: list[Any]) -> None:
        """The same steps as anybody writes them."""
        for batch in batches:
            self.optimizer.zero_grad()
            gradients = torch.autograd.grad(
                self.lower_loss(batch), list(self.model.parameters()), allow_unused=True
            )
            for p, g in zip(self.model.parameters(), gradients, strict=True):
                p.grad = g
            self.optimizer.step()

    def hypergradient(self, batches: list[Any]) -> list[Tensor]:
        """Autograd through all steps at once, on copies; draws what the live ones would."""
        model, optimizer = copy.deepcopy((self.model, self.optimizer))
        by_name = dict(model.named_parameters())
        buffers = dict(model.named_buffers())
        x = copy.deepcopy(self.upper)
        phi: Parameters = {n: p.detach().clone().requires_grad_() for n, p in by_name.items()}

        def forward(inputs: Tensor) -> Tensor:
            return functional_call(model, {**phi, **buffers}, (inputs,))

        rule = Functional(optimizer, by_name)
        for batch in batches:
            loss = self.lower(forward, phi, x, batch)
            g = torch.autograd.grad(loss, list(phi.values()), create_graph=True, allow_unused=True)
            phi = rule.step(phi, dict(zip(phi, g, strict=True)))
        by = leaves(x)
        return list(torch.autograd.grad(self.outer(forward, x, self.validation), by))


class Functional:
    """SGD, Adam and AdamW as torch's documentation writes them down, from a live one's state."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Parameters) -> None:
        self.kind = type(optimizer)
        names = {id(p): n for n, p in parameters.items()}
        self.options = {
            names[id(p)]: group for group in optimizer.param_groups for p in group["params"]
        }
        self.state = {n: dict(optimizer.state[p]) for n, p in parameters.items()}

    def step(self, phi: Parameters, g: dict[str, Tensor | None]) -> Parameters:
        return {n: p if g[n] is None else self._moved(n, p, g[n]) for n, p in phi.items()}

    def _moved(self, name: str, p: Tensor, g: Any) -> Tensor:
        o, s = self.options[name], self.state[name]
        if self.kind is torch.optim.AdamW:
            p = p - o["lr"] * o["weight_decay"] * p
        else:
            g = g + o["weight_decay"] * p
        if self.kind is torch.optim.SGD:
            if o["momentum"]:
                known = s.get("momentum_buffer")
                s["momentum_buffer"] = (
                    g if known is None else o["momentum"] * known + (1 - o["dampening"]) * g
                )
                g = (
                    g + o["momentum"] * s["momentum_buffer"]
                    if o["nesterov"]
                    else s["momentum_buffer"]
                )
            return p - o["lr"] * g
        b1, b2 = o["betas"]
        s["step"] = int(s.get("step", 0)) + 1
        s["exp_avg"] = b1 * s.get("exp_avg", 0) + (1 - b1) * g
        s["exp_avg_sq"] = b2 * s.get("exp_avg_sq", 0) + (1 - b2) * g * g
        high = s["exp_avg_sq"] / (1 - b2 ** s["step"])
        there = high > 0  # the root has no derivative at zero
        root = torch.where(there, torch.where(there, high, torch.ones_like(high)).sqrt(), 0.0)
        return p - o["lr"] * (s["exp_avg"] / (1 - b1 ** s["step"])) / (root + o["eps"])


def leaves(upper: Any) -> list[Tensor]:
    if isinstance(upper, Tensor):
        return [upper]
    return list(upper.parameters() if isinstance(upper, nn.Module) else upper.values())
