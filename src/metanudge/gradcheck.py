"""`check_gradient`: how good is a meta-gradient on your own model? Any estimator and ν against the
two exact answers.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from metanudge.adapting import Tasks
from metanudge.engines import Cost, Engine, InplaceEngine, StackedEngine, StackingError
from metanudge.engines.precision import precision_of
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
from metanudge.estimators.products import ProductsWarning
from metanudge.estimators.run import advice_on
from metanudge.gradient_report import GradientReport, Quality
from metanudge.learner import MetaLearner
from metanudge.objective import Objective
from metanudge.problem import Problem
from metanudge.proximal import Diagonal
from metanudge.solvers import LBFGS, NewtonCG, Solver
from metanudge.task import TaskBatch
from metanudge.tuning import NuTuner, Where, is_automatic

DEFAULT_NUS = (1e-3, 1e-2, 1e-1, 0.5)
LARGEST_DENSE = 1000
# In float64: ν⁴ of the stencil, and 1e-10/ν of optima found to that precision.
BY_DIFFERENCES = FOBMAML(nu=1e-4, stencil="five-point", nudge="gradient", start="solution")
_UNTIED = (
    "λ is 0: the inner problem need not have one solution, so there is no implicit gradient, and"
    " estimators of one are left out."
)


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

    It runs on the stacked engine; in place where the learner says so or the model does not stack.

    Cost: the optimum and one Hessian-vector product per parameter (up to 1000 parameters; conjugate
    gradient beyond and in place), and MAML's memory for the K-step target (of one step at a time in
    place). Models that know no double backward are compared with differences: of optima by L-BFGS,
    and of gradients in `MAML`'s steps.

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
    own = TaskBatch.of(tasks)[:max_tasks]
    batch = own.to(torch.float64)
    problem = _double(learner)
    tied = not isinstance(problem.proximal, Diagonal) or bool(problem.smallest_lam > 0)
    notes = [] if tied else [_UNTIED]
    # One engine for all keeps the random numbers of all the same.
    engine, residual_growth = _engine(learner, problem, batch, seed)

    def gradient(estimator: Estimator, solver: Solver) -> tuple[Tensor, Stats]:
        where = Where(solver=solver, engine=engine, seed=seed, first=0)
        return _flat(problem, batch, estimator, where)

    size = sum(p.numel() for p in problem.parameters.values())
    dense = size <= LARGEST_DENSE and engine.name == "stacked"
    implicit, optimum_residual = None, math.nan
    if tied:
        implicit, optimum_residual = _implicit(gradient, size, dense, optimum, notes)
    adaptation = None
    try:
        adaptation, _ = gradient(MAML(), learner.solver)
    except (TypeError, ValueError, RuntimeError) as error:
        notes.append(f"No gradient of the K-step adaptation: {error}")
    usual = estimators is None
    chosen = _usual(learner.estimator) if estimators is None else estimators
    chosen = [estimator for estimator in chosen if tied or not estimator.needs_stiffness]
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
        residual_growth=residual_growth,
        advice=advice_on(problem, learner.solver),
        notes=tuple(notes),
        differences=_differences(learner, own, engine, seed, (implicit, adaptation))
        if usual
        else None,
    )


def _differences(
    learner: MetaLearner,
    batch: TaskBatch,
    engine: Engine,
    seed: int,
    targets: tuple[Tensor | None, Tensor | None],
) -> Quality | None:
    """Of `MAML(products="difference")` in the model's own precision, in which kinks may spoil what
    float64 still resolves.
    """
    problem, estimator = learner.problem(), MAML(products="difference")
    where = Where(solver=learner.solver, engine=engine, seed=seed, first=0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ProductsWarning)  # the verdict says it
            flat, _ = _flat(problem, batch, estimator, where)
    except (TypeError, ValueError, RuntimeError, FloatingPointError):
        return None
    compared = [number for target in targets for number in _compare(flat.double(), target)]
    name = f'MAML(products="difference") in {precision_of(problem).value}'
    return Quality(name, None, *compared)


def _flat(
    problem: Problem, batch: TaskBatch, estimator: Estimator, where: Where
) -> tuple[Tensor, Stats]:
    ready = NuTuner().settled(estimator.on(problem), problem, batch, **where)
    g, stats = meta_gradient(problem, batch, estimator=ready, metrics=False, **where)
    return torch.cat([leaf.flatten() for leaf in g.values()]), stats


def _double(learner: MetaLearner) -> Problem:
    """The learner's problem in float64, on copies."""
    model = copy.deepcopy(learner.model).double()
    lam = copy.deepcopy(learner.log_lam).double() if learner.log_lam is not None else learner.lam
    regulariser = learner.regulariser
    if isinstance(regulariser, nn.Module):
        regulariser = copy.deepcopy(regulariser).double()
    return Problem(
        Objective(model, learner.loss),
        lam,
        adapt=learner.adapting,
        query_loss=learner.query_loss,
        regulariser=regulariser,
        zero_lam=learner._takes_zero_lam(),
        rates=None
        if learner.learned_rates is None
        else copy.deepcopy(learner.learned_rates).double(),
    )


def _engine(
    learner: MetaLearner, problem: Problem, batch: TaskBatch, seed: int
) -> tuple[Engine, float]:
    """Side by side where the model stacks and the learner has not asked for the other engine; and
    what the solver's steps do there to the residual.
    """
    grows = partial(_residual_growth, problem, batch, learner.solver, seed)
    inplace, stacked = InplaceEngine(), StackedEngine(chunk=8)
    if learner.engine == "inplace":
        return inplace, grows(inplace)
    try:
        return stacked, grows(stacked)
    except StackingError:
        if learner.engine == "stacked":
            raise
        return inplace, grows(inplace)


def _residual_growth(
    problem: Problem, batch: TaskBatch, solver: Solver, seed: int, engine: Engine
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
    dense: bool,
    optimum: Solver | None,
    notes: list[str],
) -> tuple[Tensor | None, float]:
    newton = NewtonCG(steps=30, cg_steps=min(size, 100), tol=1e-10)
    iterative = IMAML(cg_steps=min(size, 500), tol=1e-12)
    try:
        g, stats = gradient(Exact() if dense else iterative, optimum or newton)
    except (RuntimeError, FloatingPointError, ValueError) as error:
        try:
            g, stats = gradient(BY_DIFFERENCES, optimum or LBFGS(steps=500))
        except (RuntimeError, FloatingPointError, ValueError):
            notes.append(f"No implicit gradient: {error}")
            return None, math.nan
        notes.append(f"The implicit gradient is from differences of optima: {error}")
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
