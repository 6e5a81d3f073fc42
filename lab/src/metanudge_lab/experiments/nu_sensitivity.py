"""Appendix, "Step-Aware" rule: the meta-gradient's error against ν for several numbers of inner
steps, and where it comes from.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

import metanudge as mn
from metanudge.estimators import Estimator
from metanudge.problem import Nudge
from metanudge.task import TaskBatch
from metanudge.tasks import Quadratic
from metanudge.testing.inexact import OffBy
from metanudge.testing.problems import log_slope, relative_error, vector
from metanudge.tuning import step_aware
from metanudge_lab import style
from metanudge_lab.experiments import quadratics as q
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
    numbers,
    status_of,
)
from metanudge_lab.experiments.problems import small_conv_net, stable_rate
from metanudge_lab.experiments.spread import Spread, short

QUADRATIC, SINGLE, NOISY = "quadratic", "quadratic in float32", "quadratic with noise"
SMOOTH, KINKED = "softplus net", "ReLU net"
TITLES = {
    QUADRATIC: "quadratic (the paper's)",
    NOISY: "quadratic, every solve off\nby δ in its own direction",
    SMOOTH: "conv net, softplus and\naverage pooling",
    KINKED: "conv net, ReLU and\nmax-pooling",
}
PAPERS_NUDGE_ONLY = (SINGLE, NOISY)
TARGETS = {
    "error_exact": "error against the\nimplicit gradient",
    "error_steps": "error against the\nderivative of the K steps",
}
# the appendix's: few and many steps, small ν, where the bias takes over
FEW, MANY, SMALL, LARGE = (10, 50, 1e-2, 0.1)
RANGE = (0.1, 0.5)  # the rule's ν for few steps
FLAT, SPIKE, CONVERGED, AWAY = 1.1, 2.0, 1e-6, 1e6
CHOSEN: dict[str, Any] = {"markeredgecolor": style.INK, "linestyle": ""}
IN_SINGLE: dict[str, Any] = {"linewidth": 1.4, "linestyle": (0, (1, 1.5))}
COLOURS = ("#e07b00", "#d1495b", "#a0569a", "#1f6fd6", "#0d9488")


@dataclass(frozen=True)
class Config(Settings):
    """Sizes of the measurement; the quadratic's λ as in `metanudge_lab.experiments.quadratics`.

    In full ten minutes on a CPU.
    """

    nus: tuple[float, ...] = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0)
    steps: tuple[int, ...] = (5, 10, 20, 50, 100)
    network_steps: tuple[int, ...] = (5, 10, 20, 50, 100)
    problems: tuple[str, ...] = (QUADRATIC, SINGLE, NOISY, SMOOTH, KINKED)
    nudges: tuple[Nudge, ...] = ("loss", "gradient")
    lam: float = q.LAM
    network_lam: float = 0.5
    channels: int = 4
    dim: int = 20
    tasks: int = 8
    network_tasks: int = 3
    seeds: int = 3

    @classmethod
    def quick(cls) -> Config:
        """A minute or so."""
        return cls(
            nus=(1e-5, 1e-4, 1e-3, 0.01, 0.1, 0.3, 1.0), network_steps=(5, 20), tasks=3, seeds=1
        )


def cells(config: Config) -> list[Cell]:
    """One for each seed, problem and nudge; float32 and solves with errors of their own with the
    paper's nudge only.
    """
    return [
        {"problem": problem, "nudge": nudge, "seed": seed}
        for seed in range(config.seeds)
        for problem in config.problems
        for nudge in (config.nudges if problem not in PAPERS_NUDGE_ONLY else config.nudges[:1])
    ]


def measure(cell: Cell, config: Config, device: torch.device) -> list[Row]:
    """Both errors for every number of steps, at every ν of the grid, at the rule's ν and at the
    automatic one.
    """
    name, seed = str(cell["problem"]), int(cell["seed"] or 0)
    nudge: Nudge = "gradient" if cell["nudge"] == "gradient" else "loss"
    network = name in (SMOOTH, KINKED)
    case = (
        _network(config, seed, device, smooth=name == SMOOTH)
        if network
        else _quadratic(config, seed, device)
    )
    precise, case = (
        case,
        _quadratic(config, seed, device, torch.float32) if name == SINGLE else case,
    )
    rows: list[Row] = []
    for steps in config.network_steps if network else config.steps:
        precise.learner.solver = case.learner.solver = plainly = mn.GradientDescent(
            lr=case.rate, steps=steps
        )
        tangent, stats = precise.gradient(mn.FOBMAML(stencil="tangent", nudge=nudge))
        known = {
            "steps": steps,
            "optimum_residual": case.residual,
            "residual_growth": stats.residual / stats.residual_start,
        }
        if name == NOISY:
            case.learner.solver = OffBy(
                precision(_problem(config, seed, device), steps), seed, plainly
            )
        for kind, nu in _choices(config, steps):
            row: Row = {
                "kind": kind,
                "nu": nu if nu != "auto" else None,
                "error_exact": math.nan,
                "error_steps": math.nan,
                **known,
            }
            estimate, used = case.gradient_or_none(mn.FOBMAML(nu=nu, nudge=nudge))
            if estimate is not None:
                row["nu"] = used
                row["error_exact"] = (
                    relative_error(estimate, case.exact) if case.exact is not None else None
                )
                row["error_steps"] = relative_error(estimate, tangent)
            rows.append(row)
    return rows


def _choices(config: Config, steps: int) -> list[tuple[str, float | Literal["auto"]]]:
    return [*(("grid", nu) for nu in config.nus), ("rule", step_aware(steps)), ("auto", "auto")]


@dataclass(frozen=True)
class _Case:
    """A learner on some tasks, the stable inner learning rate, and the implicit gradient where the
    inner optimum could be found.
    """

    learner: mn.MetaLearner
    tasks: TaskBatch
    rate: float
    exact: Tensor | None
    residual: float

    def gradient(self, estimator: Estimator) -> tuple[Tensor, mn.Stats]:
        self.learner.estimator = estimator
        found, stats = self.learner.meta_gradient(self.tasks, metrics=False)
        return vector(found).double(), stats

    def gradient_or_none(self, estimator: Estimator) -> tuple[Tensor | None, float | None]:
        """The estimate and its ν; None where a large negative nudge outweighs the inner problem's
        curvature and the steps run away.
        """
        try:
            estimate, stats = self.gradient(estimator)
        except mn.NonFiniteError:
            return None, None
        return (estimate, stats.nu) if float(estimate.norm()) < AWAY else (None, stats.nu)


def _problem(config: Config, seed: int, device: torch.device) -> q.Problem:
    return q.Problem(seed, dim=config.dim, tasks=config.tasks, lam=config.lam, device=device)


def _quadratic(
    config: Config, seed: int, device: torch.device, dtype: torch.dtype = torch.float64
) -> _Case:
    problem = _problem(config, seed, device)
    learner = mn.MetaLearner(
        problem.source.model(problem.theta).to(dtype),
        problem.source.loss,
        lam=problem.lam,
        engine="stacked",
    )
    return _Case(learner, problem.tasks.to(dtype), problem.rate, problem.exact, 0.0)


def _network(config: Config, seed: int, device: torch.device, *, smooth: bool) -> _Case:
    model, loss, tasks = small_conv_net(
        smooth=smooth, channels=config.channels, tasks=config.network_tasks, seed=seed
    )
    tasks = tasks.to(device)
    learner = mn.MetaLearner(model.to(device), loss, lam=config.network_lam, engine="stacked")
    rate = stable_rate(learner, tasks, config.network_lam)
    learner.solver, learner.estimator = mn.NewtonCG(steps=15, cg_steps=60, tol=1e-11), mn.Exact()
    found, stats = learner.meta_gradient(tasks, metrics=False)
    return _Case(
        learner, tasks, rate, vector(found) if stats.residual < CONVERGED else None, stats.residual
    )


def precision(problem: q.Problem, steps: int) -> float:
    """δ = ‖φ_K − φ*‖ = ‖(I − α(A + λI))^K (θ − φ*)‖, the mean over the tasks."""
    eye = torch.eye(len(problem.theta), dtype=torch.float64, device=problem.theta.device)
    left = []
    for task in problem.tasks:
        shrink = torch.linalg.matrix_power(
            eye - problem.rate * (task.support[0][0] + problem.lam * eye), steps
        )
        left.append(
            (shrink @ (problem.theta - Quadratic.solution(task, problem.theta, problem.lam))).norm()
        )
    return float(torch.stack(left).mean())


def draw(result: Result[Config]) -> list[Drawing]:
    """Error against ν: problems side by side, the two targets above each other; one picture for
    each nudge.
    """
    return [_picture(result, nudge) for nudge in result.distinct("nudge")]


def _picture(result: Result[Config], nudge: str) -> Drawing:
    measured = [
        name for name in result.distinct("problem") if result.rows(problem=name, nudge=nudge)
    ]
    problems = list(dict.fromkeys(QUADRATIC if name == SINGLE else name for name in measured))
    figure, axes = style.figure(
        len(problems), 2, width=2.2 + 2.7 * len(problems), height=6.2, sharex=True, squeeze=False
    )
    every_k = sorted(result.distinct("steps"))
    looks = {
        k: {"color": COLOURS[place % len(COLOURS)], "label": f"K = {k}"}
        for place, k in enumerate(every_k)
    }
    for column, name in enumerate(problems):
        for line, (target, title) in enumerate(TARGETS.items()):
            one = axes[line][column]
            for k in every_k:
                _curve(one, result, target, {"problem": name, "nudge": nudge, "steps": k}, looks[k])
                if name == QUADRATIC and SINGLE in measured:
                    errors = _medians(result, target, problem=SINGLE, nudge=nudge, steps=k)
                    one.plot(
                        list(errors), list(errors.values()), color=looks[k]["color"], **IN_SINGLE
                    )
            if one.lines:
                one.set(xscale="log", yscale="log")
                one.yaxis.set_minor_formatter("")
            else:
                _say_why(one, result, name)
            if column == 0:
                one.set_ylabel(title)
        axes[0][column].set_title(TITLES[name], fontsize=10)
        axes[1][column].set_xlabel("ν")
    _legend(figure, looks, single=SINGLE in measured)
    return Drawing(
        figure, alt=_alt(result, nudge), suffix="" if nudge == "loss" else f"{nudge}-nudge"
    )


def _curve(
    axes: Any, result: Result[Config], target: str, where: dict[str, Any], look: dict[str, Any]
) -> None:
    curve = _grid(result, target, **where)
    if not curve:
        return
    style.band(axes, curve, linewidth=1.8, marker=".", markersize=5, **look)
    for kind, marker, size in (("rule", "D", 6), ("auto", "*", 13)):
        found = [row for row in result.rows(kind=kind, **where) if row[target] is not None]
        if found:
            at = [[Spread.of(numbers(found, key)).median] for key in ("nu", target)]
            axes.plot(*at, marker=marker, markersize=size, **CHOSEN, color=look["color"])


def _legend(figure: Any, looks: dict[int, dict[str, Any]], *, single: bool) -> None:
    from matplotlib.lines import Line2D

    marks = [Line2D([], [], marker=".", linewidth=1.8, **look) for look in looks.values()]
    if single:
        marks.append(Line2D([], [], color=style.INK, label="in float32", **IN_SINGLE))
    for marker, size, text in (("D", 6, "step-aware ν"), ("*", 12, "automatic ν")):
        look = {"marker": marker, "markersize": size, "label": text, "color": style.FAINT}
        marks.append(Line2D([], [], **look, **CHOSEN))
    style.figure_legend(figure, marks)


def _say_why(axes: Any, result: Result[Config], name: str) -> None:
    residual = result.spread("optimum_residual", problem=name).median
    text = (
        f"no inner optimum found:\nNewton's method stops among\nthe kinks at ‖∇g‖ = {residual:.2g}"
    )
    middle = {"transform": axes.transAxes, "ha": "center", "va": "center"}
    axes.text(0.5, 0.5, text, fontsize=8.5, color=style.INK, **middle)
    axes.set_yticks([])


def table(result: Result[Config]) -> Table:
    """Median errors at some ν, the best of the grid, the rule's and the automatic choice."""
    shown = [nu for nu in result.config.nus if nu in (1e-5, 1e-3, 0.1, 1.0)]
    rows = []
    for nudge, name, k in itertools.product(
        result.distinct("nudge"), result.distinct("problem"), sorted(result.distinct("steps"))
    ):
        where: dict[str, Any] = {"nudge": nudge, "problem": name, "steps": k}
        target = _target(name)
        errors = _medians(result, target, **where)
        if not errors:
            continue
        at = [Shown.short(errors.get(nu, math.nan)) for nu in shown]
        chosen = [_choice(result, kind, target, where) for kind in ("rule", "auto")]
        rows.append((name, nudge, k, *at, _at(*_least(errors)), *chosen))
    header = (
        "problem",
        "nudge",
        "K",
        *(f"ν = {nu:g}" for nu in shown),
        "best of the grid",
        "step-aware",
        "automatic",
    )
    return Table(header, rows)


def judge(result: Result[Config]) -> Verdict:
    """The appendix's statements for the quadratic problem, one by one, and where its explanation of
    the first goes wrong.
    """
    parts = _statements(result)
    wrong = [text for holds, text in parts if not holds]
    if not wrong:
        return Verdict(
            "reproduced",
            _measured(result),
            f"All {len(parts)} statements about the quadratic problem hold.",
        )
    held = len(parts) - len(wrong)
    reason = f"{held} of {len(parts)} statements hold; not that {', nor that '.join(wrong)}."
    return Verdict(
        status_of(len(wrong), len(parts)),
        _measured(result),
        f"{reason} {_explanation(result)}".strip(),
    )


def _statements(result: Result[Config]) -> list[tuple[bool, str]]:
    """What the appendix says, whether it holds for the loss nudge on the quadratic, and the words
    for it.
    """
    errors = {k: _errors(result, QUADRATIC, k) for k in result.config.steps}
    small = {k: [e for nu, e in found.items() if nu <= SMALL] for k, found in errors.items()}
    ordered = [errors[k] for k in sorted(errors)]
    shared = [nu for nu in result.config.nus if nu <= LARGE]
    falls = all(
        after[nu] < before[nu] for before, after in itertools.pairwise(ordered) for nu in shared
    )
    top = max(result.config.nus)
    spikes = all(not found[top] < SPIKE * found[LARGE] for found in errors.values())
    grows = [k for k, found in errors.items() if found[min(found)] > FLAT * found[SMALL]]
    statements = [
        (
            all(errors[k][SMALL] < FLAT * min(found) for k, found in small.items()),
            f"the error is flat or high for ν ≤ {SMALL:g}",
        ),
        (
            bool(grows),
            (
                "a small ν amplifies the noise of unconverged solves (the error does not grow"
                " towards small ν at any K)"
            ),
        ),
        (falls, f"more steps help at every ν ≤ {LARGE:g}"),
        (spikes, f"the error rises sharply beyond ν = {LARGE:g} at every K"),
    ]
    for k, found in errors.items():
        if k <= FEW:
            large = min(
                (e for nu, e in found.items() if RANGE[0] <= nu <= RANGE[1]), default=math.inf
            )
            little = min(small[k])
            text = (
                f"a ν of {RANGE[0]:g} to {RANGE[1]:g} serves K = {k} (at best {short(large)} there,"
                f" {short(little)} below {SMALL:g})"
            )
            statements.append((FLAT * large < little, text))
        elif k >= MANY:
            little = max(e for nu, e in found.items() if 1e-3 <= nu <= SMALL)
            text = (
                f"a ν of 0.001 to 0.01 serves K = {k} ({short(little)} there, {short(found[LARGE])}"
                f" at {LARGE:g})"
            )
            statements.append((little < found[LARGE], text))
    return statements


def _measured(result: Result[Config]) -> str:
    first, last = min(result.config.steps), max(result.config.steps)
    low, high = (_errors(result, QUADRATIC, k) for k in (first, last))
    least, top = min(low), max(low)
    text = (
        f"On the quadratic problem the symmetric difference is off by {short(low[least])} at ν ="
        f" {least:g} and K = {first}, by {short(high[least])} at K = {last}; at ν = {LARGE:g} by"
        f" {short(low[LARGE])} and {short(high[LARGE])}, at ν = {top:g} by {short(low[top])} and"
        f" {short(high[top])}."
    )
    return f"{text} {_kinks(result)}".strip()


def _kinks(result: Result[Config]) -> str:
    """What ReLU and max-pooling do to the difference, and to the inner steps themselves."""
    errors = {
        k: _errors(result, KINKED, k, "error_steps")
        for k in result.config.network_steps
        if result.rows(problem=KINKED)
    }
    if not errors:
        return ""
    at = [found[LARGE] for found in errors.values()]
    worst, nu, k = max(
        (error, nu, k) for k, found in errors.items() for nu, error in found.items() if nu <= LARGE
    )
    last = max(errors)
    left = [
        result.spread("residual_growth", problem=name, steps=last).median
        for name in (KINKED, SMOOTH)
        if result.rows(problem=name)
    ]
    smooth = f", with softplus and average pooling {short(left[1])}" if len(left) > 1 else ""
    return (
        "With ReLU and max-pooling it is off from the derivative of its own steps by"
        f" {short(min(at))} to {short(max(at))} at ν = {LARGE:g} and by up to {short(worst)} below"
        f" (K = {k}, ν = {nu:g}); {last} inner steps leave {short(left[0])} times the first inner"
        f" gradient there{smooth}."
    )


def _explanation(result: Result[Config]) -> str:
    """Where the flat error comes from: it is that of the K steps' own derivative. Noise needs
    errors that the solves do not share.
    """
    worst = max(_errors(result, QUADRATIC, k, "error_steps")[SMALL] for k in result.config.steps)
    text = (
        f"What is left at small ν is no noise: at ν = {SMALL:g} the difference agrees with the"
        f" derivative of its own K steps within {short(worst)} at every K, so all the rest is what"
        " K steps leave of the implicit gradient, which no ν cures."
    )
    few, many = min(result.config.steps), max(result.config.steps)
    biases = {k: _errors(result, QUADRATIC, k, "error_steps") for k in result.config.steps}
    top = max(result.config.nus)
    rising = sum(not bias[top] < SPIKE * bias[LARGE] for bias in biases.values())
    text += (
        f" Measured against that derivative, the error rises beyond ν = {LARGE:g} at {rising} of"
        f" {len(biases)} K: at K = {few} from {short(biases[few][LARGE])} to"
        f" {short(biases[few][top])} at ν = {top:g}, hidden behind what the steps leave."
    )
    if result.rows(problem=SINGLE):
        single, double = (_errors(result, name, many) for name in (SINGLE, QUADRATIC))
        least = min(single)
        same = min(
            (
                nu
                for nu in single
                if all(single[n] < FLAT * double[n] for n in single if nu <= n <= SMALL)
            ),
            default=math.nan,
        )
        text += (
            f" Rounding does amplify: in float32 the error at ν = {least:g} and K = {many} is"
            f" {short(single[least])} where float64 has {short(double[least])}; from ν = {same:g}"
            " on they are the same."
        )
    if result.rows(problem=NOISY):
        noisy = {k: _errors(result, NOISY, k) for k in result.config.steps}
        slopes = [_slope(errors) for errors in noisy.values()]
        best = {k: _least(noisy[k])[0] for k in (few, many)}
        text += (
            " The premise is right where every solve is off by the same δ in a direction of its"
            f" own: the error then goes as ν to the power {max(slopes):.2f} or less for ν ≤"
            f" {SMALL:g}, and the best ν of the grid is {best[few]:g} at K = {few} and"
            f" {best[many]:g} at K = {many}."
        )
    return text


def _slope(errors: dict[float, float]) -> float:
    small = {nu: e for nu, e in errors.items() if nu <= SMALL and math.isfinite(e)}
    return log_slope(list(small), list(small.values()))


def _errors(
    result: Result[Config], name: str, steps: int, target: str = "error_exact"
) -> dict[float, float]:
    """Median error of the loss nudge at every ν of the grid."""
    return _medians(result, target, problem=name, nudge="loss", steps=steps)


def _grid(result: Result[Config], target: str, **where: Any) -> dict[float, Spread]:
    """The errors' spread over the seeds at every ν; a ν at which any solve diverged has an infinite
    one.
    """
    every = result.rows(kind="grid", **where)
    rows = [row for row in every if not _unknown(row, target, every)]
    by_nu = {nu: [row for row in rows if row["nu"] == nu] for nu in result.config.nus}
    return {nu: Spread.of(numbers(found, target)) for nu, found in by_nu.items() if found}


def _medians(result: Result[Config], target: str, **where: Any) -> dict[float, float]:
    return {nu: spread.median for nu, spread in _grid(result, target, **where).items()}


def _least(errors: dict[float, float]) -> tuple[float, float]:
    """The best ν and its error."""
    return min(errors.items(), key=lambda found: found[1])


def _target(name: str) -> str:
    """The error that is told where there is room for one: kinks have no implicit gradient."""
    return "error_steps" if name == KINKED else "error_exact"


def _unknown(row: Row, target: str, rows: Sequence[Row]) -> bool:
    """Whether the target itself could not be had for the row's seed, rather than this one
    estimate.
    """
    return all(other[target] is None for other in rows if other["seed"] == row["seed"])


def _choice(result: Result[Config], kind: str, target: str, where: dict[str, Any]) -> Shown:
    return _at(*(result.spread(key, kind=kind, **where).median for key in ("nu", target)))


def _at(nu: float, error: float) -> Shown:
    return Shown(error, f"{short(error)} at {nu:.2g}")


def _alt(result: Result[Config], nudge: str) -> str:
    parts = []
    for name in result.distinct("problem"):
        for k in sorted(result.distinct("steps")):
            errors = _medians(result, _target(name), problem=name, nudge=nudge, steps=k)
            if errors:
                nu, error = _least(errors)
                parts.append(f"{name}, K = {k}: least {short(error)} at ν = {nu:g}")
    return (
        f"Relative error of the meta-gradient ({nudge} nudge) against ν, both logarithmic."
        f" {'; '.join(parts)}."
    )


EXPERIMENT = Experiment(
    name="nu-sensitivity",
    title="The error against ν",
    where="Appendix, The “Step-Aware” Rule for Perturbation Scale",
    claim=(
        "For ν from 1e-5 to 1e-2 the error is flat or high, since a small ν amplifies the noise of"
        " the inexact inner solution; more inner steps lower it at every ν; beyond ν = 0.1 it rises"
        " sharply for all K. So use ν of 0.1 to 0.5 for K ≤ 10, and of 0.01 or 0.001 for K ≥ 50."
    ),
    config=Config,
    cells=cells,
    measure=measure,
    draw=draw,
    table=table,
    judge=judge,
    notes=(
        "Symmetric differences on the quadratic problem of Figure 1, whose sizes the paper does not"
        " give, in float64 and, with the paper's nudge, in float32. We add the gradient nudge; a"
        " second target, the derivative in ν of the very K steps (from the tangent stencil); two"
        " networks that differ only in their activations and pooling (λ = 0.5, inner learning rate"
        " 1/(L̂ + λ) at θ); and the quadratic problem with solutions that are moved, after the K"
        " steps, by δ = ‖φ_K − φ*‖ in a random direction of each solve's own, which is what the"
        " bound λδ/ν assumes. Diamonds are the appendix's rule, log-linear between K = 10 and 50;"
        " stars the automatic ν. Curves end where a negative nudge outweighs the inner problem's"
        " curvature and the steps run away."
    ),
)
