"""MAML: the gradient of the K-step adaptation, backwards through the solver's steps (Finn, Abbeel &
Levine 2017).
"""

from __future__ import annotations

from dataclasses import dataclass

from metanudge.engines import Inner
from metanudge.estimators.base import Estimator, refuse_stiffness
from metanudge.estimators.total import MetaGradient
from metanudge.params import norm
from metanudge.problem import TwoLevels
from metanudge.solvers.base import LinearSolver, Solver


@dataclass(frozen=True)
class MAML(Estimator):
    """g_i = d f_i(φ_K(θ)) / dθ, exact for the algorithm that is run; the same for a learned
    stiffness and shared layers.

    Args:
        truncate: differentiate through the last so many steps only and treat the Jacobian of the
            earlier ones as the identity: 0 is FO-MAML, `steps` (the default) is MAML.

    Cost per task: K support gradients with their graph kept, one query gradient, K Hessian-vector
    products in the backward pass; memory grows with every differentiated step. Needs
    `GradientDescent` or `Nesterov`, double backward and the stacked engine.
    """

    truncate: int | None = None
    engines = ("stacked",)
    repeats_itself = True

    def __post_init__(self) -> None:
        if self.truncate is not None and (isinstance(self.truncate, bool) or self.truncate < 0):
            raise ValueError(
                f"truncate must be a number of steps, 0 or more, got {self.truncate!r}. Leave it"
                " out for all steps."
            )

    def check(self, solver: Solver) -> None:
        """The solver's steps must be differentiable."""
        if not isinstance(solver, LinearSolver):
            raise TypeError(
                f"MAML differentiates the solver's steps, but {type(solver).__name__} updates in"
                " place. Use GradientDescent or Nesterov, or an estimator that needs no graph"
                " (FOBMAML, FOMAML, Reptile)."
            )
        if solver.tol is not None:
            raise ValueError(
                f"MAML needs a fixed number of steps, but the solver has tol={solver.tol!r}. Leave"
                " tol out."
            )

    def check_problem(self, problem: TwoLevels) -> None:
        """λ acts through the steps alone."""
        if self.truncate == 0:
            refuse_stiffness(
                self,
                problem,
                "truncate=0 differentiates through no step, and λ acts through the steps alone",
            )

    def graphs(self, solver: Solver) -> int:
        """As many as the steps it differentiates."""
        return solver.steps if self.truncate is None else min(self.truncate, solver.steps)

    def accumulate(self, inner: Inner, solver: Solver, total: MetaGradient) -> None:
        """Add the gradients of the adaptation of a group of tasks."""
        assert isinstance(solver, LinearSolver)
        if total.metrics:
            total.record_query(inner.measure_query(None), None, tasks=inner.tasks)
        g, solution = inner.unrolled_gradient(solver, unrolled=self.graphs(solver))
        total.record_solution(inner, solution)
        total.check(inner.places, "meta-gradient (after the query gradient)", norm(g))
        total.add(g, 1.0)
