"""How the figures look: one colour and line for each method, the same in every figure; quiet axes;
legible in light and dark.

Colours are chosen to differ in lightness as well as hue, and every method has its own marker, so
that a print in grey and a colour-blind reader can tell them apart. The page replaces `INK` and
`FAINT` in SVG figures by the colours of the reader's theme.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from metanudge.training.metrics import FAINT as FAINT
from metanudge.training.metrics import INK as INK
from metanudge.training.metrics import tidy as tidy

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OURS = {"linewidth": 2.2, "linestyle": "-"}
_BASELINE = {"linewidth": 1.4, "linestyle": (0, (5, 2))}
# Longest matching start of the name wins.
METHODS: dict[str, dict[str, Any]] = {
    "FO-B-MAML": {"color": "#1f6fd6", "marker": "o", **_OURS},
    "FO-B-MAML symmetric": {"color": "#1f6fd6", "marker": "o", **_OURS},
    "FO-B-MAML forward": {"color": "#37a3d6", "marker": "s", **_OURS},
    "FO-B-MAML gradient": {"color": "#0d9488", "marker": "D", **_OURS},
    "FO-B-MAML from": {"color": "#123f7a", "marker": "h", **_OURS},
    "FO-B-MAML tangent": {"color": "#7c4dd6", "marker": "^", **_OURS},
    "MAML": {"color": "#d1495b", "marker": "v", **_BASELINE},
    "MAML by differences": {"color": "#b5127a", "marker": "d", **_OURS},
    "iMAML": {"color": "#e07b00", "marker": "P", **_BASELINE},
    "iMAML, 2": {"color": "#f0b35a", "marker": "1", **_BASELINE},
    "iMAML, 10": {"color": "#a55300", "marker": "X", **_BASELINE},
    "iMAML, 5 CG steps, damped": {"color": "#8c6d1f", "marker": "p", **_BASELINE},
    "FO-MAML": {"color": "#6b9e23", "marker": "<", **_BASELINE},
    "Reptile": {"color": "#a0569a", "marker": ">", **_BASELINE},
    "ES-MAML": {"color": "#8a919c", "marker": "*", **_BASELINE},
}


def line(method: str) -> dict[str, Any]:
    """Keyword arguments of `Axes.plot` for a method: colour, line, marker and label.

    Example:
        >>> line("iMAML, 5 CG steps")["color"]
        '#e07b00'
    """
    matches = [name for name in METHODS if method.startswith(name)]
    look: dict[str, Any] = (
        METHODS[max(matches, key=len)] if matches else {"color": INK, "marker": ".", **_BASELINE}
    )
    # markers that are all edge
    edge = look["color"] if look["marker"] in ("1", "2", "3", "4", "x", "+") else "none"
    return {"markersize": 5, "markeredgecolor": edge, **look, "label": method}


def band(
    axes: Axes,
    curve: Mapping[Any, tuple[float, float, float]],
    *,
    alpha: float = 0.13,
    **look: Any,
) -> None:
    """A line, and around it a band of the same colour: middle, lowest and highest at each place."""
    at = list(curve)
    middle, low, high = ([three[i] for three in curve.values()] for i in range(3))
    axes.plot(at, middle, **look)
    axes.fill_between(at, low, high, color=look["color"], alpha=alpha, linewidth=0)


def figure(
    columns: int = 1, rows: int = 1, *, width: float = 7.6, height: float = 4.3, **options: Any
) -> tuple[Figure, Any]:
    """A figure and its axes (an array where there are several), in the house style; not known to
    pyplot, so nothing needs closing.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as NewFigure

    made = NewFigure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)
    axes = made.subplots(rows, columns, **options)
    for one in made.axes:
        tidy(one)
    return made, axes


def heat(
    axes: Axes, values: Sequence[Sequence[float]], *, low: float, high: float, dark: float
) -> None:
    """A heat map with its numbers, none where one is NaN; above `dark` they are white. Its colours
    are its own: the page's theme changes neither cells nor numbers.
    """
    from matplotlib.colors import LinearSegmentedColormap

    cells = LinearSegmentedColormap.from_list("cells", ("#dbe8f6", "#5b9bd5", "#0b4a94"))
    axes.grid(visible=False)
    axes.imshow(values, origin="lower", cmap=cells, vmin=low, vmax=high, aspect="auto")
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            if value == value:
                axes.text(
                    j, i, f"{value:.2f}", fontsize=8.5, ha="center", va="center",
                    color="white" if value > dark else "#10161f",
                )  # fmt: skip


def plain_ticks(axis: Any) -> None:
    """Write the ticks of a logarithmic axis as plain numbers: 1, 10, 100 instead of powers."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def short_ticks(axis: Any) -> None:
    """Where a logarithmic axis spans less than two decades, ticks at 1, 2, 5, 10, … as plain
    numbers; powers of ten elsewhere.
    """
    low, high = sorted(axis.get_view_interval())
    if high < 100 * low:
        axis.get_major_locator().set_params(subs=(1, 2, 5))
        plain_ticks(axis)
    axis.set_minor_formatter("")


def legend(axes: Axes, *, beside: bool = True, **options: Any) -> None:
    """A legend beside the axes (or inside), without a frame; none where nothing has a label, as in
    unfinished results.
    """
    if not axes.get_legend_handles_labels()[0] and "handles" not in options:
        return
    place = {"loc": "center left", "bbox_to_anchor": (1.01, 0.5)} if beside else {"loc": "best"}
    axes.legend(**{"frameon": False, "fontsize": 8.5, "labelcolor": INK, **place, **options})


def figure_legend(figure: Figure, handles: Sequence[Artist], **options: Any) -> None:
    """A legend for all axes of a figure, to their right unless `loc` says otherwise."""
    look = {"loc": "outside right center", "frameon": False, "fontsize": 9, "labelcolor": INK}
    figure.legend(handles=handles, **{**look, **options})
