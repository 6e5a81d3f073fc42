"""L-BFGS with a strong-Wolfe line search: torch's own, stopped by the inner residual."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from metanudge.params import Params
from metanudge.solvers.base import Oracle, Solution, check_count, check_positive, check_solver_options
from metanudge.solvers.torch_optimizer import TorchOptimizer


@dataclass(frozen=True)
class LBFGS:
    """Quasi-Newton solves to high precision with plain gradients: the solver for exact meta-gradients of smooth models.

    Args:
        steps: largest number of L-BFGS iterations.
        tol: stop once no component of ∇g exceeds this.
        history: number of past steps that model the curvature.
        lr: length of a first trial step.

    Cost: one to two gradients per iteration, each task on its own; memory of `2 × history` copies of φ.
    """

    steps: int = 100
    tol: float = 1e-10
    history: int = 20
    lr: float = 1.0

    def __post_init__(self) -> None:
        check_solver_options(self.steps, self.tol)
        check_count(self.history, "history", "10 to 50 is usual.")
        check_positive(self.lr, "lr", "1.0 is right for almost every problem.")

    def solve(self, oracle: Oracle, start: Params | None = None) -> Solution:
        """Minimise from `start` (default: d = 0)."""
        options = {
            "lr": self.lr,
            "max_iter": self.steps,
            "history_size": self.history,
            "tolerance_grad": self.tol,
            "tolerance_change": 0.0,  # stop on the residual alone
            "line_search_fn": "strong_wolfe",
        }
        return TorchOptimizer(torch.optim.LBFGS, steps=1, options=options).solve(oracle, start)
