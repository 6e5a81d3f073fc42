"""FO-B-MAML: the meta-gradient as the motion of the inner solution under a nudge.

E. M. Chayti and M. Jaggi, A New First-Order Meta-Learning Algorithm with Convergence Guarantees,
TMLR 2026, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from metanudge.engines import Inner
from metanudge.estimators.base import Estimator
from metanudge.estimators.centre import centre_shift, check_shifted
from metanudge.estimators.shrinkage import check_unshrink, unshrunk
from metanudge.estimators.stencils import STENCILS, StartName, StencilName
from metanudge.estimators.tangent import add_tangent
from metanudge.estimators.total import MetaGradient
from metanudge.names import check_known, near
from metanudge.params import Params, middle, tiled
from metanudge.problem import Nudge, TwoLevels
from metanudge.solvers.base import LinearSolver, Solution, Solver, check_positive

_FINE = ' Without the nudge all was finite: a smaller nu or start="theta" may do, too.'


@dataclass(frozen=True)
class FOBMAML(Estimator):
    """∇F_i(θ) = −λ dφ*_{i,ν}/dν at ν = 0 (Proposition 1), with the derivative taken by a finite
    difference or by a tangent.

    The defaults are chosen from the project's ablation (`metanudge reproduce ablation`). The
    paper's estimator is `FOBMAML(nu=0.1)`.

    Args:
        nu: ν, size of the nudge. The error is O(ν^order) from the stencil plus O(λδ/ν) from inner
            solves of precision δ; in networks with ReLU or max-pooling, kinks make small ν worse
            (`check_gradient` shows it on your model). `"auto"`, the default, or None: it is chosen,
            by a learner again every 50 meta-steps (`metanudge.tuning`); `Stats.nu` is the ν used.
        stencil: `"symmetric"` {−ν, ν}, error O(ν²); `"forward"` {0, ν}, O(ν); `"five-point"` {±ν,
            ±2ν}, O(ν⁴); `"tangent"`: differentiate the solver's steps in the scalar ν in forward
            mode: no ν, no truncation error, memory that does not grow with the steps; needs second
            derivatives, `GradientDescent` or `Nesterov`, and the stacked engine.
        nudge: `"loss"`, ν f as in the paper: every inner step also needs a query gradient.
            `"gradient"`, ν⟨∇f(φ_0), φ⟩: the same derivative at ν = 0 with one query gradient per
            task, at the price of one more solve (for φ_0).
        start: where nudged solves start. `"theta"` as in the paper; aims at the implicit gradient,
            and stands inner steps that overshoot. `"shifted"`: at θ − ν∇f(φ_0)/λ, after one more
            solve, for φ_0; learns faster where inner steps are stable and the shift is short. With
            the gradient nudge it differentiates the K-step adaptation (for K = 1 and a scalar λ it
            is MAML's gradient). `"solution"`: at the un-nudged φ_0; K more steps from there.
        unshrink: K steps from θ or φ_0 reach only part of the nudge's effect, 1 − (1 − αλ)^K of it
            where the support loss is flat: the estimate is that much too small. True divides the
            factor out. Adam does not care; SGD does.

    A learned stiffness and shared layers get their part of the same identity, d/dν ∂_h[g + ν f] at
    the nudged solutions. It is the implicit gradient, right where inner solves have converged,
    whatever the start: `"shifted"` does not turn these parts into those of the K-step adaptation
    (its starting point depends on λ, which the identity leaves out). Shared layers cost one more
    gradient for each nudged solve.

    Cost per task with K steps: symmetric loss nudge 2K support and 2K query gradients, K support
    gradients and a query gradient more from the shifted start; symmetric gradient nudge 3K support
    gradients and one query gradient. An automatic ν adds less than 5 %. Memory: that of the solver.

    Example:
        >>> FOBMAML(nu=0.05, stencil="forward").stencil
        'forward'
    """

    nu: float | Literal["auto"] | None = "auto"
    stencil: StencilName = "symmetric"
    nudge: Nudge = "loss"
    start: StartName = "theta"
    unshrink: bool = False
    repeats_itself = True

    def accumulate(self, inner: Inner, solver: Solver, total: MetaGradient) -> None:
        """Algorithm 1, lines 5 to 9, for a group of tasks: add −λ Σ_j c_j φ_j / ν."""
        total.record_start(inner)
        shrinks = self.unshrink and self.start != "shifted"
        scale = unshrunk(solver, inner.problem) if shrinks else None
        if self.stencil == "tangent":
            add_tangent(total, inner, solver, nudge=self.nudge, start=self.start, scale=scale)
            return
        assert isinstance(self.nu, (int, float)), "a ν is chosen before"
        total.nu = self.nu
        base = self.solve_plain(inner, solver, total)
        for found in self.solve_nudged(
            inner, solver, [self.nu], base
        ):  # line 6: φ_j, nudged by ν_j
            self._record(total, inner, found, base)
            offsets = found.nudges if found.nudged and self.nudge == "loss" else None
            # Lines 7 and 9: −λ c_j φ_j / ν, averaged over the tasks. λ and shared layers get ∂_h[g
            # + ν_j f](φ_j) c_j / ν.
            d = found.solution.displacement
            total.add_partials(inner, d, found.weights(), offsets=offsets, scale=scale)
            del d, found  # or they would still be alive during the next solve

    def solve_plain(self, inner: Inner, solver: Solver, total: MetaGradient | None = None) -> Base:
        """φ_0 and ∇f(φ_0) where nudge, start or stencil need them, or the problem; `total` takes
        note.
        """
        with_force = self.nudge == "gradient" or self.start == "shifted"
        alone = self.start == "solution" or STENCILS[self.stencil].base or inner.reports_solution
        if not (with_force or alone):
            return Base()
        solution = inner.solve(solver)
        if total is not None:
            total.record_solution(inner, solution)
        if not with_force:
            return Base(True, solution)
        d, direct = solution.displacement, self.nudge == "gradient"
        force = (
            inner.query_gradient(d)
            if total is None
            else total.query_gradient(inner, d, direct=direct)
        )
        return Base(True, solution, force)

    def solve_nudged(
        self, inner: Inner, solver: Solver, nus: Sequence[float], base: Base
    ) -> Iterator[Displaced]:
        """The solutions φ_j that the stencil takes at each of the `nus`, with coefficients; `base`
        lets go of what is not needed.
        """
        stencil = STENCILS[self.stencil]
        terms = [
            Term(offset * nu, tuple(c / nu if other == place else 0.0 for other in range(len(nus))))
            for place, nu in enumerate(nus)
            for offset, c in zip(stencil.offsets, stencil.coefficients, strict=True)
        ]
        still = Term(0.0, tuple(stencil.base / nu for nu in nus))
        # the un-nudged solve goes on, or its drift would look like an effect of the nudge
        if stencil.base and self.start == "solution":
            terms.append(still)
        elif stencil.base:
            assert base.solution is not None
            yield Displaced(base.solution, [still], nudged=False)
        if self.start != "solution":
            base.solution = None
        force = base.force if self.nudge == "gradient" else None
        for part in inner.parts(terms):
            nus = [term.nu for term in part]
            start = self._starts(inner, nus, base)
            solution = inner.solve(solver, offsets=nus, nudge=self.nudge, force=force, start=start)
            yield Displaced(solution, part, share=len(part) / len(terms))
            del start, solution

    def _starts(self, inner: Inner, nudges: Sequence[float], base: Base) -> Params | None:
        """Where the nudged solves start, row by row; None for θ."""
        if self.start == "solution":
            assert base.solution is not None
            return tiled(base.solution.displacement, [1.0] * len(nudges))
        if self.start == "shifted":
            assert base.force is not None
            return tiled(centre_shift(inner, base.force), [-nu for nu in nudges])
        return None

    def _record(self, total: MetaGradient, inner: Inner, found: Displaced, base: Base) -> None:
        """Note what nudged solves did; where there was no un-nudged one, they stand for it."""
        if not found.nudged:
            return
        solution = found.solution
        if base.solved:
            total.check(inner.places, "loss of the nudged problem", solution.losses, _FINE)
            total.check(inner.places, "gradient of the nudged problem", solution.residuals, _FINE)
        else:
            total.record(inner, solution, share=found.share)
            if total.metrics:
                self._measure(total, inner, found)
        force = base.force if self.nudge == "gradient" else None
        total.record_error(inner.imprecision(solution, found.nudges, force), found.weights())

    def _measure(self, total: MetaGradient, inner: Inner, found: Displaced) -> None:
        """Query loss and accuracy in the middle of φ_ν and φ_−ν, which is φ_0 + O(ν²), where both
        are there at once; else at every φ_ν.
        """
        nudges, d, share = found.nudges, found.solution.displacement, found.share
        if inner.nudges_at_once > 1:
            if abs(nudges[0]) > abs(total.nu or 0.0):  # of five points, those farther out
                return
            d, share = middle(d, inner.tasks), 1.0
        else:
            total.nudged = True
        total.record_query(None, inner.measure_query(d), tasks=inner.tasks, share=share)

    @property
    def automatic(self) -> bool:
        """Whether ν is still to be chosen."""
        return self.nu in ("auto", None) and self.stencil != "tangent"

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

    def graphs(self, solver: Solver) -> int:
        """The tangent goes through one step at a time."""
        return int(self.stencil == "tangent")

    def __post_init__(self) -> None:
        check_known("stencil", self.stencil, (*STENCILS, "tangent"))
        check_known("nudge", self.nudge, get_args(Nudge))
        check_known("start", self.start, get_args(StartName))
        if self.nu in ("auto", None):
            return
        if self.stencil == "tangent":
            raise ValueError(
                f"nu={self.nu!r} was given, but the tangent stencil differentiates in ν itself and"
                ' uses none. Leave nu out, or choose stencil="symmetric".'
            )
        _check_nu(self.nu)

    def check(self, solver: Solver) -> None:
        """Tangents and the shrinkage factor need a solver whose update is linear."""
        if self.stencil != "tangent" and not self.unshrink:
            return
        needs = 'stencil="tangent"' if self.stencil == "tangent" else "unshrink=True"
        if not isinstance(solver, LinearSolver):
            raise TypeError(
                f"{needs} follows the solver's update step by step, which needs GradientDescent or"
                f" Nesterov, not {type(solver).__name__}. Change the solver, or use"
                ' stencil="symmetric" without unshrink.'
            )
        if solver.tol is not None:
            raise ValueError(
                f"{needs} needs a fixed number of steps, but the solver has tol={solver.tol!r}."
                " Leave tol out."
            )

    def check_problem(self, problem: TwoLevels) -> None:
        """A shifted start needs a centre to shift, the shrinkage factor a λ per parameter and
        nothing that is shared.
        """
        if self.start == "shifted":
            check_shifted(problem)
        if self.unshrink:
            check_unshrink(problem)


@dataclass
class Base:
    """The un-nudged solution, if it was solved for, and ∇f(φ_0), as long as somebody needs them."""

    solved: bool = False
    solution: Solution | None = None
    force: Params | None = None


class Term(NamedTuple):
    """ν_j, and the coefficient c_j / ν of φ_j in the stencil of each ν; 0 where it does not
    occur.
    """

    nu: float
    weights: tuple[float, ...]


@dataclass(frozen=True)
class Displaced:
    """Solutions of some nudged problems of every task, one term after the other; `share` of all of
    them.
    """

    solution: Solution
    terms: Sequence[Term]
    nudged: bool = True
    share: float = 1.0

    @property
    def nudges(self) -> list[float]:
        """ν_j."""
        return [term.nu for term in self.terms]

    def weights(self, place: int = 0) -> list[float]:
        """c_j / ν, of the ν at a place among those asked for."""
        return [term.weights[place] for term in self.terms]


def _check_nu(nu: Any) -> None:
    if isinstance(nu, str):
        raise ValueError(
            f'Unknown nu {nu!r}.{near(nu.lower(), ["auto"])} Give a positive number, or "auto" to'
            " have it chosen."
        )
    check_positive(nu, "nu", "Start with 0.1; smaller values need more precise inner solves.")
