"""Nesterov's accelerated gradient for strongly convex problems: the √κ in the paper's Table 1.

Y. Nesterov, Introductory Lectures on Convex Optimization (2004), scheme 2.2.11 with constant
momentum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from metanudge.params import Params
from metanudge.solvers.base import Oracle, Solution, check_positive, check_solver_options, iterate


@dataclass(frozen=True)
class Nesterov:
    """x⁺ = y − α ∇g(y),  y⁺ = x⁺ + β (x⁺ − x)  with  β = (1 − √(αμ)) / (1 + √(αμ)).

    Args:
        lr: step size α, at most 1/(L̂ + λ) for the guarantee.
        steps: K; about √κ log(1/δ) of them reach precision δ, κ = 1/(αμ).
        momentum: β itself. Default: from μ = the smallest λ, right for convex support losses.
        tol: stop a task early once ‖∇g(y)‖ is at most this.
        batch_size: support examples per step, as in `GradientDescent`.

    Cost: `steps` gradients, one more copy of φ than `GradientDescent`.
    """

    lr: float
    steps: int
    momentum: float | None = None
    tol: float | None = None
    batch_size: int | None = None

    def __post_init__(self) -> None:
        check_positive(self.lr, "lr", "Use about 1/(curvature + lam).")
        check_solver_options(self.steps, self.tol, self.batch_size)
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise ValueError(
                f"momentum must be at least 0 and below 1, got {self.momentum!r}. Leave it out to"
                " have it computed from lam."
            )

    def solve(self, oracle: Oracle, start: Params | None = None) -> Solution:
        """Minimise from `start` (default: d = 0)."""
        return iterate(self, oracle, start)

    def memory(self, d: Params) -> Params:
        """The previous x; at the start x = y."""
        return {name: leaf.clone() for name, leaf in d.items()}

    def update(
        self, d: Params, g: Params, memory: Params, *, mu: float | Tensor, inplace: bool
    ) -> tuple[Params, Params]:
        """One step from y = `d` and x = `memory`."""
        further = 1 + self._beta(mu)  # from the old x towards the new one, and beyond it
        if inplace:
            for name, y in d.items():
                x_new = y.add_(g[name], alpha=-self.lr)
                memory[name].lerp_(x_new, _for(x_new, further))
            # the two buffers have changed roles: `memory` now holds y, `d` holds x
            return memory, d
        x = {name: torch.add(y, g[name], alpha=-self.lr) for name, y in d.items()}
        return {n: torch.lerp(memory[n], leaf, _for(leaf, further)) for n, leaf in x.items()}, x

    def result(self, d: Params, memory: Params) -> Params:
        """The last x."""
        return memory

    def _beta(self, mu: float | Tensor) -> float | Tensor:
        if self.momentum is not None:
            return self.momentum
        root: float | Tensor
        if isinstance(mu, Tensor):  # λ is learned and lies on the device
            root = (self.lr * mu).clamp(max=1.0).sqrt()
        elif math.isnan(mu):
            raise ValueError(
                "Nesterov computes its momentum from the curvature of the proximal term, which is"
                " unknown for this regulariser. Give it: Nesterov(lr=…, steps=…, momentum=0.9)."
            )
        elif mu == 0:
            raise ValueError(
                "Nesterov computes its momentum from the smallest λ, which is 0: it would never"
                " slow down. Give it: Nesterov(lr=…, steps=…, momentum=0.9)."
            )
        else:
            root = math.sqrt(min(1.0, self.lr * mu))
        return (1 - root) / (1 + root)


def _for(leaf: Tensor, weight: float | Tensor) -> float | Tensor:
    return weight.to(leaf) if isinstance(weight, Tensor) else weight
