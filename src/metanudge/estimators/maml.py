"""MAML: the gradient of the K-step adaptation, backwards through the solver's steps (Finn, Abbeel &
Levine 2017).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from metanudge.engines import Inner
from metanudge.engines.once import NoSecondDerivative
from metanudge.estimators.base import Estimator, refuse_stiffness
from metanudge.estimators.products import Products, check_epsilon, made, take_differences
from metanudge.estimators.reverse import there_and_back
from metanudge.estimators.total import MetaGradient
from metanudge.names import check_known
from metanudge.params import norm
from metanudge.problem import TwoLevels
from metanudge.solvers import TorchOptimizer
from metanudge.solvers.base import LinearSolver, Solver
from metanudge.solvers.optimizer_update import rule_of
from metanudge.solvers.rated import update_of
from metanudge.solvers.trajectory import Keep

How = Literal["auto", "unrolled", "autograd", "difference"]


@dataclass(frozen=True)
class MAML(Estimator):
    """g_i = d f_i(φ_K(θ)) / dθ, exact for the algorithm that is run; the same for a learned
    stiffness, learned inner rates and shared layers.

    Args:
        truncate: differentiate through the last so many steps only and treat the Jacobian of the
            earlier ones as the identity: 0 is FO-MAML, `steps` (the default) is MAML.
        products: how the Hessians of the steps enter. `"unrolled"`: autograd through all steps at
            once, on the stacked engine. Otherwise one step at a time, the last one first, with v ←
            v − α(H v + λv) for gradient descent: `"autograd"` has H v from one double backward,
            exact like the first; `"difference"` from two plain gradients, [∇f̂(φ + εv) − ∇f̂(φ −
            εv)]/2ε, so that nothing is differentiated twice. `"auto"` is unrolled on the stacked
            engine and for a bilevel problem; in place, for learned rates and for step weights it is
            autograd, or differences where the loss cannot be differentiated twice or a double
            backward does not fit into memory.
        epsilon: ‖εv‖ of a difference, as a multiple of 1 + ‖φ‖. `"auto"`, the default with
            differences: from the precision of the gradients (`metanudge.engines.precision`) and,
            where a learner trains, chosen on a few tasks as `FOBMAML(nu="auto")` chooses ν, with an
            estimate of the error in the statistics.
        trajectory: where φ_0 … φ_{K−1} are kept for the way back: on the `"device"`, on the
            `"host"`, or `"recompute"`, every √K-th of them, from which the steps between are taken
            once more. `"auto"`: on the device, or on the host where that is too small.
        step_weights: of the query losses after step 1, …, K, whose weighted sum is the meta-loss
            (multi-step loss of MAML++, Antoniou et al. 2019); default: the last one alone. To
            anneal them give the learner another `MAML`. The statistics stay those of φ_K.

    Cost per task: unrolled, K support gradients with their graph kept, one query gradient, K
    Hessian-vector products in the backward pass; memory grows with every differentiated step. With
    autograd products K more support gradients, and the graph of one step at a time; with
    differences 3K support gradients and one query gradient, and the memory of one gradient. Step
    weights cost a query gradient for each that is not 0. Also
    K displacements are kept (`trajectory`), with learned rates K gradients, too, with Adam also
    twice K moments. Needs `GradientDescent` or `Nesterov`, or one step at a time `TorchOptimizer`
    with SGD, Adam or AdamW.
    """

    truncate: int | None = None
    products: How = "auto"
    epsilon: float | Literal["auto"] = "auto"
    trajectory: Keep = "auto"
    step_weights: tuple[float, ...] | None = None
    repeats_itself = True
    needs_stiffness = False
    learns_rates = True

    def __post_init__(self) -> None:
        if self.truncate is not None and (isinstance(self.truncate, bool) or self.truncate < 0):
            raise ValueError(
                f"truncate must be a number of steps, 0 or more, got {self.truncate!r}. Leave it"
                " out for all steps."
            )
        check_known("products", self.products, get_args(How))
        check_known("trajectory", self.trajectory, get_args(Keep))
        check_epsilon(self.epsilon)
        if self.step_weights is not None:
            _check_numbers(self.step_weights)
            if self.products == "unrolled":
                raise ValueError(
                    "step_weights weighs the query losses of steps taken back one at a time, but"
                    " products='unrolled' takes all at once. Leave products out."
                )

    @property
    def engines(self) -> tuple[str, ...]:
        """Unrolled on the stacked one only."""
        return ("stacked",) if self.products == "unrolled" else ("stacked", "inplace")

    @property
    def width(self) -> int:
        """The two gradients of a difference."""
        return 2 if self.products == "difference" else 1

    @property
    def automatic(self) -> bool:
        """Whether ε is to be chosen."""
        return self.products == "difference" and self.epsilon == "auto"

    def on(self, problem: TwoLevels) -> MAML:
        """By differences, where `"auto"` has found that autograd cannot differentiate twice."""
        known = self.products != "auto" or problem.twice_differentiable
        return self if known else replace(self, products="difference")

    def check(self, solver: Solver) -> None:
        """The solver's steps must be differentiable."""
        if isinstance(solver, TorchOptimizer) and self.products != "unrolled":
            rule_of(solver)
        elif not isinstance(solver, LinearSolver):
            name = type(solver).__name__
            why = "updates in place" if name == "TorchOptimizer" else "has no update of fixed form"
            raise TypeError(
                f"MAML differentiates the solver's steps, but {name} {why}. Use GradientDescent or"
                " Nesterov, or an estimator that needs no steps (FOBMAML, IMAML)."
            )
        if solver.tol is not None:
            raise ValueError(
                f"MAML needs a fixed number of steps, but the solver has tol={solver.tol!r}. Leave"
                " tol out."
            )
        if self.step_weights is not None:
            self._check_weights(solver.steps, self._last(solver))

    def _check_weights(self, steps: int, last: int) -> None:
        assert self.step_weights is not None
        if len(self.step_weights) != steps:
            raise ValueError(
                f"step_weights has {len(self.step_weights)} weights, but the solver takes {steps}"
                " steps. Give one for each step."
            )
        early = next((k for k, w in enumerate(self.step_weights, 1) if w), steps)
        if early < steps - last:
            raise ValueError(
                f"step_weights weighs the loss after step {early}, but with"
                f" truncate={self.truncate} only the last {last} of {steps} steps are kept. Leave"
                " truncate out, or give earlier steps weight 0."
            )

    def check_problem(self, problem: TwoLevels) -> None:
        """λ and learned rates act through the steps alone."""
        if problem.rates is not None and (self.truncate == 0 or self.products == "unrolled"):
            raise ValueError(
                "Inner rates (learn_lr) are learned from steps taken back one at a time, but"
                f" {self!r} takes none. Leave truncate=0 and products='unrolled' out."
            )
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
        at_once = self._last(solver)
        whole = (
            self.products != "autograd"
            and self.step_weights is None
            and isinstance(solver, LinearSolver)
        )
        return at_once if whole else min(1, at_once)

    def _last(self, solver: Solver) -> int:
        """How many steps are differentiated."""
        return solver.steps if self.truncate is None else min(self.truncate, solver.steps)

    def accumulate(self, inner: Inner, solver: Solver, total: MetaGradient) -> None:
        """Add the gradients of the adaptation of a group of tasks."""
        if total.metrics:
            total.record_query(inner.measure_query(None), None, tasks=inner.tasks)
        if self._unrolls(inner, solver):
            try:
                self._unroll(inner, solver, total)
                return
            except NoSecondDerivative as error:
                if self.products == "unrolled":
                    raise
                take_differences(inner.problem, error)
        self.walk_back(inner, solver, total, made(self.products, self.epsilon, inner.problem))

    def walk_back(
        self, inner: Inner, solver: Solver, total: MetaGradient, products: Products
    ) -> None:
        """The same with these products, one step at a time."""
        oracle = inner.oracle()
        there_and_back(
            total,
            inner,
            oracle,
            update_of(solver, oracle, inner.problem.rates),
            products,
            last=self._last(solver),
            keep=self.trajectory,
            weights=self.step_weights,
        )
        total.products = products.name

    def _unroll(self, inner: Inner, solver: Solver, total: MetaGradient) -> None:
        assert isinstance(solver, LinearSolver)
        g, solution = inner.unrolled_gradient(solver, unrolled=self._last(solver))
        total.products = "unrolled"
        total.record_solution(inner, solution)
        total.check(inner.places, "meta-gradient (after the query gradient)", norm(g))
        total.add(g, 1.0)

    def _unrolls(self, inner: Inner, solver: Solver) -> bool:
        auto = self.products == "auto" and inner.unrolls and isinstance(solver, LinearSolver)
        at_once = inner.problem.rates is None and self.step_weights is None
        return self.products == "unrolled" or (auto and at_once)


def _check_numbers(weights: Sequence[float]) -> None:
    """Finite numbers, and the last one not 0: it would be a solver of fewer steps."""
    try:
        fine = all(map(math.isfinite, weights)) and weights[-1] != 0
    except (TypeError, IndexError, KeyError):
        fine = False
    if not fine:
        raise ValueError(
            f"step_weights must be finite numbers, one for each inner step, and the last one not 0;"
            f" got {weights!r}. Write e.g. step_weights=(0.1, 0.2, 0.7) for 3 steps."
        )
