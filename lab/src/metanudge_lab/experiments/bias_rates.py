"""Proposition 2 and Corollary 1: the error of every stencil against ν with exact solves, and
against δ at the best ν.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import metanudge as mn
from metanudge.engine_choice import EngineName
from metanudge.estimators import Estimator
from metanudge.estimators.stencils import STENCILS
from metanudge.params import Params
from metanudge.problem import Nudge
from metanudge.solvers import Solver
from metanudge.testing.inexact import EXACTLY, OffBy
from metanudge.testing.problems import Setup, log_slope, logistic_regression, mlp, relative_error
from metanudge_lab import style
from metanudge_lab.experiments.base import (
    Cell,
    Drawing,
    Experiment,
    Result,
    Row,
    Settings,
    Shown,
    Table,
    Verdict,
)
from metanudge_lab.experiments.problems import displacements, stable_rate
from metanudge_lab.experiments.spread import sentence, short

LOGISTIC, PERCEPTRON = "logistic regression", "tanh perceptron"
PROBLEMS = {
    LOGISTIC: (functools.partial(logistic_regression, tasks=1), 0.5),
    PERCEPTRON: (functools.partial(mlp, features=2, hidden=3, classes=2, tasks=1), 1.0),
}
TANGENT = "tangent"
ORDERS = {name: stencil.order for name, stencil in STENCILS.items()}
# Where a power law can be seen: below, rounding; above, the next order.
WINDOWS = {"forward": (1e-4, 1e-2), "symmetric": (1e-3, 3e-2), "five-point": (0.01, 0.05)}
DELTAS = {"forward": (1e-10, 1e-6), "symmetric": (1e-9, 1e-5), "five-point": (1e-12, 1e-8)}
TOLERANCE = 0.1
LOOKS: dict[str, dict[str, Any]] = {
    "forward": {"color": "#37a3d6", "marker": "s"},
    "symmetric": {"color": "#1f6fd6", "marker": "o"},
    "five-point": {"color": "#a0569a", "marker": "X"},
    TANGENT: {"color": "#7c4dd6", "marker": "^"},
}


@dataclass(frozen=True)
class Config(Settings):
    """Sizes of the measurement. In full ten minutes on a CPU.

    `multiples` are ν over δ^(1/(order + 1)); `deltas` is how many δ, a decade apart from the least
    of each stencil; `draws` how often δ's directions are drawn.
    """

    nus: tuple[float, ...] = (
        1e-4,
        2e-4,
        5e-4,
        1e-3,
        2e-3,
        5e-3,
        0.01,
        0.02,
        0.03,
        0.05,
        0.1,
        0.2,
        0.3,
    )
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


@dataclass(frozen=True)
class Law:
    """A fitted power law: the points it was fitted to, its exponent, and the theory's.

    Attributes:
        x, error: of all points.
        fitted: places of those that the line goes through.
        inside: whether every best ν lies inside the scan (always, where nothing was scanned).
    """

    x: tuple[float, ...]
    error: tuple[float, ...]
    fitted: tuple[int, ...]
    theory: float
    best_nu: tuple[float, ...] = ()
    inside: bool = True

    @property
    def slope(self) -> float:
        """The exponent; NaN with fewer than two points."""
        if len(self.fitted) < 2:
            return math.nan
        return log_slope([self.x[i] for i in self.fitted], [self.error[i] for i in self.fitted])

    @property
    def nu_slope(self) -> float:
        """That of the best ν in δ."""
        return log_slope(self.x, self.best_nu) if len(self.best_nu) > 1 else math.nan

    @property
    def holds(self) -> bool:
        """Whether the exponent is the theory's, within the tolerance."""
        return self.inside and abs(self.slope - self.theory) <= TOLERANCE


def law(result: Result[Config], problem: str, nudge: str, stencil: str, varied: str) -> Law | None:
    """What the rows of a cell say; None where there are none."""
    rows = result.rows(problem=problem, nudge=nudge, stencil=stencil, varied=varied)
    if not rows:
        return None
    if varied == "nu":
        x, low, high = tuple(row["nu"] for row in rows), *WINDOWS[stencil]
        fitted = tuple(i for i, nu in enumerate(x) if low <= nu <= high)
        return Law(x, tuple(row["error"] for row in rows), fitted, ORDERS[stencil])
    groups = [
        list(group)
        for _, group in itertools.groupby(
            sorted(rows, key=lambda row: row["delta"]), key=lambda row: row["delta"]
        )
    ]
    best = [min(group, key=lambda row: float(row["error"])) for group in groups]
    x, errors = tuple(row["delta"] for row in best), tuple(row["error"] for row in best)
    if stencil == TANGENT:
        return Law(x, errors, tuple(range(len(x))), 1.0)
    multiples = result.config.multiples
    inside = all(multiples[0] < row["multiple"] < multiples[-1] for row in best)
    order = ORDERS[stencil]
    return Law(
        x,
        errors,
        tuple(range(len(x))),
        order / (order + 1),
        tuple(row["nu"] for row in best),
        inside,
    )


def laws(result: Result[Config], varied: str) -> dict[tuple[str, str, str], Law]:
    """All that could be fitted, by problem, nudge and stencil."""
    keys = itertools.product(*(result.distinct(key) for key in ("problem", "nudge", "stencil")))
    found = {(p, n, s): law(result, p, n, s, varied) for p, n, s in keys}
    return {key: one for key, one in found.items() if one is not None}


def draw(result: Result[Config]) -> list[Drawing]:
    """Error against ν above, against δ below; a column for each problem; solid for the loss nudge,
    dashed for the gradient nudge.
    """
    problems = result.distinct("problem")
    figure, axes = style.figure(
        len(problems), 2, width=2.4 + 4.0 * len(problems), height=7.4, squeeze=False
    )
    for column, problem in enumerate(problems):
        for line, varied in enumerate(("nu", "delta")):
            one = axes[line][column]
            found = {
                key[1:]: value for key, value in laws(result, varied).items() if key[0] == problem
            }
            for (nudge, stencil), value in found.items():
                _plot(one, value, LOOKS[stencil], solid=nudge == "loss")
            _write(one, found)
            one.set(
                xscale="log",
                yscale="log",
                xlabel=("ν, with exact inner solves", "δ, at the best ν")[line],
            )
            one.yaxis.set_minor_formatter("")
        axes[0][column].set_ylim(bottom=axes[0][column].get_ylim()[0] / 100)
        axes[0][column].set_title(problem, fontsize=10.5)
    for line in range(2):
        axes[line][0].set_ylabel("relative error of the meta-gradient")
    _legend(figure)
    return [Drawing(figure, alt=_alt(result))]


def _plot(axes: Any, found: Law, look: dict[str, Any], *, solid: bool) -> None:
    """Points, and the fitted line through those that it was fitted to."""
    mark = {
        **look,
        "markersize": 5.5,
        "markeredgecolor": look["color"],
        "markerfacecolor": look["color"] if solid else "none",
    }
    axes.plot(found.x, found.error, linestyle="", **mark)
    x = [found.x[i] for i in found.fitted]
    if len(x) > 1:
        centre = math.fsum(math.log(found.error[i]) for i in found.fitted) / len(x)
        middle = math.fsum(math.log(value) for value in x) / len(x)
        line = [math.exp(centre + found.slope * (math.log(value) - middle)) for value in x]
        axes.plot(
            x, line, color=look["color"], linewidth=1.6, linestyle="-" if solid else (0, (4, 2))
        )


def _write(axes: Any, found: dict[tuple[str, str], Law]) -> None:
    """The exponents of both nudges, a line for each stencil, in the corner that no curve
    reaches.
    """
    for place, stencil in enumerate(reversed(dict.fromkeys(stencil for _, stencil in found))):
        text = " | ".join(f"{one.slope:.2f}" for (_, name), one in found.items() if name == stencil)
        where = {"transform": axes.transAxes, "ha": "right", "va": "bottom"}
        axes.text(
            0.99,
            0.02 + 0.065 * place,
            f"{stencil}  {text}",
            color=LOOKS[stencil]["color"],
            fontsize=9,
            **where,
        )


def _legend(figure: Any) -> None:
    from matplotlib.lines import Line2D

    powers = {1: "ν", 2: "ν²", 4: "ν⁴"}
    theory = {name: f"{powers[order]}, δ^{order}/{order + 1}" for name, order in ORDERS.items()} | {
        TANGENT: "δ"
    }
    handles = [
        Line2D(
            [], [], linestyle="", markersize=6, label=f"{name}\n(theory: {theory[name]})", **look
        )
        for name, look in LOOKS.items()
    ]
    handles.append(Line2D([], [], color=style.INK, linewidth=1.6, label="loss nudge"))
    handles.append(
        Line2D(
            [], [], color=style.INK, linewidth=1.6, linestyle=(0, (4, 2)), label="gradient nudge"
        )
    )
    handles.append(
        Line2D([], [], linestyle="", label="numbers: fitted exponents,\nloss | gradient nudge")
    )
    figure.legend(
        handles=handles,
        loc="outside right center",
        frameon=False,
        fontsize=9,
        labelcolor=style.INK,
        labelspacing=1.0,
    )


def _fraction(value: float) -> str:
    """An order as the paper writes it.

    Example:
        >>> _fraction(2 / 3), _fraction(4.0)
        ('2/3', '4')
    """
    known = {1 / 2: "1/2", 1 / 3: "1/3", 1 / 5: "1/5", 2 / 3: "2/3", 4 / 5: "4/5"}
    return known.get(value, f"{value:g}")


def table(result: Result[Config]) -> Table:
    """Fitted exponents beside the theory's."""
    by_nu, by_delta = laws(result, "nu"), laws(result, "delta")
    rows = []
    for key in dict.fromkeys([*by_nu, *by_delta]):
        problem, nudge, stencil = key
        first, second = by_nu.get(key), by_delta.get(key)
        rows.append(
            (
                problem,
                f"{stencil}, {nudge} nudge",
                _exponent(first.slope if first else math.nan, first.theory if first else math.nan),
                _exponent(
                    second.slope if second else math.nan, second.theory if second else math.nan
                ),
                _exponent(
                    second.nu_slope if second else math.nan,
                    1 / (ORDERS[stencil] + 1) if stencil in ORDERS else math.nan,
                ),
            )
        )
    return Table(
        (
            "problem",
            "estimator",
            "order in ν (theory)",
            "order in δ (theory)",
            "best ν in δ (theory)",
        ),
        rows,
    )


def _exponent(slope: float, theory: float) -> Shown:
    return Shown(slope, "–" if math.isnan(slope) else f"{slope:.3f} ({_fraction(theory)})")


def judge(result: Result[Config]) -> Verdict:
    """Every exponent within the tolerance of the theory's."""
    paper: list[tuple[bool, str]] = []
    ours: list[tuple[bool, str]] = []
    for varied, symbol in (("nu", "ν"), ("delta", "δ")):
        for (problem, nudge, stencil), found in laws(result, varied).items():
            theory = _fraction(found.theory)
            words = (
                f"{stencil} differences, {nudge} nudge, go as {symbol}^{found.slope:.2f} on the"
                f" {problem}, not {symbol}^{theory}"
            )
            if not found.inside:
                words += " (the best ν lies at the edge of the scan)"
            claimed = nudge == "loss" and stencil in ("forward", "symmetric")
            (paper if claimed else ours).append((found.holds, words))
    wrong = [words for holds, words in paper if not holds]
    others = [words for holds, words in ours if not holds]
    measured = _measured(result, len(paper) + len(ours))
    if not wrong and not others:
        return Verdict(
            "reproduced",
            measured,
            f"All {len(paper) + len(ours)} exponents are within {TOLERANCE:g} of the theory's.",
        )
    return Verdict(
        "reproduced" if not wrong else "partly" if len(wrong) < len(paper) else "not",
        measured,
        sentence(*wrong, *others),
    )


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


def _alt(result: Result[Config]) -> str:
    parts = []
    for varied, symbol in (("nu", "ν"), ("delta", "δ")):
        for (problem, nudge, stencil), found in laws(result, varied).items():
            ends = f"{short(found.error[0])} to {short(found.error[-1])}"
            parts.append(f"{problem}, {stencil}, {nudge} nudge: {symbol}^{found.slope:.2f}, {ends}")
    return (
        "Relative error of the meta-gradient against ν and δ, logarithmic, with fitted power laws."
        f" {'; '.join(parts)}."
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
