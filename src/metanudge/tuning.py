"""ν, the size of the nudge: a rule of thumb, and a ν that chooses itself.

A difference of solutions has two errors. The stencil's own shrinks with ν (as ν² for the symmetric
one); whatever makes φ_ν jump grows as ν shrinks, because it is divided by ν: rounding, solves that
stop at different steps, kinks of ReLU and max-pooling. Bounds such as the paper's λδ/ν say little
about the second, since most of δ is common to both ends of a difference and cancels. It can be
seen, though: on a ladder ν_0 > ν_1 > … neighbouring estimates disagree by about the larger of the
two errors, and so disagree least where their sum is least.

    d_j = ‖g(ν_j) − g(ν_{j+1})‖ / min(‖g(ν_j)‖, ‖g(ν_{j+1})‖)

The smaller norm in the denominator tells a plateau from a ν so large that φ moves as far as it will
go, where g falls as 1/ν: there d_j is not far below ν_j/ν_{j+1} − 1. Everything is relative to what
the nudge does to φ, so λ and the scale of the losses need no thought.

Where a disagreement is no more than rounding makes it, its size is chance. Each displacement d_k =
φ_k − θ in g = Σ c_k d_k/ν has a relative error of about ε, so there it counts as what is to be
expected,

    r = ε √(Σ c_k²‖d_k‖²) / (ν ‖g‖),

which grows as ν shrinks and is the same on every machine: an ulp of θ does not move ν to another
rung.

From the shifted start ν has one more bound: that start, ν∇f/λ away from θ, should not be further
away than the solution.

The ε of `MAML(products="difference")` is chosen in the same way, from its meta-gradients at
neighbouring ε. Where ε is too large these do not fall as 1/ε: they tend to the gradient g_∞ without
any Hessian, and so agree there, wrongly. Hence ‖g(ε_j) − g_∞‖ and ‖g(ε_{j+1}) − g_∞‖ stand in the
denominator, and all d_j are multiplied by the part of ‖g‖ that these are where the d_j are least,
so that they say how large the error is beside the whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, TypeGuard, Unpack

import torch
from torch import Tensor

from metanudge.engines import Cost, Engine, Inner
from metanudge.estimators.base import Estimator
from metanudge.estimators.centre import centre_shift
from metanudge.estimators.fobmaml import FOBMAML
from metanudge.estimators.ladder import LADDER, Disagreement, Motion, average, best_nu, within
from metanudge.estimators.maml import MAML
from metanudge.estimators.products import (
    Difference,
    Products,
    Straight,
    ladder,
    warn_of_kinks,
)
from metanudge.estimators.run import check
from metanudge.estimators.stencils import STENCILS
from metanudge.estimators.total import MetaGradient, Stats
from metanudge.params import Params, norm
from metanudge.problem import Problem
from metanudge.solvers.base import Solver, check_count, check_positive
from metanudge.task import TaskBatch

_FEW, _MANY = 10, 50
_UNKNOWN = -1.0


def step_aware(steps: int, *, coarse: float = 0.1, fine: float = 0.01) -> float:
    """ν for a number of inner steps K, by the paper's "Step-Aware" rule (appendix, Empirical
    Analysis of Hyperparameter Sensitivity).

    Coarse adaptation, K ≤ 10: ν in [0.1, 0.5], "to ensure the meta-gradient signal is not lost to
    solver noise". High-precision adaptation, K ≥ 50: ν of 0.01 or 0.001. The paper says nothing
    about what lies between; here log ν falls linearly with log K.

    The rule comes from smooth quadratic problems. With ReLU or max-pooling more steps do not make a
    small ν safe: use `nu="auto"`.

    Args:
        steps: K.
        coarse: ν up to 10 steps.
        fine: ν from 50 steps on.

    Example:
        >>> [round(step_aware(steps), 3) for steps in (1, 10, 20, 50, 100)]
        [0.1, 0.1, 0.037, 0.01, 0.01]
    """
    check_count(steps, "steps", "It is the number of inner steps K.")
    check_positive(coarse, "coarse", "The paper's range is 0.1 to 0.5.")
    check_positive(fine, "fine", "The paper names 0.01 and 0.001.")
    share = math.log(min(max(steps, _FEW), _MANY) / _FEW) / math.log(_MANY / _FEW)
    return coarse * (fine / coarse) ** share


@dataclass(frozen=True)
class NuEstimate:
    """What a look at the ladder found.

    Attributes:
        nu: where neighbouring estimates agree best; the rule of thumb where none agree at all.
        error: their relative disagreement there, about the error of a meta-gradient at this ν.
            Above 1 no ν gives a gradient that is larger than its error: the inner steps overshoot,
            or there are kinks everywhere.
        nus: the ladder.
        disagreement: between each ν of the ladder and the next; infinite where a solve was not
            finite.
        rounding: the disagreement to be expected from rounding alone.
        tasks: on how many tasks.
        gradients: support and query gradients that it took, all tasks together.
        longest: the ν at which the shifted start of the median task is as far from θ as its
            solution; infinite for other starts.
        symbol: what is chosen: ν, or ε of `MAML`'s differences.
    """

    nu: float
    error: float
    nus: tuple[float, ...]
    disagreement: tuple[float, ...]
    rounding: tuple[float, ...]
    tasks: int
    gradients: int
    longest: float = math.inf
    symbol: str = "ν"

    def __str__(self) -> str:
        chosen = f"{self.symbol} {self.nu:.3g}"
        return f"{chosen}, relative error of the difference about {self.error:.2g}"


class Where(TypedDict):
    """How and where the meta-gradient is made that a ν is for; `seed` and `first` as in
    `meta_gradient`.
    """

    solver: Solver
    engine: Engine
    seed: int
    first: int


def estimate_nu(
    problem: Problem,
    tasks: TaskBatch,
    *,
    estimator: FOBMAML,
    solver: Solver,
    engine: Engine,
    seed: int = 0,
    first: int = 0,
    rungs_at_once: int = 1,
) -> NuEstimate:
    """The ν at which the estimator's error on these tasks is about the least.

    Args:
        estimator: stencil, nudge and start; its own ν does not matter.
        seed, first: as in `meta_gradient`.
        rungs_at_once: how many ν the stacked engine tries side by side.

    Cost: that of seven meta-gradients of these tasks (less for estimators that begin with an
    un-nudged solve). Memory: that of a meta-gradient; in place, one copy of the parameters more.
    """
    check(problem, tasks, solver=solver, estimator=estimator, engine=engine)
    at_once = rungs_at_once if engine.name == "stacked" else 1
    width, nus = at_once * estimator.width, LADDER
    cost, found = Cost(), Disagreement()
    shifts: list[Tensor] = []
    with engine.session(problem, tasks, width=width, seed=seed, cost=cost, first=first) as groups:
        inners = list(groups)
        for begin in range(0, len(nus), at_once):
            for motion in _motions(estimator, inners, solver, nus[begin : begin + at_once], shifts):
                found.see(motion)
    disagreement, rounding = found.read()
    order = STENCILS[estimator.stencil].order
    nu, error = best_nu(nus, disagreement, order=order, rounding=rounding)
    gradients = cost.support_gradients + cost.query_gradients
    longest = float(torch.cat(shifts).double().median().reciprocal()) if shifts else math.inf
    chosen = within(step_aware(solver.steps) if nu is None else nu, longest, nus)
    return NuEstimate(chosen, error, nus, disagreement, rounding, len(tasks), gradients, longest)


def estimate_epsilon(
    problem: Problem, tasks: TaskBatch, *, estimator: MAML, **where: Unpack[Where]
) -> NuEstimate:
    """The ε of `MAML`'s differences at which the error on these tasks is about the least.

    Cost: that of seven meta-gradients of these tasks, and as many solves and query gradients once
    more. Memory: that of one, and two copies of it.
    """
    solver, engine, seed = where["solver"], where["engine"], where["seed"]
    check(problem, tasks, solver=solver, estimator=estimator, engine=engine)
    epsilons, cost = ladder(problem), Cost()

    def gradient(products: Products) -> Params:
        total = MetaGradient(problem, len(tasks), metrics=False, seed=seed)
        with engine.session(
            problem, tasks, width=estimator.width, seed=seed, cost=cost, first=where["first"]
        ) as groups:
            for inner in groups:
                estimator.walk_back(inner, solver, total, products)
        return total.gradient

    found = Disagreement(gradient(Straight()))
    for epsilon in epsilons:
        found.see(Motion(problem, gradient(Difference(epsilon))))
    disagreement, rounding = found.read()
    best, error = best_nu(epsilons, disagreement, order=2)
    chosen = epsilons[0] if best is None else best
    gradients = cost.support_gradients + cost.query_gradients
    return NuEstimate(
        chosen, error, epsilons, disagreement, rounding, len(tasks), gradients, symbol="ε"
    )


def _motions(
    estimator: FOBMAML,
    inners: Sequence[Inner],
    solver: Solver,
    nus: Sequence[float],
    shifts: list[Tensor],
) -> list[Motion]:
    """dφ/dν by the estimator's stencil at each ν, summed over all tasks.

    `shifts` takes for each task how far from θ a shifted start is for each unit of ν, as a multiple
    of the solution's distance.
    """
    motions = [Motion(inners[0].problem) for _ in nus]
    for inner in inners:
        base = estimator.solve_plain(inner, solver)
        if estimator.start == "shifted":
            assert base.solution is not None
            assert base.force is not None
            shifts.append(norm(centre_shift(inner, base.force)) / norm(base.solution.displacement))
        for found in estimator.solve_nudged(inner, solver, nus, base):
            for rung, motion in enumerate(motions):
                motion.add(found.solution.displacement, found.weights(rung))
            del found  # or it would still be alive during the next solve
    return motions


class NuTuner:
    """Keeps the ν of a learner whose estimator says `nu="auto"` (or the ε of one that says
    `epsilon="auto"`): chooses it at the first meta-step and again every so many.

    What was found before counts half, and half again with every new look: a look is at a few tasks
    only, and θ moves slowly. ν is one of a few values, so that ranks and resumed runs agree on it.

    Args:
        every: meta-steps between two looks, more where `share` asks for it.
        share: what all looks together may cost, as a share of the meta-gradients' own gradient
            evaluations.
        most_tasks: on how many tasks of a meta-batch at most.

    Attributes:
        nu: the present choice; None before the first look.
        last: what the last look found by itself; None before the first, and after
            `load_state_dict`.
        gradients: support and query gradients of all looks.
    """

    def __init__(self, *, every: int = 50, share: float = 0.04, most_tasks: int = 4) -> None:
        check_count(
            every, "every", "It is the number of meta-steps between two looks; 50 is usual."
        )
        check_positive(share, "share", "It is a share of the training's cost; 0.04 is usual.")
        check_count(most_tasks, "most_tasks", "4 are usual.")
        self.every, self.share, self.most_tasks = every, share, most_tasks
        self.nu: float | None = None
        self.last: NuEstimate | None = None
        self.gradients = 0
        self._age = 0
        self._disagreement: list[float] | None = None
        self._made_for: tuple[Any, ...] | None = None

    def tasks(self, count: int) -> int:
        """On how many tasks of a meta-batch of `count` a look is taken: the first so many."""
        return min(count, self.most_tasks)

    def interval(self, count: int) -> int:
        """Meta-steps between two looks for meta-batches of `count` tasks.

        Example:
            >>> [NuTuner().interval(count) for count in (1, 4, 8, 16, 64)]
            [175, 175, 88, 50, 50]
        """
        return max(self.every, math.ceil(len(LADDER) * self.tasks(count) / (self.share * count)))

    def settled(
        self, estimator: Estimator, problem: Problem, tasks: TaskBatch, **where: Unpack[Where]
    ) -> Estimator:
        """The estimator with the ν to use now, after a look at the first few of the tasks where it
        is time for one.
        """
        if not is_automatic(estimator):
            return estimator
        made_for = (estimator, where["solver"])
        stale = self._made_for not in (None, made_for)
        if self.nu is None or stale or self._age >= self.interval(len(tasks)):
            few = self.tasks(len(tasks))
            some = tasks if few == len(tasks) else tasks[:few]
            # no more solves side by side than the meta-gradient itself makes
            self.look(estimator, problem, some, rungs_at_once=len(tasks) // few, **where)
        self._made_for = made_for
        assert self.nu is not None
        if isinstance(estimator, MAML):
            return replace(estimator, epsilon=self.nu)
        return replace(estimator, nu=self.nu)

    def look(
        self,
        estimator: FOBMAML | MAML,
        problem: Problem,
        tasks: TaskBatch,
        *,
        rungs_at_once: int = 1,
        **where: Unpack[Where],
    ) -> NuEstimate:
        """Choose ν anew on these tasks."""
        if isinstance(estimator, MAML):
            found, order = estimate_epsilon(problem, tasks, estimator=estimator, **where), 2
            seen = "at no ε are MAML's gradients within a third of those at the next one"
            warn_of_kinks(found.error, seen)
        else:
            order = STENCILS[estimator.stencil].order
            found = estimate_nu(
                problem, tasks, estimator=estimator, rungs_at_once=rungs_at_once, **where
            )
        made_for = (estimator, where["solver"])
        # what was found for another estimator says nothing about this one
        known = self._disagreement if self._made_for in (None, made_for) else None
        before = found.disagreement if known is None else known
        self._disagreement = [
            average(a, b) for a, b in zip(before, found.disagreement, strict=True)
        ]
        nu, _ = best_nu(found.nus, self._disagreement, order=order, rounding=found.rounding)
        if nu is None:
            nu = found.nu if self.nu is None else self.nu
        self.nu = within(nu, found.longest, found.nus)
        self.last, self._age, self._made_for = found, 0, made_for
        self.gradients += found.gradients
        return found

    def report(self, problem: Problem, stats: Stats) -> Stats:
        """The statistics of a meta-gradient, with how far those at neighbouring ε are apart, by all
        looks so far, where an ε was chosen.
        """
        if stats.nu is not None or self._disagreement is None:
            return stats
        return replace(stats, error=best_nu(ladder(problem), self._disagreement, order=2)[1])

    def count(self) -> None:
        """A meta-gradient was made with the present ν."""
        self._age += 1

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on the same way."""
        return {
            "nu": self.nu,
            "age": self._age,
            "disagreement": self._disagreement,
            "gradients": self.gradients,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`'s result."""
        self.nu, self._age, self._disagreement, self.gradients = (
            state[k] for k in ("nu", "age", "disagreement", "gradients")
        )
        self.last, self._made_for = None, None

    def numbers(self) -> list[float]:
        """The same as `state_dict`, in numbers alone, always as many."""
        known = self._disagreement or []
        nu = _UNKNOWN if self.nu is None else self.nu
        filled = [*known, *[_UNKNOWN] * (len(LADDER) - 1 - len(known))]
        return [nu, self._age, self.gradients, *filled]

    def load_numbers(self, numbers: list[float]) -> None:
        """Go on from `numbers`' result."""
        nu, age, gradients, *filled = numbers
        self.load_state_dict(
            {
                "nu": None if nu == _UNKNOWN else nu,
                "age": int(age),
                "gradients": int(gradients),
                "disagreement": [value for value in filled if value != _UNKNOWN] or None,
            }
        )


def is_automatic(estimator: Estimator) -> TypeGuard[FOBMAML | MAML]:
    """Whether an estimator leaves the choice of ν, or ε, to a tuner."""
    return estimator.automatic
