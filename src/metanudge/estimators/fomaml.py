"""FO-MAML: the query gradient at the adapted parameters, the adaptation's Jacobian ignored (Finn et
al. 2017).
"""

from __future__ import annotations

from dataclasses import dataclass

from metanudge.engines import Inner
from metanudge.estimators.base import Estimator, refuse_stiffness, solve_plainly
from metanudge.estimators.total import MetaGradient
from metanudge.problem import TwoLevels
from metanudge.solvers.base import Solver


@dataclass(frozen=True)
class FOMAML(Estimator):
    """g_i = ∇f_i(φ_i)  (paper, eq. 4), by shared layers too. Biased, and the bias does not shrink
    with more inner steps.

    Cost per task: K support gradients and one query gradient.
    """

    repeats_itself = True
    needs_stiffness = False

    def check_problem(self, problem: TwoLevels) -> None:
        """FO-MAML ignores how φ depends on λ."""
        refuse_stiffness(
            self,
            problem,
            "the query loss at φ_K does not depend on λ directly, and FO-MAML ignores how φ_K does",
        )

    def accumulate(self, inner: Inner, solver: Solver, total: MetaGradient) -> None:
        """Add the query gradients at the solutions of a group of tasks."""
        solution = solve_plainly(inner, solver, total)
        g = total.query_gradient(inner, solution.displacement)
        if inner.problem.learns_theta:
            total.add(g, 1.0)
