"""Results as pictures. They are drawn from the JSON file alone, on any machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from metanudge.training.files import replacing
from metanudge_lab.bench import tables
from metanudge_lab.style import INK, figure, legend, line

_OURS, _RIVAL = "#1f6fd6", "#a9b1bd"
# colour, and side of the tick
_PATHS = {"blocks": (_OURS, -0.16), "layer by layer": ("#e07b00", 0.16)}


def draw(result: dict[str, Any], file: Path) -> None:
    """Draw a comparison, a scaling measurement or rounding errors into a PNG file."""
    made = {"compare": _comparison, "scaling": _scaling, "rounding": _rounding}[result["kind"]](
        result
    )
    with replacing(file) as stream:
        made.savefig(stream, format="png", dpi=150)


def _comparison(result: dict[str, Any]) -> Any:
    rows = sorted(result["rows"], key=lambda row: -row["seconds"]["median"])
    made, (time, memory) = figure(
        2, 1, width=10.0, height=1.7 + 0.24 * len(rows), sharey=True, width_ratios=(3, 2)
    )
    for place, row in enumerate(rows):
        colour = _OURS if row["package"] == "metanudge" else _RIVAL
        median, (low, high) = row["seconds"]["median"], row["seconds"]["quartiles"]
        time.plot(
            [row["roofline_s"], median], [place, place], color=colour, linewidth=1.0, alpha=0.6
        )
        time.errorbar(
            median,
            place,
            xerr=[[median - low], [high - median]],
            fmt="o",
            color=colour,
            ecolor=INK,
            elinewidth=1.0,
            capsize=2,
        )
        memory.plot(row["memory_bytes"] / 1e6, place, "o", color=colour)
    places = range(len(rows))
    time.plot(
        [row["roofline_s"] for row in rows],
        places,
        "|",
        color=INK,
        markersize=9,
        markeredgewidth=1.6,
        label="roofline bound",
    )
    for colour, label in ((_OURS, "metanudge"), (_RIVAL, "others")):
        time.plot([], [], "o", color=colour, label=label)
    time.set_yticks(list(places), [row["label"] for row in rows])
    for axes, label in (
        (time, "seconds for one meta-step: median and quartiles"),
        (memory, "peak memory (MB)"),
    ):
        axes.set_xscale("log")
        axes.set_xlabel(label)
        axes.set_axisbelow(True)
    legend(time, beside=False, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3)
    _title(made, result, tables.comparison(result).title)
    return made


def _scaling(result: dict[str, Any]) -> Any:
    panels = list(dict.fromkeys((curve["quantity"], curve["axis"]) for curve in result["curves"]))
    made, axes = figure(
        2, (len(panels) + 1) // 2, width=12.0, height=3.4 * ((len(panels) + 1) // 2), squeeze=False
    )
    for place, (quantity, axis) in zip(axes.flat, panels, strict=False):
        for curve in result["curves"]:
            if (curve["quantity"], curve["axis"]) != (quantity, axis):
                continue
            slope = "" if curve["exponent"] is None else f", {curve['exponent']:.2f}"
            look = {**line(curve["method"]), "label": f"{curve['label']}{slope}"}
            if curve["name"].startswith("vmap"):
                look["linestyle"] = ":"
            scale = 1.0 if quantity == "time" else 1e-6
            place.plot(
                [p["value"] for p in curve["points"]],
                [scale * p["measured"] for p in curve["points"]],
                **look,
            )
        place.set_xscale("log", base=2)
        place.xaxis.set_major_formatter("{x:g}")
        place.set_yscale("log")
        place.set_xlabel(axis)
        place.set_ylabel("seconds" if quantity == "time" else "peak memory (MB)")
        legend(place, fontsize=7.5)
    for spare in axes.flat[len(panels) :]:
        spare.remove()
    _title(made, result, f"{tables.scaling(result).title} (exponents in the legends)")
    return made


def _rounding(result: dict[str, Any]) -> Any:
    """A panel for every contender; in it every error as a dot, their root mean square as a disc,
    their median as a stroke.
    """
    labels = list(dict.fromkeys(row["label"] for row in result["rows"]))
    precisions = list(dict.fromkeys(row["precision"] for row in result["rows"]))
    made, panels = figure(
        max(1, len(labels)),
        1,
        width=2.0 + 2.6 * max(1, len(labels)),
        height=4.0,
        sharey=True,
        squeeze=False,
    )
    for axes, label in zip(panels.flat, labels, strict=False):
        for row in result["rows"]:
            if row["label"] != label:
                continue
            alone = (
                sum(
                    (other["label"], other["precision"]) == (label, row["precision"])
                    for other in result["rows"]
                )
                == 1
            )
            colour, side = _PATHS[row["path"]]
            place = precisions.index(row["precision"]) + (0.0 if alone else side)
            axes.plot(
                [place] * len(row["errors"]),
                row["errors"],
                ".",
                color=colour,
                alpha=0.4,
                markersize=4,
            )
            axes.plot(place, row["rms"], "o", color=colour)
            axes.plot(place, row["median"], "_", color=INK, markersize=13, markeredgewidth=1.6)
        axes.set_yscale("log")
        axes.set_xticks(range(len(precisions)), precisions)
        axes.set_xlim(-0.6, len(precisions) - 0.4)
        axes.grid(visible=False, axis="x")
        axes.set_title(label, fontsize=9.5, color=INK)
    first = panels.flat[0]
    first.set_ylabel("relative error of the meta-gradient")
    for path in dict.fromkeys(row["path"] for row in result["rows"]):
        first.plot([], [], "o", color=_PATHS[path][0], label=f"{path}, root mean square")
    first.plot([], [], "_", color=INK, markersize=9, markeredgewidth=1.6, label="median")
    first.plot([], [], ".", color=INK, alpha=0.4, markersize=4, label="one meta-batch")
    made.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8.5, labelcolor=INK)
    _title(made, result, tables.rounding(result).title)
    return made


def _title(made: Any, result: dict[str, Any], text: str) -> None:
    """In two lines: what, and on which machine."""
    made.suptitle(
        text.replace(f", on {tables.where(result)}", f"\n{tables.where(result)}"),
        x=0.01,
        ha="left",
        fontsize=9.5,
        color=INK,
    )
