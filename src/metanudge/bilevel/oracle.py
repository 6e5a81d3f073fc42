"""The nudged inner problem  g(x, φ) + ν p(φ)  as solvers see it, and its solution checked."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from metanudge.bilevel.problem import Bilevel
from metanudge.estimators.base import NonFiniteError
from metanudge.params import Params, dot
from metanudge.solvers.base import Oracle, Solution, Solver


class NudgedInner:
    """One row; see `metanudge.solvers.base.Oracle`. There is no proximal term: g is the user's own.

    Args:
        problem: g and f.
        nu: ν; 0 leaves the outer function alone.
        force: ∇f(φ_0) for the gradient nudge p = ⟨∇f(φ_0), φ⟩; None for the loss nudge p = f.
    """

    rows = 1

    def __init__(self, problem: Bilevel, nu: float = 0.0, force: Params | None = None) -> None:
        self._problem = problem
        self._nu = nu
        self._force = force if nu else None
        self._with_outer = bool(nu) and force is None

    @property
    def strong_convexity(self) -> float:
        """What the user says; NaN where nothing is known."""
        known = self._problem.strong_convexity
        return math.nan if known is None else known

    def zeros(self) -> Params:
        """The displacement of `init` itself."""
        return self._problem.zeros()

    def gradient(self, d: Params, step: int = 0, batch_size: int | None = None) -> tuple[Tensor, Params]:
        """Value of g (and ν f), and gradient of the nudged problem."""
        value, g = self._problem.gradient("inner", d, step)
        if self._with_outer:
            outer, pull = self._problem.gradient("outer", d, step)
            return self._sum(value, outer), {n: leaf.add_(pull[n], alpha=self._nu) for n, leaf in g.items()}
        if self._force is not None:
            g = {n: leaf.add_(self._force[n], alpha=self._nu) for n, leaf in g.items()}
        return value.reshape(1), g

    def objective(self, loss: Tensor, d: Params) -> Tensor:
        """Adds the linear nudge."""
        return loss if self._force is None else loss + self._nu * dot(self._force, d)

    def value(self, d: Params, step: int = 0) -> Tensor:
        """The nudged problem's value, without a gradient."""
        with torch.no_grad():
            phi = self._problem.phi(d)
            value = self._problem.evaluate("inner", self._problem.x, phi, step)
            if self._with_outer:
                return self._sum(value, self._problem.evaluate("outer", self._problem.x, phi, step))
            return self.objective(value.reshape(1), d)

    def hvp(self, d: Params, v: Params, step: int = 0) -> Params:
        """Hessian of the nudged problem times v."""
        _, _, hv = self._problem.hvp("inner", d, v, step)
        if self._with_outer:
            _, _, more = self._problem.hvp("outer", d, v, step)
            hv = {n: torch.add(leaf, more[n], alpha=self._nu) for n, leaf in hv.items()}
        return hv

    def split(self) -> list[Oracle]:
        """It is one row already."""
        return [self]

    def _sum(self, inner: Tensor, outer: Tensor) -> Tensor:
        return (inner + self._nu * outer).reshape(1)


def solve(problem: Bilevel, solver: Solver, *, nu: float = 0.0, force: Params | None = None, start: Params | None = None) -> Solution:
    """Solve the nudged inner problem from `start` (default: `init`); raises where that gives no finite point."""
    start = None if start is None else {n: leaf.clone() for n, leaf in start.items()}
    solution = solver.solve(NudgedInner(problem, nu, force), start)
    check_finite(solution, nu)
    return solution


def check_finite(solution: Solution, nu: float = 0.0) -> None:
    """Raise where a solve ended in NaN or Inf. A line search may have seen them on its way; where it ended counts."""
    ends = [solution.residual, *(leaf.sum() for leaf in solution.displacement.values())]
    if all(bool(torch.isfinite(end).all()) for end in ends):
        return
    seen = torch.isfinite(solution.losses) & torch.isfinite(solution.residuals)
    first = int(torch.nonzero(~seen)[0, 0]) if not bool(seen.all()) else len(seen)
    nudged = f" nudged by ν = {nu:g}" if nu else ""
    raise NonFiniteError(
        f"The inner problem{nudged} became NaN or Inf at gradient evaluation {first} of its solve. Usually the steps diverge: use a "
        "smaller lr, or a solver with a line search (LBFGS, NewtonCG). At evaluation 0, look for NaN in x, init or the data. "
        "Nothing was written to .grad."
    )
