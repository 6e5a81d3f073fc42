"""The figure of the orders of the bias."""

from __future__ import annotations

import math
from typing import Any

from metanudge_lab import style
from metanudge_lab.experiments.base import Drawing, Result
from metanudge_lab.experiments.power_laws import ORDERS, TANGENT, Law, laws
from metanudge_lab.experiments.spread import short

LOOKS: dict[str, dict[str, Any]] = {
    "forward": {"color": "#37a3d6", "marker": "s"},
    "symmetric": {"color": "#1f6fd6", "marker": "o"},
    "five-point": {"color": "#a0569a", "marker": "X"},
    TANGENT: {"color": "#7c4dd6", "marker": "^"},
}


def draw(result: Result[Any]) -> list[Drawing]:
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
    none: dict[str, Any] = {"linestyle": ""}
    line: dict[str, Any] = {"color": style.INK, "linewidth": 1.6}
    looks = [
        {**look, **none, "markersize": 6, "label": f"{name}\n(theory: {theory[name]})"}
        for name, look in LOOKS.items()
    ]
    looks += [
        {**line, "label": "loss nudge"},
        {**line, "linestyle": (0, (4, 2)), "label": "gradient nudge"},
        {**none, "label": "numbers: fitted exponents,\nloss | gradient nudge"},
    ]
    style.figure_legend(figure, [Line2D([], [], **look) for look in looks], labelspacing=1.0)


def _alt(result: Result[Any]) -> str:
    parts = []
    for varied, symbol in (("nu", "ν"), ("delta", "δ")):
        for (problem, nudge, stencil), found in laws(result, varied).items():
            ends = f"{short(found.error[0])} to {short(found.error[-1])}"
            parts.append(f"{problem}, {stencil}, {nudge} nudge: {symbol}^{found.slope:.2f}, {ends}")
    return (
        "Relative error of the meta-gradient against ν and δ, logarithmic, with fitted power laws."
        f" {'; '.join(parts)}."
    )
