"""The figures of the convergence experiment: runs of the meta-optimizers, and how smoothness grows."""

from __future__ import annotations

import itertools
import math
from typing import Any

from metanudge.experiments import style
from metanudge.experiments.base import Drawing, Result
from metanudge.experiments.meta_optimizers import ADAM, CLIPPED, GD, NORMALIZED, OPTIMIZERS, SNGDM, best
from metanudge.experiments.smoothness import PAIRS, PATH, PROOF
from metanudge.experiments.spread import Spread

TITLES = {
    "exponential": "outer loss grows\nexponentially",
    "quartic": "outer loss grows\nlike r⁴",
    "rippled": "rippled inner loss\n(Proposition 3)",
    "linear": "outer loss grows\nlinearly (control)",
}
LOOKS: dict[str, dict[str, Any]] = {
    GD: {"color": "#d1495b", "marker": "v"},
    CLIPPED: {"color": "#1f6fd6", "marker": "o"},
    NORMALIZED: {"color": "#0d9488", "marker": "D"},
    SNGDM: {"color": "#7c4dd6", "marker": "^"},
    ADAM: {"color": "#e07b00", "marker": "P"},
}


def runs(result: Result[Any]) -> Drawing:
    """‖∇F‖ against meta-steps at the best step sizes; a column for each problem, sampled tasks below."""
    problems = [name for name in result.distinct("problem") if result.rows(problem=name, kind="curve")]
    figure, axes = style.figure(len(problems), 2, width=1.8 + 2.6 * len(problems), height=5.8, sharex=True, squeeze=False)
    for column, problem in enumerate(problems):
        for line, sampled in enumerate((False, True)):
            one = axes[line][column]
            for optimizer in (name for name in OPTIMIZERS if name in result.distinct("what")):
                rows = result.rows(problem=problem, what=optimizer, sampled=sampled, kind="curve")
                steps = sorted({row["step"] for row in rows})
                found = [(row["step"], math.nan if row["norm"] is None else row["norm"]) for row in rows]
                norms = [Spread.of([norm for at, norm in found if at == step]).median for step in steps]
                one.plot(steps, norms, linewidth=1.7, markevery=0.17, markersize=4.5, label=optimizer, **LOOKS[optimizer])
            one.axhline(result.config.epsilon, color=style.INK, linewidth=0.8, linestyle=(0, (1, 2)))
            one.set_yscale("log")
            one.set_ylim(bottom=max(result.config.epsilon / 30, one.get_ylim()[0]))
            one.yaxis.set_minor_formatter("")
        axes[0][column].set_title(TITLES[problem], fontsize=10)
        axes[1][column].set_xlabel("meta-steps")
    axes[0][0].set_ylabel("‖∇F‖, all tasks every step")
    axes[1][0].set_ylabel("‖∇F‖, one random task a step")
    style.legend(axes[0][-1])
    return Drawing(figure, alt=_alt(result))


def growth(result: Result[Any]) -> Drawing:
    """Above, curvature along a path and its affine bound; below, how the global form fails."""
    problems = [name for name in result.distinct("problem") if result.rows(problem=name, kind=PATH)]
    figure, axes = style.figure(len(problems), 2, width=1.2 + 2.7 * len(problems), height=5.8, squeeze=False)
    for column, problem in enumerate(problems):
        above, below = axes[0][column], axes[1][column]
        seed = result.rows(problem=problem, kind=PATH)[0]["seed"]
        path = sorted((row["norm"], row["curvature"]) for row in result.rows(problem=problem, kind=PATH, seed=seed))
        above.plot(*zip(*path, strict=True), linestyle="", marker="o", markersize=4, color="#1f6fd6", label="along the path")
        (proof,) = result.rows(problem=problem, kind=PROOF, seed=seed)
        line = [proof["flat"] + proof["steep"] * norm for norm, _ in path]
        above.plot(
            [norm for norm, _ in path], line, color="#e07b00", linewidth=1.6, label=f"{proof['flat']:.2g} + {proof['steep']:.2g}‖∇F‖"
        )
        pairs = sorted((row["distance"], row["ratio"]) for row in result.rows(problem=problem, kind=PAIRS, seed=seed))
        below.plot(*zip(*pairs, strict=True), color="#d1495b", marker="s", markersize=4.5, linewidth=1.6)
        below.axhline(1.0, color=style.INK, linewidth=0.8, linestyle=(0, (1, 2)))
        for one in (above, below):
            one.set(xscale="log", yscale="log")
        below.set_ylim(1e-3, max(10.0, below.get_ylim()[1]))
        for axis in (above.xaxis, above.yaxis, below.xaxis, below.yaxis):
            style.short_ticks(axis)
        style.legend(above, beside=False, fontsize=8)
        above.set_title(TITLES[problem], fontsize=10)
        above.set_xlabel("‖∇F‖")
        below.set_xlabel("‖θ′ − θ*‖, θ* the minimiser")
    axes[0][0].set_ylabel("‖∇²F‖")
    axes[1][0].set_ylabel("‖∇F(θ′) − ∇F(θ*)‖ over\nmin(ℒ(θ′), ℒ(θ*)) ‖θ′ − θ*‖")
    ends = [f"{name} {max(row['ratio'] for row in result.rows(problem=name, kind=PAIRS)):.2g}" for name in problems]
    text = "Above: the Hessian's norm against the gradient's, and an affine bound. Below: the global form's ratio, at most"
    return Drawing(figure, alt=f"{text} {', '.join(ends)}.", suffix="smoothness")


def floors(result: Result[Any]) -> Drawing:
    """‖∇F‖ at the end of a run with FO-B-MAML's meta-gradients against ν."""
    figure, axes = style.figure()
    for stencil, look in (("forward", style.line("FO-B-MAML forward")), ("symmetric", style.line("FO-B-MAML symmetric"))):
        rows = result.rows(kind="floor", stencil=stencil)
        axes.plot([row["nu"] for row in rows], [row["norm"] for row in rows], **look)
    axes.set(xscale="log", yscale="log", xlabel="ν", ylabel="‖∇F‖ where the estimate vanishes")
    style.legend(axes)
    return Drawing(figure, alt="‖∇F‖ at the end of a run against ν, for forward and symmetric differences, both logarithmic.")


def _alt(result: Result[Any]) -> str:
    parts = []
    for problem, optimizer in itertools.product(result.distinct("problem"), OPTIMIZERS):
        found = best(result, problem, optimizer, sampled=False)
        if found is not None:
            parts.append(f"{problem}, {optimizer}: {count_of(found.reached, result)} steps")
    ways = "with all tasks and with one random task a step"
    return f"Norm of the meta-gradient against meta-steps, logarithmic, {ways}. To {result.config.epsilon:g}: {'; '.join(parts)}."


def count_of(steps: float, result: Result[Any]) -> str:
    """A number of steps in words, where it may not have been reached."""
    return f"{steps:.0f}" if math.isfinite(steps) else f"more than {result.config.steps}"
