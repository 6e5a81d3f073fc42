"""Reptile: the direction from the adapted parameters back to θ (Nichol, Achiam & Schulman 2018)."""

from __future__ import annotations

from dataclasses import dataclass

from metanudge.engines import Inner
from metanudge.estimators.base import Estimator, refuse_shared, refuse_stiffness, solve_plainly
from metanudge.estimators.total import MetaGradient
from metanudge.problem import TwoLevels
from metanudge.solvers.base import Solver, check_positive


@dataclass(frozen=True)
class Reptile(Estimator):
    """g_i = (θ − φ_i) / (K α)  (paper, eq. 5). It never looks at the query set.

    Args:
        scale: what to multiply θ − φ with. Default 1/(K α), the solver's steps and learning rate.

    Cost per task: K support gradients.
    """

    scale: float | None = None
    repeats_itself = True
    needs_stiffness = False

    def __post_init__(self) -> None:
        if self.scale is not None:
            check_positive(self.scale, "scale", "Leave it out for 1/(steps × lr).")

    def check(self, solver: Solver) -> None:
        """Without a scale the solver must have a learning rate."""
        if self.scale is None and getattr(solver, "lr", None) is None:
            raise TypeError(
                f"Reptile divides by steps × learning rate (eq. 5), but {type(solver).__name__} has"
                " no learning rate. Give the factor yourself: Reptile(scale=...)."
            )

    def check_problem(self, problem: TwoLevels) -> None:
        """Reptile knows only where φ went."""
        if not problem.learns_theta:
            raise TypeError(
                "Reptile moves parameters towards the adapted ones, which presumes that x and phi"
                " are the same parameters; a general bilevel problem has no such direction. Use"
                " FOBMAML(), or FOMAML() for the direct term alone."
            )
        refuse_stiffness(
            self, problem, "Reptile never looks at the query loss, only at where φ went"
        )
        refuse_shared(
            self,
            problem,
            "shared layers do not move in the inner steps, and that motion is all Reptile looks at",
        )

    def accumulate(self, inner: Inner, solver: Solver, total: MetaGradient) -> None:
        """Add the scaled directions of a group of tasks."""
        solution = solve_plainly(inner, solver, total)
        scale = 1 / (solver.steps * solver.lr) if self.scale is None else self.scale  # type: ignore[attr-defined]
        total.add(solution.displacement, -scale)
