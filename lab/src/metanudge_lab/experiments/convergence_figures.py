"""The figures of the convergence experiment: runs of the meta-optimizers, and how smoothness
grows.
"""

from __future__ import annotations

import itertools
from typing import Any

from metanudge_lab import style
from metanudge_lab.experiments.base import Drawing, Result
from metanudge_lab.experiments.convergence_rows import (
    EXPONENTIAL,
    FLOOR,
    LINEAR,
    QUARTIC,
    RIPPLED,
    STEEPNESS,
    count_of,
)
from metanudge_lab.experiments.meta_optimizers import (
    ADAM,
    CLIPPED,
    GD,
    NORMALIZED,
    OPTIMIZERS,
    SNGDM,
    best,
)
from metanudge_lab.experiments.smoothness import PAIRS, PATH, PROOF
from metanudge_lab.experiments.spread import short

TITLES = {
    EXPONENTIAL: "outer loss grows\nexponentially",
    QUARTIC: "outer loss grows\nlike r⁴",
    RIPPLED: "rippled inner loss\n(Proposition 3)",
    LINEAR: "outer loss grows\nlinearly (control)",
}
LOOKS: dict[str, dict[str, Any]] = {
    GD: {"color": "#d1495b", "marker": "v", "linestyle": (0, (4, 1.5)), "zorder": 3},
    CLIPPED: {"color": "#1f6fd6", "marker": "o", "linewidth": 2.2},
    NORMALIZED: {"color": "#0d9488", "marker": "D"},
    SNGDM: {"color": "#7c4dd6", "marker": "^"},
    ADAM: {"color": "#e07b00", "marker": "P"},
}


def runs(result: Result[Any]) -> Drawing:
    """‖∇F‖ against meta-steps at the best step sizes; a column for each problem, sampled tasks
    below.
    """
    problems = [
        name for name in result.distinct("problem") if result.rows(problem=name, kind="curve")
    ]
    figure, axes = style.figure(
        len(problems), 2, width=1.8 + 2.6 * len(problems), height=5.8, sharex=True, squeeze=False
    )
    for column, problem in enumerate(problems):
        for line, sampled in enumerate((False, True)):
            one = axes[line][column]
            one.set_yscale("log")
            one.set_xscale("symlog", linthresh=1)
            style.plain_ticks(one.xaxis)
            for optimizer in (name for name in OPTIMIZERS if name in result.distinct("what")):
                where = {"problem": problem, "what": optimizer, "sampled": sampled, "kind": "curve"}
                steps = sorted({row["step"] for row in result.rows(**where)})
                if not steps:
                    continue
                curve = result.spreads("norm", "step", steps, **where)
                look = {"linewidth": 1.7, "markevery": 0.17, "markersize": 4.5, "label": optimizer}
                medians = [spread.median for spread in curve.values()]
                one.plot(steps, medians, **{**look, **LOOKS[optimizer]})
            if one.lines:
                one.axhline(
                    result.config.epsilon, color=style.INK, linewidth=0.8, linestyle=(0, (1, 2))
                )
                one.set_ylim(bottom=max(result.config.epsilon / 30, one.get_ylim()[0]))
            one.yaxis.set_minor_formatter("")
        axes[0][column].set_title(TITLES[problem], fontsize=10)
        axes[1][column].set_xlabel("meta-steps")
    axes[0][0].set_ylabel("‖∇F‖, all tasks every step")
    axes[1][0].set_ylabel("‖∇F‖, one random task a step")
    handles = [line for one in figure.axes for line in one.lines if line.get_label() in OPTIMIZERS]
    style.legend(axes[0][-1], handles=list({line.get_label(): line for line in handles}.values()))
    return Drawing(figure, alt=_alt(result))


def growth(result: Result[Any]) -> Drawing:
    """Above, curvature along a path and its affine bound; below, how the global form fails."""
    problems = [name for name in result.distinct("problem") if result.rows(problem=name, kind=PATH)]
    figure, axes = style.figure(
        len(problems), 2, width=1.2 + 2.7 * len(problems), height=5.8, squeeze=False
    )
    for column, problem in enumerate(problems):
        _growth_of(result, problem, axes[0][column], axes[1][column])
    axes[0][0].set_ylabel("‖∇²F‖")
    axes[1][0].set_ylabel("‖∇F(θ′) − ∇F(θ*)‖ over\nmin(ℒ(θ′), ℒ(θ*)) ‖θ′ − θ*‖")
    ends = [
        f"{name} {max(row['ratio'] for row in result.rows(problem=name, kind=PAIRS)):.2g}"
        for name in problems
    ]
    text = (
        "Above: the Hessian's norm against the gradient's, and an affine bound. Below: the global"
        " form's ratio, at most"
    )
    return Drawing(figure, alt=f"{text} {', '.join(ends)}.", suffix="smoothness")


def _growth_of(result: Result[Any], problem: str, above: Any, below: Any) -> None:
    seed = result.rows(problem=problem, kind=PATH)[0]["seed"]
    where = {"problem": problem, "seed": seed}
    points = [(row["norm"], row["curvature"]) for row in result.rows(kind=PATH, **where)]
    path = sorted(point for point in points if point[0] >= result.config.epsilon) or points
    dots: dict[str, Any] = {"linestyle": "", "marker": "o", "markersize": 4, "color": "#1f6fd6"}
    above.plot(*zip(*path, strict=True), **dots, label="along the path")
    (proof,) = result.rows(kind=PROOF, **where)
    least, most = path[0][0], path[-1][0]
    norms = [least * (most / least) ** (place / 60) for place in range(61)]
    bound = [proof["flat"] + proof["steep"] * norm for norm in norms]
    text = f"{proof['flat']:.2g}" + (f" + {proof['steep']:.2g}‖∇F‖" if proof["steep"] else "")
    above.plot(norms, bound, color="#e07b00", linewidth=1.6, label=text)
    pairs = sorted((row["distance"], row["ratio"]) for row in result.rows(kind=PAIRS, **where))
    line: dict[str, Any] = {"marker": "s", "markersize": 4.5, "linewidth": 1.6}
    below.plot(*zip(*pairs, strict=True), color="#d1495b", **line)
    below.axhline(1.0, color=style.INK, linewidth=0.8, linestyle=(0, (1, 2)))
    for one in (above, below):
        one.set(xscale="log", yscale="log")
    below.set_ylim(0.05, max(10.0, below.get_ylim()[1]))
    for axis in (above.xaxis, above.yaxis, below.xaxis, below.yaxis):
        style.short_ticks(axis)
    style.legend(above, beside=False, fontsize=8)
    above.set_title(TITLES[problem], fontsize=10)
    above.set_xlabel("‖∇F‖")
    below.set_xlabel("‖θ′ − θ*‖, θ* the minimiser")


def starts(result: Result[Any]) -> Drawing:
    """‖∇F‖ at the end of runs with one task a step against ‖∇F‖ at the start; a point for each seed
    and distance.
    """
    figure, axes = style.figure(height=3.6)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="‖∇F‖ at the start",
        ylabel="‖∇F‖ at the end,\none random task a step",
    )
    ends = []
    for optimizer in (GD, CLIPPED, SNGDM):
        rows = sorted(
            result.rows(kind=STEEPNESS, optimizer=optimizer), key=lambda row: float(row["start"])
        )
        found = [(row["start"], row["last"]) for row in rows if row["last"] is not None]
        if found:
            look = {
                key: value for key, value in LOOKS[optimizer].items() if key in ("color", "marker")
            }
            axes.plot(
                *zip(*found, strict=True), linestyle="", markersize=6, label=optimizer, **look
            )
            ends.append(f"{optimizer} {short(found[0][1])} to {short(found[-1][1])}")
    for axis in (axes.xaxis, axes.yaxis):
        style.short_ticks(axis)
    style.legend(axes)
    text = (
        "‖∇F‖ at the end of runs with one random task a step against ‖∇F‖ at the start, both"
        " logarithmic; from the flattest start to"
    )
    return Drawing(figure, alt=f"{text} the steepest: {', '.join(ends)}.", suffix="steepness")


def floors(result: Result[Any]) -> Drawing:
    """‖∇F‖ at the end of a run with FO-B-MAML's meta-gradients against ν, and the bias of these."""
    figure, axes = style.figure(height=3.6)
    ends = []
    for stencil in (
        name for name in ("forward", "symmetric") if result.rows(kind=FLOOR, stencil=name)
    ):
        rows = sorted(result.rows(kind=FLOOR, stencil=stencil), key=lambda row: float(row["nu"]))
        nus, look = [row["nu"] for row in rows], style.line(f"FO-B-MAML {stencil}")
        axes.plot(
            nus,
            [row["norm"] for row in rows],
            **{**look, "linestyle": "", "label": f"‖∇F‖ at the end, {stencil}"},
        )
        axes.plot(
            nus,
            [row["bias"] for row in rows],
            **{**look, "marker": "", "linewidth": 1.4, "label": f"bias, {stencil}"},
        )
        ends += [f"{stencil} {short(row['norm'])} at ν = {row['nu']:g}" for row in rows]
    axes.set(xlabel="ν", ylabel="‖∇F‖ where the estimate vanishes")
    if ends:
        axes.set(xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):
            style.short_ticks(axis)
        style.legend(axes)
    text = (
        "‖∇F‖ at the end of a run, and the bias of the estimates there, against ν, both logarithmic"
    )
    return Drawing(figure, alt=f"{text}: {', '.join(ends)}.", suffix="bias")


def _alt(result: Result[Any]) -> str:
    parts = []
    for problem, optimizer in itertools.product(result.distinct("problem"), OPTIMIZERS):
        found = best(result, problem, optimizer, sampled=False)
        if found is not None:
            parts.append(f"{problem}, {optimizer}: {count_of(found.reached, result)} steps")
    ways = "with all tasks and with one random task a step"
    return (
        f"Norm of the meta-gradient against meta-steps, logarithmic, {ways}. To"
        f" {result.config.epsilon:g}: {'; '.join(parts)}."
    )
