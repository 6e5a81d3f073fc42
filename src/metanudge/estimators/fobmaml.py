"""FO-B-MAML: the meta-gradient as the motion of the inner solution under a nudge.

E. M. Chayti and M. Jaggi, A New First-Order Meta-Learning Algorithm with Convergence Guarantees, TMLR 2026, Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from metanudge.engines import Inner
from metanudge.engines.inner import NudgedOracle
from metanudge.estimators.base import MetaGradient
from metanudge.estimators.identity import add_partials, add_response, centre_shift, query_gradient
from metanudge.estimators.stencils import STENCILS, StencilName
from metanudge.near import near
from metanudge.params import Params, norm, tiled
from metanudge.problem import Nudge, Problem
from metanudge.proximal import Custom, Diagonal
from metanudge.solvers.base import LinearSolver, Solution, Solver, Trace, check_positive

Start = Literal["theta", "shifted", "solution"]


@dataclass(frozen=True)
class FOBMAML:
    """∇F_i(θ) = −λ dφ*_{i,ν}/dν at ν = 0 (Proposition 1), with the derivative taken by a finite difference or by a tangent.

    The defaults are chosen from the project's ablation (`metanudge reproduce ablation`). The paper's estimator is `FOBMAML(nu=0.1)`.

    Args:
        nu: ν, size of the nudge. The error is O(ν^order) from the stencil plus O(λδ/ν) from inner solves of precision δ; in networks
            with ReLU or max-pooling, kinks make small ν worse (`check_gradient` shows it on your model). `"auto"`, the default: the
            learner chooses, and chooses again every 50 meta-steps (`metanudge.tuning`); `Stats.nu` is the ν used.
        stencil: `"symmetric"` {−ν, ν}, error O(ν²); `"forward"` {0, ν}, O(ν); `"five-point"` {±ν, ±2ν}, O(ν⁴); `"tangent"`:
            differentiate the solver's steps in the scalar ν in forward mode: no ν, no truncation error, memory that does not grow
            with the steps; needs second derivatives, `GradientDescent` or `Nesterov`, and the stacked engine.
        nudge: `"loss"`, ν f as in the paper: every inner step also needs a query gradient. `"gradient"`, ν⟨∇f(φ_0), φ⟩: the same
            derivative at ν = 0 with one query gradient per task, at the price of one more solve (for φ_0).
        start: where nudged solves start. `"theta"` as in the paper; aims at the implicit gradient, and stands inner steps that
            overshoot. `"shifted"`: at θ − ν∇f(φ_0)/λ, after one more solve, for φ_0; learns faster where inner steps are stable and
            the shift is short. With the gradient nudge it differentiates the K-step adaptation (for K = 1 and a scalar λ it is MAML's
            gradient). `"solution"`: at the un-nudged φ_0; K more steps from there.
        unshrink: K steps from θ or φ_0 reach only part of the nudge's effect, 1 − (1 − αλ)^K of it where the support loss is flat:
            the estimate is that much too small. True divides the factor out. Adam does not care; SGD does.

    A learned stiffness and shared layers get their part of the same identity, d/dν ∂_h[g + ν f] at the nudged solutions. It is the
    implicit gradient, right where inner solves have converged, whatever the start: `"shifted"` does not turn these parts into those of
    the K-step adaptation (its starting point depends on λ, which the identity leaves out). Shared layers cost one more gradient for each
    nudged solve.

    Cost per task with K steps: symmetric loss nudge 2K support and 2K query gradients, K support gradients and a query gradient more
    from the shifted start; symmetric gradient nudge 3K support gradients and one query gradient. An automatic ν adds less than 5 %.
    Memory: that of the solver.

    Example:
        >>> FOBMAML(nu=0.05, stencil="forward").stencil
        'forward'
    """

    nu: float | Literal["auto"] | None = None
    stencil: StencilName = "symmetric"
    nudge: Nudge = "loss"
    start: Start = "theta"
    unshrink: bool = False
    repeats_itself = True

    def __post_init__(self) -> None:
        _check_choice("stencil", self.stencil, (*STENCILS, "tangent"))
        _check_choice("nudge", self.nudge, ("loss", "gradient"))
        _check_choice("start", self.start, ("theta", "shifted", "solution"))
        if self.stencil == "tangent":
            if self.nu is not None:
                raise ValueError(
                    f"nu={self.nu!r} was given, but the tangent stencil differentiates in ν itself and uses none. "
                    'Leave nu out, or choose stencil="symmetric".'
                )
        elif self.nu is None:
            object.__setattr__(self, "nu", "auto")
        elif self.nu != "auto":
            _check_nu(self.nu)

    @property
    def engines(self) -> tuple[str, ...]:
        """The tangent needs Hessian-vector products of many rows; the rest runs anywhere."""
        return ("stacked",) if self.stencil == "tangent" else ("stacked", "inplace")

    @property
    def width(self) -> int:
        """Number of nudged problems per task."""
        if self.stencil == "tangent":
            return 1
        stencil = STENCILS[self.stencil]
        return len(stencil.offsets) + int(stencil.base != 0 and self.start == "solution")

    def check(self, solver: Solver) -> None:
        """Tangents and the shrinkage factor need a solver whose update is linear."""
        needs = 'stencil="tangent"' if self.stencil == "tangent" else "unshrink=True" if self.unshrink else None
        if needs is None:
            return
        if not isinstance(solver, LinearSolver):
            raise TypeError(
                f"{needs} follows the solver's update step by step, which needs GradientDescent or Nesterov, not "
                f'{type(solver).__name__}. Change the solver, or use stencil="symmetric" without unshrink.'
            )
        if solver.tol is not None:
            raise ValueError(f"{needs} needs a fixed number of steps, but the solver has tol={solver.tol!r}. Leave tol out.")

    def check_problem(self, problem: Problem) -> None:
        """A shifted centre needs a quadratic proximal term, the shrinkage factor a λ per parameter and nothing that is shared."""
        if self.start == "shifted" and isinstance(problem.proximal, Custom):
            raise ValueError(
                'start="shifted" moves the centre of a quadratic proximal term, but a regulariser was given instead of one. Use '
                'start="theta" or start="solution".'
            )
        if self.unshrink and (problem.shared or not isinstance(problem.proximal, Diagonal)):
            why = "some layers are shared" if problem.shared else "the proximal term has none"
            raise ValueError(
                f"unshrink=True divides by a factor that is known where each parameter has a λ and adapts, but {why}. Leave it out, and "
                "take more inner steps or Adam as outer optimizer."
            )

    def accumulate(self, inner: Inner, solver: Solver, total: MetaGradient) -> None:
        """Add −λ Σ_j c_j φ_{ν_j} / ν of a group of tasks."""
        before = inner.measure_query(None) if total.metrics else None
        total.record_query(before, None, tasks=inner.tasks)
        assert self.nu != "auto", "a ν is chosen before"
        total.nu = self.nu
        if self.stencil == "tangent":
            self._accumulate_tangent(inner, solver, total)
        else:
            self._accumulate_difference(inner, solver, total)

    def _accumulate_difference(self, inner: Inner, solver: Solver, total: MetaGradient) -> None:
        assert isinstance(self.nu, (int, float))
        stencil = STENCILS[self.stencil]
        scale = self._scale(inner, solver)
        warm = self.start == "solution"
        base: Params | None = None
        force: Params | None = None
        has_base = self.nudge == "gradient" or self.start != "theta" or stencil.base != 0
        if has_base:
            solution = inner.solve(solver)
            total.record(inner, solution)
            if total.metrics:
                total.record_query(None, inner.measure_query(solution.displacement), tasks=inner.tasks)
            if self.nudge == "gradient" or self.start == "shifted":
                force = self._force(total, inner, solution.displacement)
            if stencil.base and not warm:
                add_partials(total, inner, solution.displacement, [stencil.base / self.nu], scale=scale)
            base = solution.displacement if warm else None
            del solution
        pairs = list(zip(stencil.offsets, stencil.coefficients, strict=True))
        if stencil.base and warm:  # the un-nudged solve goes on as well, or its drift would look like an effect of the nudge
            pairs.append((0.0, stencil.base))
        for part in inner.parts([offset for offset, _ in pairs]):
            weights = [dict(pairs)[offset] / self.nu for offset in part]
            offsets = [offset * self.nu for offset in part]
            nudged = inner.solve(
                solver,
                offsets=offsets,
                nudge=self.nudge,
                force=force if self.nudge == "gradient" else None,
                start=self.starts(inner, offsets, base, force),
            )
            if not has_base:
                share = len(part) / len(pairs)
                total.record(inner, nudged, share=share)
                if total.metrics:
                    total.record_query(None, inner.measure_query(nudged.displacement), tasks=inner.tasks, share=share)
            else:
                total.check(inner.places, "loss of the nudged problem", nudged.losses)
                total.check(inner.places, "gradient of the nudged problem", nudged.residuals)
            total.record_error(nudged, weights, inner.problem.smallest_lam)
            used = offsets if self.nudge == "loss" else None
            add_partials(total, inner, nudged.displacement, weights, offsets=used, scale=scale)
            del nudged

    def _force(self, total: MetaGradient, inner: Inner, d: Params) -> Params:
        """∇f(φ_0); the gradient nudge takes the direct term of shared layers from the same evaluation."""
        if self.nudge == "gradient":
            return query_gradient(total, inner, d)
        force = inner.query_gradient(d)
        total.check(inner.places, "query gradient", norm(force))
        return force

    def starts(self, inner: Inner, offsets: list[float], base: Params | None, force: Params | None) -> Params | None:
        """Where the solves nudged by `offsets` start, row by row; None for θ. `base` is φ_0 − θ, `force` ∇f(φ_0)."""
        if self.start == "solution":
            assert base is not None
            return tiled(base, [1.0] * len(offsets))
        if self.start == "shifted":
            assert force is not None
            return tiled(centre_shift(inner, force), [-nu for nu in offsets])
        return None

    def _accumulate_tangent(self, inner: Inner, solver: Solver, total: MetaGradient) -> None:
        assert isinstance(solver, LinearSolver)
        base: Params | None = None
        force: Params | None = None
        if self.nudge == "gradient" or self.start != "theta":
            solution = inner.solve(solver)
            total.record(inner, solution)
            base = solution.displacement if self.start == "solution" else None
            if self.nudge == "gradient" or self.start == "shifted":
                force = self._force(total, inner, solution.displacement)
        d = inner.zeros(inner.tasks) if base is None else base
        tangent = inner.zeros(inner.tasks)
        if self.start == "shifted":
            assert force is not None
            tangent = {n: -leaf for n, leaf in centre_shift(inner, force).items()}
        solution, tangent = self._follow(inner, solver, d, tangent, force if self.nudge == "gradient" else None)
        total.record(inner, solution, share=1.0 if self.nudge == "loss" and self.start == "theta" else 0.0)
        total.check(inner.places, "tangent", norm(tangent))
        if total.metrics:
            total.record_query(None, inner.measure_query(solution.displacement), tasks=inner.tasks)
        if self.nudge == "loss" and inner.problem.shared:
            query_gradient(total, inner, solution.displacement)
        add_response(total, inner, solution.displacement, tangent, 1.0, scale=self._scale(inner, solver))

    def _follow(self, inner: Inner, solver: LinearSolver, d: Params, tangent: Params, force: Params | None) -> tuple[Solution, Params]:
        """Run the solver and, beside it, the same linear update on the tangent dφ/dν, whose gradient is (∇²f̂ + λ)t + ∇p."""
        proximal, mu = inner.problem.proximal, inner.problem.smallest_lam
        trace = Trace(NudgedOracle(inner, [0.0], None, None, None))
        memory, tangent_memory = solver.memory(d), solver.memory(tangent)
        for step in range(solver.steps):
            pull = force if force is not None else inner.query_gradient(d, step)
            loss, g, hv = inner.data_hvp(d, tangent, None, step, solver.batch_size)
            proximal.add_force(g, d, inner.theta)
            hv = {n: leaf + pull[n] for n, leaf in proximal.add_curvature(hv, d, tangent, inner.theta).items()}
            trace.record(loss, g)
            d, memory = solver.update(d, g, memory, strong_convexity=mu, inplace=False)
            tangent, tangent_memory = solver.update(tangent, hv, tangent_memory, strong_convexity=mu, inplace=False)
        d, tangent = solver.result(d, memory), solver.result(tangent, tangent_memory)
        steps = torch.full((inner.tasks,), solver.steps, device=inner.problem.device)
        return trace.solution(d, steps), tangent

    def _scale(self, inner: Inner, solver: Solver) -> Params | None:
        if not self.unshrink or self.start == "shifted":
            return None
        assert isinstance(solver, LinearSolver)
        return {n: leaf / response(solver, leaf, inner.problem.smallest_lam) for n, leaf in inner.problem.lam.items()}


def response(solver: LinearSolver, lam: torch.Tensor, strong_convexity: float | torch.Tensor) -> torch.Tensor:
    """How much of a constant force's effect a solver reaches in its K steps where the support loss is flat.

    The solver's own update on  λ d + 1 = 0,  as a share of the solution −1/λ: for gradient descent 1 − (1 − αλ)^K.

    Example:
        >>> from metanudge.solvers import GradientDescent
        >>> round(float(response(GradientDescent(lr=0.01, steps=5), torch.tensor(2.0), 2.0)), 4)
        0.0961
    """
    d: Params = {"d": torch.zeros_like(lam)}
    memory = solver.memory(d)
    for _ in range(solver.steps):
        d, memory = solver.update(d, {"d": lam * d["d"] + 1}, memory, strong_convexity=strong_convexity, inplace=False)
    return -lam * solver.result(d, memory)["d"]


def _check_choice(what: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"Unknown {what} {value!r}. Choose one of: {', '.join(choices)}.")


def _check_nu(nu: Any) -> None:
    if isinstance(nu, str):
        raise ValueError(f'Unknown nu {nu!r}.{near(nu.lower(), ["auto"])} Give a positive number, or "auto" to have it chosen.')
    check_positive(nu, "nu", "Start with 0.1; smaller values need more precise inner solves.")
