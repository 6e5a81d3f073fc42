"""The figures and the table of the error against ν."""

from __future__ import annotations

import itertools
import math
from typing import Any

from metanudge_lab import style
from metanudge_lab.experiments.base import Drawing, Result, ResultTable, Shown, numbers
from metanudge_lab.experiments.nu_sensitivity_rows import (
    KINKED,
    NOISY,
    QUADRATIC,
    SINGLE,
    SMOOTH,
    best_of,
    grid,
    medians,
    target_of,
)
from metanudge_lab.experiments.spread import Spread, short

TITLES = {
    QUADRATIC: "quadratic (the paper's)",
    NOISY: "quadratic, every solve off\nby δ in its own direction",
    SMOOTH: "conv net, softplus and\naverage pooling",
    KINKED: "conv net, ReLU and\nmax-pooling",
}
TARGETS = {
    "error_exact": "error against the\nimplicit gradient",
    "error_steps": "error against the\nderivative of the K steps",
}
CHOSEN: dict[str, Any] = {"markeredgecolor": style.INK, "linestyle": ""}
IN_SINGLE: dict[str, Any] = {"linewidth": 1.4, "linestyle": (0, (1, 1.5))}
COLOURS = ("#e07b00", "#d1495b", "#a0569a", "#1f6fd6", "#0d9488")


def draw(result: Result[Any]) -> list[Drawing]:
    """Error against ν: problems side by side, the two targets above each other; one picture for
    each nudge.
    """
    return [_picture(result, nudge) for nudge in result.distinct("nudge")]


def _picture(result: Result[Any], nudge: str) -> Drawing:
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
                    errors = medians(result, target, problem=SINGLE, nudge=nudge, steps=k)
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
    axes: Any, result: Result[Any], target: str, where: dict[str, Any], look: dict[str, Any]
) -> None:
    curve = grid(result, target, **where)
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
        look = {**CHOSEN, "marker": marker, "markersize": size, "color": style.FAINT}
        marks.append(Line2D([], [], **look, label=text))
    style.figure_legend(figure, marks)


def _say_why(axes: Any, result: Result[Any], name: str) -> None:
    residual = result.spread("optimum_residual", problem=name).median
    text = (
        f"no inner optimum found:\nNewton's method stops among\nthe kinks at ‖∇g‖ = {residual:.2g}"
    )
    middle = {"transform": axes.transAxes, "ha": "center", "va": "center"}
    axes.text(0.5, 0.5, text, fontsize=8.5, color=style.INK, **middle)
    axes.set_yticks([])


def table(result: Result[Any]) -> ResultTable:
    """Median errors at some ν, the best of the grid, the rule's and the automatic choice."""
    shown = [nu for nu in result.config.nus if nu in (1e-5, 1e-3, 0.1, 1.0)]
    rows = []
    for nudge, name, k in itertools.product(
        result.distinct("nudge"), result.distinct("problem"), sorted(result.distinct("steps"))
    ):
        where: dict[str, Any] = {"nudge": nudge, "problem": name, "steps": k}
        target = target_of(name)
        errors = medians(result, target, **where)
        if not errors:
            continue
        at = [Shown.short(errors.get(nu, math.nan)) for nu in shown]
        chosen = [_choice(result, kind, target, where) for kind in ("rule", "auto")]
        rows.append((name, nudge, k, *at, _at(*best_of(errors)), *chosen))
    header = (
        "problem",
        "nudge",
        "K",
        *(f"ν = {nu:g}" for nu in shown),
        "best of the grid",
        "step-aware",
        "automatic",
    )
    return ResultTable(header, rows)


def _choice(result: Result[Any], kind: str, target: str, where: dict[str, Any]) -> Shown:
    return _at(*(result.spread(key, kind=kind, **where).median for key in ("nu", target)))


def _at(nu: float, error: float) -> Shown:
    return Shown(error, f"{short(error)} at {nu:.2g}")


def _alt(result: Result[Any], nudge: str) -> str:
    parts = []
    for name in result.distinct("problem"):
        for k in sorted(result.distinct("steps")):
            errors = medians(result, target_of(name), problem=name, nudge=nudge, steps=k)
            if errors:
                nu, error = best_of(errors)
                parts.append(f"{name}, K = {k}: least {short(error)} at ν = {nu:g}")
    return (
        f"Relative error of the meta-gradient ({nudge} nudge) against ν, both logarithmic."
        f" {'; '.join(parts)}."
    )
