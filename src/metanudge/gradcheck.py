"""`check_gradient`: how good is a meta-gradient on your own model? Any estimator and ν against the
two exact answers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from metanudge.engines import Cost, StackedEngine
from metanudge.estimators import (
    FOBMAML,
    FOMAML,
    IMAML,
    MAML,
    Estimator,
    Exact,
    Reptile,
    Stats,
    meta_gradient,
)
from metanudge.estimators.run import advice_on
from metanudge.html_table import html_table
from metanudge.learner import MetaLearner, Tasks
from metanudge.problem import Objective, Problem
from metanudge.solvers import NewtonCG, Solver
from metanudge.task import TaskBatch
from metanudge.tuning import NuTuner, Where, is_automatic

DEFAULT_NUS = (1e-3, 1e-2, 1e-1, 0.5)
LARGEST_DENSE = 1000


@dataclass(frozen=True)
class Quality:
    """How one estimator compares with the exact meta-gradients; NaN where a target could not be
    had.

    Attributes:
        estimator: its name and options.
        nu: its nudge, if it has one.
        cosine_implicit, error_implicit: against the implicit gradient at the inner optimum (what
            FO-B-MAML and iMAML aim at).
        cosine_adaptation, error_adaptation: against the gradient of the K-step adaptation (what
            MAML computes).
    """

    estimator: str
    nu: float | None
    cosine_implicit: float
    error_implicit: float
    cosine_adaptation: float
    error_adaptation: float


@dataclass(frozen=True)
class GradientReport:
    """The rows of a `check_gradient`, printable as a table.

    Attributes:
        rows: one per estimator and ν.
        parameters, tasks: size of the problem that was checked.
        optimum_residual: ‖∇g‖ at the point taken for the inner optimum; the implicit target is only
            as good as this is small.
        agreement: cosine between the two exact answers; far from 1 means K steps do not come close
            to the optimum.
        residual_growth: ‖∇g‖ after the solver's steps over that at θ; above 1 the inner loop is
            unstable, and no estimator can be expected to resemble the exact gradient of the
            adaptation.
        advice: what to change where it is above 1.
        notes: what could not be computed, and why.
    """

    rows: tuple[Quality, ...]
    parameters: int
    tasks: int
    optimum_residual: float
    agreement: float
    residual_growth: float
    advice: str
    notes: tuple[str, ...]

    def as_dicts(self) -> list[dict[str, Any]]:
        """The rows as plain dicts."""
        return [asdict(row) for row in self.rows]

    def __str__(self) -> str:
        width = max(len("estimator"), *(len(row.estimator) for row in self.rows))
        pair = f"{'cosine':>8}  {'relative error':>14}"
        lines = [
            f"{self.parameters} parameters, {self.tasks} tasks, float64",
            f"{'':{width}}         against the implicit gradient   against the K-step adaptation",
            f"{'estimator':{width}}  {'ν':>6}  {pair}     {pair}",
        ]
        for row in self.rows:
            nu = "–" if row.nu is None else f"{row.nu:.3g}"
            implicit = _pair(row.cosine_implicit, row.error_implicit)
            adaptation = _pair(row.cosine_adaptation, row.error_adaptation)
            lines.append(f"{row.estimator:{width}}  {nu:>6}  {implicit}     {adaptation}")
        return "\n".join((*lines, *self._remarks()))

    def _remarks(self) -> list[str]:
        """What the table can be believed for."""
        first = (
            f"cosine of the two exact gradients {_number(self.agreement, '.4f')}, residual at the"
            f" optimum {self.optimum_residual:.1g}, inner residual after the steps"
            f" ×{self.residual_growth:.3g}"
        )
        if self.residual_growth <= 1:
            return [first, *self.notes]
        grows = (
            "The inner residual grows: lr is above the stable 2/(curvature + lam). To mend it,"
            f" {self.advice}."
        )
        return [first, grows, *self.notes]

    def _repr_html_(self) -> str:
        head = (
            f"{self.parameters} parameters, {self.tasks} tasks",
            "ν",
            *("cosine, implicit", "error", "cosine, K steps", "error"),
        )
        rows = [
            (
                row.estimator,
                "–" if row.nu is None else f"{row.nu:.3g}",
                *_pair(row.cosine_implicit, row.error_implicit).split(),
                *_pair(row.cosine_adaptation, row.error_adaptation).split(),
            )
            for row in self.rows
        ]
        return html_table(rows, head=head, notes=self._remarks())


def check_gradient(
    learner: MetaLearner,
    tasks: Tasks,
    *,
    estimators: Iterable[Estimator] | None = None,
    nus: Sequence[float] = DEFAULT_NUS,
    max_tasks: int = 4,
    optimum: Solver | None = None,
    seed: int = 0,
) -> GradientReport:
    """Compare meta-gradients on the learner's own model, in float64, with both exact answers.

    Args:
        learner: its model, loss, proximal term and solver define the problem, and what it learns
            (the stiffness, shared layers) is part of the gradients that are compared; nothing in it
            changes.
        tasks: the first `max_tasks` of them are used.
        estimators: what to compare. Default: the learner's own, and the usual ones.
            Finite-difference `FOBMAML` is tried at every ν of `nus` as well as its own.
        nus: grid of ν.
        max_tasks: how many tasks to use.
        optimum: solver that finds the inner optimum; Newton's method to 1e-10 by default.
        seed: of dropout masks and minibatches.

    Cost: the optimum and one Hessian-vector product per parameter (up to 1000 parameters; conjugate
    gradient beyond), and MAML's memory for the K-step target. Models need double backward here,
    unlike in training.

    Example:
        >>> x = torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(0))
        >>> y = x.sum(-1, keepdim=True)
        >>> model = torch.nn.Linear(3, 1)
        >>> learner = MetaLearner(model, torch.nn.functional.mse_loss)
        >>> report = check_gradient(learner, TaskBatch((x, y), (x, y)),
        ...     estimators=[FOMAML(), FOBMAML()], nus=[0.1])
        >>> [row.estimator for row in report.rows]
        ['FOMAML', 'FOBMAML symmetric, loss nudge', 'FOBMAML symmetric, loss nudge, automatic ν']
    """
    batch = TaskBatch.of(tasks)[:max_tasks].to(torch.float64)
    problem = _double(learner)
    notes: list[str] = []
    # The in-place engine could serve some estimators; one engine for all keeps the random numbers
    # of all the same.
    engine = StackedEngine(chunk=8)

    def gradient(estimator: Estimator, solver: Solver) -> tuple[Tensor, Stats]:
        where = Where(solver=solver, engine=engine, seed=seed, first=0)
        ready = NuTuner().settled(estimator, problem, batch, **where)
        g, stats = meta_gradient(problem, batch, estimator=ready, metrics=False, **where)
        return torch.cat([leaf.flatten() for leaf in g.values()]), stats

    size = sum(p.numel() for p in problem.parameters.values())
    implicit, optimum_residual = _implicit(gradient, size, optimum, notes)
    adaptation = None
    try:
        adaptation, _ = gradient(MAML(), learner.solver)
    except (TypeError, ValueError, RuntimeError) as error:
        notes.append(f"No gradient of the K-step adaptation: {error}")
    chosen = _usual(learner.estimator) if estimators is None else estimators
    rows = []
    for estimator in _with_every_nu(chosen, nus):
        try:
            g, stats = gradient(estimator, learner.solver)
        except (TypeError, ValueError, RuntimeError, FloatingPointError) as error:
            notes.append(f"{_label(estimator)}: {error}")
            continue
        rows.append(
            Quality(_label(estimator), stats.nu, *_compare(g, implicit), *_compare(g, adaptation))
        )
    return GradientReport(
        rows=tuple(rows),
        parameters=sum(p.numel() for p in problem.meta_parameters.values()),
        tasks=len(batch),
        optimum_residual=optimum_residual,
        agreement=_compare(adaptation, implicit)[0] if adaptation is not None else math.nan,
        residual_growth=_residual_growth(problem, batch, learner.solver, engine, seed),
        advice=advice_on(problem, learner.solver),
        notes=tuple(notes),
    )


def _double(learner: MetaLearner) -> Problem:
    """The learner's problem in float64, on copies."""
    model = copy.deepcopy(learner.model).double()
    lam = copy.deepcopy(learner.log_lam).double() if learner.log_lam is not None else learner.lam
    regulariser = learner.regulariser
    if isinstance(regulariser, nn.Module):
        regulariser = copy.deepcopy(regulariser).double()
    return Problem(
        Objective(model, learner.loss), lam, adapt=learner.adapting, regulariser=regulariser
    )


def _residual_growth(
    problem: Problem, batch: TaskBatch, solver: Solver, engine: StackedEngine, seed: int
) -> float:
    """‖∇g‖ after the solver's steps over that at θ, each summed over the tasks."""
    session = engine.session(problem, batch, width=1, seed=seed, cost=Cost())
    with torch.enable_grad(), session as groups:
        solutions = [inner.solve(solver) for inner in groups]
    first = sum(float(solution.residuals[0].sum()) for solution in solutions)
    last = sum(float(solution.residual.sum()) for solution in solutions)
    return last / first if first > 0 else 0.0


def _implicit(
    gradient: Callable[[Estimator, Solver], tuple[Tensor, Stats]],
    size: int,
    optimum: Solver | None,
    notes: list[str],
) -> tuple[Tensor | None, float]:
    newton = NewtonCG(steps=30, cg_steps=min(size, 100), tol=1e-10)
    iterative = IMAML(cg_steps=min(size, 500), tol=1e-12)
    try:
        g, stats = gradient(Exact() if size <= LARGEST_DENSE else iterative, optimum or newton)
    except (RuntimeError, FloatingPointError) as error:
        notes.append(f"No implicit gradient: {error}")
        return None, math.nan
    if stats.residual > 1e-6:
        notes.append(
            f"The inner optimum was found only to a residual of {stats.residual:.1g} (kinks of ReLU"
            " or max-pooling, or a support loss that is not convex): take the implicit column with"
            " care, or raise lam."
        )
    return g, stats.residual


def _usual(own: Estimator) -> list[Estimator]:
    usual: list[Estimator] = [
        own,
        FOBMAML(),
        FOBMAML(nudge="gradient"),
        FOBMAML(start="shifted"),
        FOBMAML(nudge="gradient", start="shifted"),
        FOBMAML(stencil="tangent"),
        IMAML(cg_steps=5),
        FOMAML(),
        Reptile(),
    ]
    return list(dict.fromkeys(usual))


def _with_every_nu(estimators: Iterable[Estimator], nus: Sequence[float]) -> list[Estimator]:
    spread: list[Estimator] = []
    for estimator in estimators:
        if isinstance(estimator, FOBMAML) and estimator.stencil != "tangent":
            own = {estimator.nu} if isinstance(estimator.nu, (int, float)) else set()
            spread.extend(replace(estimator, nu=nu) for nu in sorted({*nus, *own}))
        spread.append(estimator)
    return list(dict.fromkeys(spread))


def _label(estimator: Estimator) -> str:
    name = type(estimator).__name__
    if isinstance(estimator, FOBMAML):
        options = [
            estimator.stencil,
            f"{estimator.nudge} nudge",
            *([f"from {estimator.start}"] if estimator.start != "theta" else []),
            *(["automatic ν"] if is_automatic(estimator) else []),
        ]
        return f"{name} {', '.join(options)}" + (", unshrunk" if estimator.unshrink else "")
    if isinstance(estimator, IMAML):
        return f"{name} {estimator.cg_steps} CG steps"
    if isinstance(estimator, MAML) and estimator.products != "auto":
        return f"{name} {estimator.products}"
    return name


def _compare(g: Tensor, target: Tensor | None) -> tuple[float, float]:
    if target is None:
        return math.nan, math.nan
    scale = float(target.norm())
    cosine = float(torch.nn.functional.cosine_similarity(g, target, dim=0))
    return cosine, float((g - target).norm()) / scale if scale > 0 else math.nan


def _pair(cosine: float, error: float) -> str:
    return f"{_number(cosine, '.4f'):>8}  {_number(error, '.3g'):>14}"


def _number(value: float, spec: str) -> str:
    return "–" if math.isnan(value) else format(value, spec)
