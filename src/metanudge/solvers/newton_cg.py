"""Newton's method with conjugate gradient on Hessian-vector products: the Hessian-free solver
(Martens, 2010).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from metanudge.params import Params, add_scaled, dot, norm, select
from metanudge.solvers.base import (
    Oracle,
    Solution,
    Trace,
    check_count,
    check_positive,
    check_solver_options,
    no_steps,
)
from metanudge.solvers.conjugate_gradient import conjugate_gradient


@dataclass(frozen=True)
class NewtonCG:
    """d ← d − t [∇²g(d)]⁻¹ ∇g(d), the system solved by conjugate gradient, t by backtracking.

    Args:
        steps: largest number of Newton steps.
        cg_steps: Hessian-vector products per step.
        tol: stop a task once ‖∇g‖ is at most this.
        damping: added to the Hessian's diagonal; λ already makes most inner problems well-posed.

    Directions of negative curvature end the conjugate gradient early, so every step goes downhill.
    Cost per step: one gradient, up to `cg_steps` Hessian-vector products and a few losses; needs
    double backward, unlike the other solvers.
    """

    steps: int = 20
    cg_steps: int = 50
    tol: float | None = 1e-10
    damping: float = 0.0

    def __post_init__(self) -> None:
        check_solver_options(self.steps, self.tol)
        check_count(
            self.cg_steps,
            "cg_steps",
            "5 to 50 is usual; the number of parameters makes each step exact.",
        )
        if self.damping:
            check_positive(
                self.damping,
                "damping",
                "0 is right unless the support loss has strong negative curvature.",
            )

    def solve(self, oracle: Oracle, start: Params | None = None) -> Solution:
        """Minimise from `start` (default: d = 0)."""
        d = oracle.zeros() if start is None else start
        trace, steps = Trace(oracle), no_steps(oracle, d)
        for _ in range(self.steps):
            loss, g = oracle.gradient(d)
            residual = trace.record(loss, g)
            active = residual > (self.tol or 0.0)
            if not bool(active.any()):
                break
            d_moved, moved = self._step(oracle, d, g, oracle.objective(loss, d))
            if not bool((active & moved).any()):
                break  # no row can get lower in this precision
            d = select(active & moved, d_moved, d)
            steps += active & moved
        else:
            trace.record(*oracle.gradient(d))  # the residual reported belongs to the point returned
        return trace.solution(d, steps)

    def _step(
        self, oracle: Oracle, d: Params, g: Params, value: torch.Tensor
    ) -> tuple[Params, torch.Tensor]:
        downhill = {name: -leaf for name, leaf in g.items()}
        # The nearer the solution, the more exact the step: enough for quadratic convergence, no
        # product wasted far away.
        tol = norm(g).clamp(1e-12, 0.1)
        solve = conjugate_gradient(
            lambda v: oracle.hvp(d, v), downhill, steps=self.cg_steps, tol=tol, damping=self.damping
        )
        # Negative curvature at the very first direction leaves x = 0: fall back on the gradient.
        nothing = dot(solve.x, solve.x) == 0
        direction = select(nothing, downhill, solve.x)
        slope = dot(g, direction)
        # Near the solution the decrease is below the rounding of g itself: accept what does not go
        # up by more than that.
        slack = 4 * torch.finfo(value.dtype).eps * value.abs()
        t = torch.ones_like(value)
        accepted = torch.zeros_like(value, dtype=torch.bool)
        for _ in range(30):
            new = oracle.value(add_scaled(d, t, direction))
            accepted = accepted | (new <= value + 1e-4 * t * slope + slack)
            if bool(accepted.all()):
                break
            t = torch.where(accepted, t, t / 2)
        return add_scaled(d, t, direction), accepted
