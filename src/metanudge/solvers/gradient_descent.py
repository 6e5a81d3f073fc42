"""Gradient descent on the inner problem, on the whole support set or on minibatches of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from metanudge.params import Params
from metanudge.solvers.base import (
    Descends,
    Oracle,
    Solution,
    Trace,
    check_positive,
    check_solver_options,
    iterate,
)


def stability_advice(
    lr: float | None, lam: float | None, *, where: str = "lr in the solver", stiffness: str = "lam"
) -> str:
    """What to change where inner steps overshoot: they are stable below 2/(curvature + λ), so a
    larger λ makes it worse.

    Args:
        lr: the solver's step size, where it has one.
        lam: the largest λ, where the proximal term has one.
        where, stiffness: what the two are called.

    Example:
        >>> stability_advice(0.1, 2.0)
        'use a smaller lr in the solver'
        >>> stability_advice(0.1, 30.0).partition(", ")[0]
        'use a smaller lr in the solver or a smaller lam: lr·λ = 3'
    """
    if lr is None or lam is None or lr * lam < 0.5:
        return f"use a smaller {where}"
    return (
        f"use a smaller {where} or a smaller {stiffness}: lr·λ = {lr * lam:.3g}, and lr·(curvature"
        " + λ) must stay below 2"
    )


@dataclass(frozen=True)
class GradientDescent:
    """d ← d − α ∇g(d), the inner algorithm of the paper's experiments.

    Args:
        lr: step size α. The inner problem has curvature up to L̂ + λ; steps above 2/(L̂ + λ)
            diverge. `"auto"`: a learner measures L̂ on the first tasks it sees, by differences of
            gradients, and takes 0.1/(L̂ + λ); `learner.solver` then has the number.
        steps: K.
        tol: stop a task early once ‖∇g‖ is at most this.
        batch_size: support examples drawn (without replacement) for each step; default all. The
            draw depends on the seed, the task and the step only, so all solves of one stencil see
            the same data order.

    Cost: `steps` gradients of the inner objective; memory of one of them. In place and without
    `tol` only of the layer that autograd is at; the residual of two losses (loss nudge) is then
    exact up to the rounding of φ, divided by α.

    Example:
        >>> GradientDescent(lr=0.1, steps=5)
        GradientDescent(lr=0.1, steps=5, tol=None, batch_size=None)
    """

    lr: float | Literal["auto"]
    steps: int
    tol: float | None = None
    batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.lr != "auto":
            fix = 'Start with 0.1, or "auto"; stable steps are below 2/(curvature + lam).'
            check_positive(self.lr, "lr", fix)
        check_solver_options(self.steps, self.tol, self.batch_size)

    @property
    def rate(self) -> float:
        """`lr` as a number; raises where it is not measured yet."""
        if isinstance(self.lr, str):
            raise ValueError(
                f"lr={self.lr!r} is measured by a MetaLearner, at its first tasks. Give lr a number"
                " here, e.g. GradientDescent(lr=0.1, steps=5)."
            )
        return self.lr

    def solve(self, oracle: Oracle, start: Params | None = None) -> Solution:
        """Minimise from `start` (default: d = 0)."""
        if self.tol is not None or not isinstance(oracle, Descends):
            return iterate(self, oracle, start)
        d = oracle.begin(start)
        trace = Trace(oracle)
        for step in range(self.steps):
            trace.note(*oracle.descend(d, self.rate, step, self.batch_size))
        return trace.solution(d, self.steps)

    def memory(self, d: Params) -> Params:
        """Gradient descent remembers nothing."""
        return {}

    def update(
        self, d: Params, g: Params, memory: Params, *, mu: float | Tensor, inplace: bool
    ) -> tuple[Params, Params]:
        """One step."""
        if inplace:
            torch._foreach_add_(list(d.values()), [g[name] for name in d], alpha=-self.rate)
            return d, memory
        return {
            name: torch.add(leaf, g[name], alpha=-self.rate) for name, leaf in d.items()
        }, memory

    def result(self, d: Params, memory: Params) -> Params:
        """The last iterate."""
        return d
