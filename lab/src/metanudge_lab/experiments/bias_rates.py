"""Proposition 2 and Corollary 1: the error of every stencil against ν with exact solves, and
against δ at the best ν.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

import metanudge as mn
from metanudge.engine_choice import EngineName
from metanudge.estimators import Estimator
from metanudge.estimators.stencils import STENCILS
from metanudge.params import Params
from metanudge.problem import Nudge
from metanudge.solvers import Solver
from metanudge.testing.inexact import EXACTLY, OffBy
from metanudge.testing.problems import Setup, logistic_regression, mlp, relative_error
from metanudge_lab.experiments.base import (
    Cell,
    Experiment,
    Result,
    ResultTable,
    Row,
    Settings,
    Shown,
    Statement,
    Verdict,
)
from metanudge_lab.experiments.bias_rates_figures import draw
from metanudge_lab.experiments.power_laws import NOTHING, ORDERS, TANGENT, TOLERANCE, fraction, laws
from metanudge_lab.experiments.problems import displacements, stable_rate

LOGISTIC, PERCEPTRON = "logistic regression", "tanh perceptron"
PROBLEMS = {
    LOGISTIC: (functools.partial(logistic_regression, tasks=1), 0.5),
    PERCEPTRON: (functools.partial(mlp, features=2, hidden=3, classes=2, tasks=1), 1.0),
}
DELTAS = {"forward": (1e-10, 1e-6), "symmetric": (1e-9, 1e-5), "five-point": (1e-12, 1e-8)}
NUS = (1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.3)


@dataclass(frozen=True)
class Config(Settings):
    """Sizes of the measurement. In full ten minutes on a CPU.

    `multiples` are ν over δ^(1/(order + 1)); `deltas` is how many δ, a decade apart from the least
    of each stencil; `draws` how often δ's directions are drawn.
    """

    nus: tuple[float, ...] = NUS
    multiples: tuple[float, ...] = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0)
    deltas: int = 5
    draws: int = 5
    steps: tuple[int, ...] = (2, 4, 6, 8, 12, 16, 20)
    problems: tuple[str, ...] = tuple(PROBLEMS)
    nudges: tuple[Nudge, ...] = ("loss", "gradient")
    stencils: tuple[str, ...] = (*STENCILS, TANGENT)

    @classmethod
    def quick(cls) -> Config:
        """A minute or so."""
        return cls(
            nus=(1e-4, 1e-3, 0.01, 0.02, 0.05, 0.1),
            multiples=(0.5, 1.0, 2.0, 4.0, 8.0, 16.0),
            deltas=3,
            draws=1,
        )


def cells(config: Config) -> list[Cell]:
    """One for each problem, nudge, stencil and what is varied; the tangent has no ν to vary."""
    return [
        {"problem": problem, "nudge": nudge, "stencil": stencil, "varied": varied}
        for problem, nudge, stencil, varied in itertools.product(
            config.problems, config.nudges, config.stencils, ("nu", "delta")
        )
        if (stencil, varied) != (TANGENT, "nu")
    ]


def measure(cell: Cell, config: Config, device: torch.device) -> list[Row]:
    """Errors relative to the exact meta-gradient of one task."""
    name, stencil = str(cell["problem"]), str(cell["stencil"])
    nudge: Nudge = "gradient" if cell["nudge"] == "gradient" else "loss"
    make, lam = PROBLEMS[name]
    setup = make()
    setup = Setup(setup.model.to(device), setup.loss, setup.tasks.to(device))
    truth = _gradient(setup, lam, EXACTLY, mn.Exact(), "stacked")
    if stencil == TANGENT:
        return _tangents(setup, lam, nudge, truth, config.steps)
    if cell["varied"] == "nu":
        estimators = {nu: mn.FOBMAML(nu=nu, stencil=stencil, nudge=nudge) for nu in config.nus}  # type: ignore[arg-type]
        return [
            {"nu": nu, "error": relative_error(_gradient(setup, lam, EXACTLY, e), truth)}
            for nu, e in estimators.items()
        ]
    rows: list[Row] = []
    least, power = DELTAS[stencil][0], 1 / (ORDERS[stencil] + 1)
    for place in range(config.deltas):
        delta = least * (DELTAS[stencil][1] / least) ** (place / max(1, config.deltas - 1))
        for multiple in config.multiples:
            nu = multiple * delta**power
            estimator = mn.FOBMAML(nu=nu, stencil=stencil, nudge=nudge)  # type: ignore[arg-type]
            found = [
                _gradient(setup, lam, OffBy(delta, config.draws * place + draw), estimator)
                for draw in range(config.draws)
            ]
            error = math.fsum(relative_error(g, truth) for g in found) / len(found)
            rows.append({"delta": delta, "nu": nu, "multiple": multiple, "error": error})
    return rows


def _gradient(
    setup: Setup, lam: float, solver: Solver, estimator: Estimator, engine: EngineName = "inplace"
) -> Params:
    learner = mn.MetaLearner(
        setup.model, setup.loss, lam=lam, solver=solver, estimator=estimator, engine=engine
    )
    return learner.meta_gradient(setup.tasks, metrics=False)[0]


def _tangents(
    setup: Setup, lam: float, nudge: Nudge, truth: Params, steps: Sequence[int]
) -> list[Row]:
    """Gradient descent of several lengths, and how far each gets."""
    learner = mn.MetaLearner(
        setup.model, setup.loss, lam=lam, estimator=mn.FOBMAML(stencil="tangent", nudge=nudge)
    )
    optimum, rate = (
        displacements(learner, setup.tasks, EXACTLY),
        stable_rate(learner, setup.tasks, lam),
    )
    rows: list[Row] = []
    for count in steps:
        learner.solver = mn.GradientDescent(lr=rate, steps=count)
        delta = float(
            (displacements(learner, setup.tasks, learner.solver) - optimum).norm(dim=1).mean()
        )
        error = relative_error(learner.meta_gradient(setup.tasks, metrics=False)[0], truth)
        rows.append({"delta": delta, "nu": None, "multiple": None, "error": error})
    return rows


def table(result: Result[Config]) -> ResultTable:
    """Fitted exponents beside the theory's."""
    by_nu, by_delta = laws(result, "nu"), laws(result, "delta")
    rows: list[tuple[str | Shown, ...]] = []
    for key in dict.fromkeys([*by_nu, *by_delta]):
        problem, nudge, stencil = key
        found = by_nu.get(key, NOTHING), by_delta.get(key, NOTHING)
        orders = [Shown.number(one.slope, ".3f", f" ({fraction(one.theory)})") for one in found]
        power = 1 / (ORDERS[stencil] + 1) if stencil in ORDERS else math.nan
        best = Shown.number(found[1].nu_slope, ".3f", f" ({fraction(power)})")
        rows.append((problem, f"{stencil}, {nudge} nudge", *orders, best))
    orders_of = [f"{what} (theory)" for what in ("order in ν", "order in δ", "best ν in δ")]
    return ResultTable(("problem", "estimator", *orders_of), rows)


def judge(result: Result[Config]) -> Verdict:
    """Every exponent within the tolerance of the theory's; those of the paper's own estimators
    first.
    """
    statements = []
    for varied, symbol in (("nu", "ν"), ("delta", "δ")):
        for (problem, nudge, stencil), found in laws(result, varied).items():
            theory = fraction(found.theory)
            words = (
                f"{stencil} differences, {nudge} nudge, go as {symbol}^{found.slope:.2f} on the"
                f" {problem}"
            )
            edge = "" if found.inside else " (the best ν lies at the edge of the scan)"
            claimed = nudge == "loss" and stencil in ("forward", "symmetric")
            name = f"{varied} {stencil}" if claimed else "ours"
            contrary = f"{words}, not {symbol}^{theory}{edge}"
            statements.append(Statement(found.holds, words, contrary, name))
    measured = _measured(result, len(statements))
    if all(one.holds for one in statements):
        reason = f"All {len(statements)} exponents are within {TOLERANCE:g} of the theory's."
        return Verdict("reproduced", measured, reason, tuple(statements))
    return Verdict.of(sorted(statements, key=lambda one: one.name == "ours"), measured)


def _measured(result: Result[Config], count: int) -> str:
    parts = []
    for varied, symbol in (("nu", "ν"), ("delta", "δ")):
        for stencil in result.config.stencils:
            slopes = [
                found.slope
                for (_, _, name), found in laws(result, varied).items()
                if name == stencil
            ]
            if slopes:
                low, high = (f"{choose(slopes):.2f}" for choose in (min, max))
                parts.append(
                    f"{symbol}^{low}" + (f"–{high}" if low != high else "") + f" ({stencil})"
                )
    worst = max(
        abs(found.slope - found.theory)
        for varied in ("nu", "delta")
        for found in laws(result, varied).values()
    )
    return (
        f"Over both problems and nudges the errors go as {', '.join(parts)}; the {count} fitted"
        f" exponents are off by {worst:.2g} at most."
    )


EXPERIMENT = Experiment(
    name="bias-rates",
    title="Orders of the bias",
    where="Proposition 2 and Corollary 1",
    claim=(
        "The bias of the forward estimator is O(ν), of the symmetric one O(ν²); with inner solves"
        " of precision δ and the best ν it is O(δ^1/2) at ν ~ δ^1/2, and O(δ^2/3) at ν ~ δ^1/3."
    ),
    config=Config,
    cells=cells,
    measure=measure,
    draw=draw,
    table=table,
    judge=judge,
    notes=(
        "One task each of two smooth problems that are not quadratic, in float64, against the"
        " implicit gradient with a dense Hessian. “Exact” solves are Newton's method down to"
        " rounding; solves of precision δ are exact ones moved by δ in a random direction of their"
        " own. Lines are fitted to the points they go through; left out are points of rounding"
        " (small ν) and of the next order. The best ν is the best of a scan over multiples of"
        " δ^1/(p+1). The five-point stencil (O(ν⁴), so O(δ^4/5)), the gradient nudge and the"
        " tangent are ours; the tangent has no ν, its δ is that of gradient descent after some"
        " steps, and its error is O(δ)."
    ),
)
