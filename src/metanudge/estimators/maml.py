"""MAML: the gradient of the K-step adaptation, backwards through the solver's steps (Finn, Abbeel &
Levine 2017).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from metanudge.engines import Inner
from metanudge.estimators.base import Estimator, refuse_stiffness
from metanudge.estimators.products import Autograd, Difference, Products
from metanudge.estimators.reverse import walk_back
from metanudge.estimators.total import MetaGradient
from metanudge.names import near
from metanudge.params import norm
from metanudge.problem import TwoLevels
from metanudge.solvers.adjoint import LinearUpdate
from metanudge.solvers.base import LinearSolver, Solver, check_positive
from metanudge.solvers.trajectory import Keep, solve

How = Literal["auto", "unrolled", "autograd", "difference"]


@dataclass(frozen=True)
class MAML(Estimator):
    """g_i = d f_i(φ_K(θ)) / dθ, exact for the algorithm that is run; the same for a learned
    stiffness and shared layers.

    Args:
        truncate: differentiate through the last so many steps only and treat the Jacobian of the
            earlier ones as the identity: 0 is FO-MAML, `steps` (the default) is MAML.
        products: how the Hessians of the steps enter. `"unrolled"`: autograd through all steps at
            once, on the stacked engine. Otherwise one step at a time, the last one first, with v ←
            v − α(H v + λv) for gradient descent: `"autograd"` has H v from one double backward,
            exact like the first; `"difference"` from two plain gradients, [∇f̂(φ + εv) − ∇f̂(φ −
            εv)]/2ε, so that nothing is differentiated twice. `"auto"` is unrolled on the stacked
            engine and autograd in place.
        epsilon: ‖εv‖ of a difference, as a multiple of 1 + ‖φ‖.
        trajectory: where φ_0 … φ_{K−1} are kept for the way back: on the `"device"`, on the
            `"host"`, or `"recompute"`, every √K-th of them, from which the steps between are taken
            once more. `"auto"`: on the device, or on the host where that is too small.

    Cost per task: unrolled, K support gradients with their graph kept, one query gradient, K
    Hessian-vector products in the backward pass; memory grows with every differentiated step. With
    autograd products K more support gradients, and the graph of one step at a time; with
    differences 3K support gradients and one query gradient, and the memory of one gradient. Also
    K displacements are kept (`trajectory`). Needs `GradientDescent` or `Nesterov`.
    """

    truncate: int | None = None
    products: How = "auto"
    epsilon: float = 1e-3
    trajectory: Keep = "auto"
    repeats_itself = True
    needs_stiffness = False

    def __post_init__(self) -> None:
        if self.truncate is not None and (isinstance(self.truncate, bool) or self.truncate < 0):
            raise ValueError(
                f"truncate must be a number of steps, 0 or more, got {self.truncate!r}. Leave it"
                " out for all steps."
            )
        for name, value, known in (
            ("products", self.products, get_args(How)),
            ("trajectory", self.trajectory, get_args(Keep)),
        ):
            if value not in known:
                raise ValueError(
                    f"Unknown {name} {value!r}.{near(str(value), known)} Choose one of:"
                    f" {', '.join(known)}."
                )
        check_positive(self.epsilon, "epsilon", "It is relative to the parameters' norm.")

    @property
    def engines(self) -> tuple[str, ...]:
        """Unrolled on the stacked one only."""
        return ("stacked",) if self.products == "unrolled" else ("stacked", "inplace")

    @property
    def width(self) -> int:
        """The two gradients of a difference."""
        return 2 if self.products == "difference" else 1

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
        """As many as the steps it differentiates at once."""
        if self.products == "difference":
            return 0
        return min(1, self._last(solver)) if self.products == "autograd" else self._last(solver)

    def _last(self, solver: Solver) -> int:
        """How many steps are differentiated."""
        return solver.steps if self.truncate is None else min(self.truncate, solver.steps)

    def accumulate(self, inner: Inner, solver: Solver, total: MetaGradient) -> None:
        """Add the gradients of the adaptation of a group of tasks."""
        assert isinstance(solver, LinearSolver)
        if total.metrics:
            total.record_query(inner.measure_query(None), None, tasks=inner.tasks)
        if self.products == "unrolled" or (self.products == "auto" and inner.unrolls):
            g, solution = inner.unrolled_gradient(solver, unrolled=self._last(solver))
            total.record_solution(inner, solution)
            total.check(inner.places, "meta-gradient (after the query gradient)", norm(g))
            total.add(g, 1.0)
            return
        oracle = inner.oracle([0.0], None, None, None)
        update = LinearUpdate(solver, oracle)
        way = solve(update, oracle, last=self._last(solver), keep=self.trajectory)
        total.record_solution(inner, way.solution)
        walk_back(total, inner, way, update, self._products())

    def _products(self) -> Products:
        return Difference(self.epsilon) if self.products == "difference" else Autograd()
