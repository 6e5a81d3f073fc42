"""FO-MAML: the query gradient at the adapted parameters, the adaptation's Jacobian ignored (Finn et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass

from metanudge.engines import Inner
from metanudge.estimators.base import MetaGradient, solve_plainly
from metanudge.params import norm
from metanudge.solvers.base import Solver


@dataclass(frozen=True)
class FOMAML:
    """g_i = ∇f_i(φ_i)  (paper, eq. 4). Biased, and the bias does not shrink with more inner steps.

    Cost per task: K support gradients and one query gradient.
    """

    engines = ("stacked", "inplace")
    width = 1

    def check(self, solver: Solver) -> None:
        """Any solver will do."""

    def accumulate(self, inner: Inner, solver: Solver, total: MetaGradient) -> None:
        """Add the query gradients at the solutions of a group of tasks."""
        solution = solve_plainly(inner, solver, total)
        g = inner.query_gradient(solution.displacement)
        total.check(inner.places, "query gradient", norm(g))
        total.add(g, 1.0)
