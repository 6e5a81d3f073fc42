"""How the pictures of a run look: quiet axes, one colour for each thing, a legend off the data.

On a page the colours follow the reader's theme: `metanudge.page.svg` puts variables of the page in
their place.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metanudge.training.files import replacing

INK, FAINT = "#23272f", "#d5dae1"
BEFORE, AFTER, VALIDATION = "#9aa3b2", "#2f6fde", "#d9480f"
BASELINE, BY_CHANCE = "#2b8a3e", "#6b7280"
CHANCE = "chance"


def new_figure(width: float, height: float) -> tuple[Any, Any]:
    """A figure that needs no display, and its axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    tidy(axes)
    return figure, axes


def tidy(axes: Any) -> None:
    """The house style for axes made otherwise."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(colors=INK, which="both", labelsize=9)
    axes.grid(color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    for text in (axes.xaxis.label, axes.yaxis.label, axes.title):
        text.set_color(INK)


def level(axes: Any, name: str, value: float, *, percent: bool, **line: Any) -> None:
    """A horizontal line with its value in the legend."""
    text = f"{name} {value:.1f} %" if percent else f"{name} {value:.3g}"
    axes.axhline(value, label=text, **line)


def baseline_levels(
    axes: Any, beside: Mapping[str, Mapping[str, Any]], quantity: str, scale: float
) -> None:
    """Lines for the best baseline, and for chance; `beside` has the best first."""
    for place, (name, found) in enumerate(beside.items()):
        if (place == 0 or name == CHANCE) and found.get(quantity) is not None:
            color = BY_CHANCE if name == CHANCE else BASELINE
            level(
                axes, name, scale * found[quantity], percent=quantity == "accuracy",
                color=color, linestyle=(0, (1, 2)), linewidth=1.4,
            )  # fmt: skip


def save(figure: Any, file: Path, title: str) -> None:
    """Write a figure with its title and a legend beside the axes."""
    (axes,) = figure.axes
    # a folder's name is no formula, dollars or not
    axes.set_title(title, loc="left", fontsize=11, color=INK, parse_math=False)
    axes.legend(
        frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=9, labelcolor=INK
    )
    with replacing(file) as stream:
        figure.savefig(stream, format=file.suffix[1:].lower() or "png")
