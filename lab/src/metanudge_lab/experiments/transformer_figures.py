"""The figures of the Transformer: cosines along training, and losses against what was spent."""

from __future__ import annotations

import math
from typing import Any

from metanudge_lab import style
from metanudge_lab.experiments.base import Drawing, Result
from metanudge_lab.experiments.spread import Spread
from metanudge_lab.experiments.transformer_quality import COARSE, NAMES
from metanudge_lab.experiments.transformer_rows import cosines, curve, seeds_of
from metanudge_lab.experiments.transformer_runs import DIFFERENCE, Config
from metanudge_lab.experiments.transformer_verdict import all_cosines, losses

AXES = {"iteration": "meta-steps", "gradients": "gradients spent", "seconds": "seconds"}


def draw(result: Result[Config]) -> list[Drawing]:
    """Those that there are rows for; the search for rates before there are any."""
    drawings = []
    if result.rows(kind="quality"):
        drawings.append(_quality(result))
    if result.rows(kind="curve"):
        drawings.append(_outcome(result))
    return drawings or [_rates(result)]


def _quality(result: Result[Config]) -> Drawing:
    """Cosine with the exact gradient along training, a panel for each inner rate."""
    inners, points = result.config.inner_rates, result.config.points
    figure, axes = style.figure(
        len(inners), width=4.6 + 2.5 * len(inners), height=4.4, sharey=True, squeeze=False
    )
    lines = [(method, "fp32") for method in result.distinct("method")]
    lines += [(DIFFERENCE, precision) for precision in COARSE]
    for one, inner in zip(axes[0], inners, strict=True):
        for method, precision in lines:
            found = {
                place: Spread.of(values)
                for place, point in enumerate(points)
                if (values := cosines(result, method, precision, inner=inner, iteration=point))
            }
            if found:
                style.band(one, found, alpha=0.1, **_look(method, precision))
        one.set_xticks(range(len(points)), [str(point) for point in points])
        one.set(xlabel="meta-steps of training", title=f"inner rate {inner:g}", ylim=(-1.05, 1.05))
    axes[0][0].set_ylabel("cosine with the exact gradient")
    style.legend(axes[0][-1])
    alt = "Cosine of each estimate with the gradient of the adaptation, along training."
    return Drawing(figure, alt=f"{alt} {all_cosines(result)}")


def _look(method: str, precision: str) -> dict[str, Any]:
    look = style.line(method)
    if precision == "fp32":
        return look
    dash = {"linestyle": (0, (1, 1)), "fillstyle": "none", "markeredgecolor": look["color"]}
    marker = "s" if precision == "tf32" else "^"
    return look | dash | {"label": f"{method}, {NAMES[precision]}", "marker": marker}


def _outcome(result: Result[Config]) -> Drawing:
    """Mean loss on test tasks over the seeds against meta-steps, gradients and seconds, one column
    for each inner rate; a line ends where a seed has diverged.
    """
    inners, guess = result.config.inner_rates, math.log(result.config.symbols)
    figure, axes = style.figure(
        len(inners),
        len(AXES),
        width=4.6 + 2.5 * len(inners),
        height=2.7 * len(AXES),
        sharey="col",
        squeeze=False,
    )
    for row, (axis, name) in zip(axes, AXES.items(), strict=True):
        for one, inner in zip(row, inners, strict=True):
            for method in result.config.methods:
                curves = [
                    list(curve(result, method, inner, seed, axis).items())
                    for seed in seeds_of(result, method, inner)
                ]
                points = [
                    tuple(sum(values) / len(curves) for values in zip(*places, strict=True))
                    for places in zip(*curves, strict=False)
                ]
                if points:
                    x, y = zip(*points, strict=True)
                    one.plot(x, y, **style.line(method))
            one.axhline(guess, color=style.INK, linewidth=0.6, dashes=(1, 3))
            one.set_ylim(top=min(one.get_ylim()[1], 1.05 * guess))  # what diverged goes beyond
            one.set(xscale="log", xlabel=name)
            style.short_ticks(one.xaxis)
        row[0].set_ylabel("loss on test tasks")
    for one, inner in zip(axes[0], inners, strict=True):
        one.set_title(f"inner rate {inner:g}")
    style.legend(axes[len(AXES) // 2][-1])
    alt = (
        "Loss on test tasks against meta-steps, gradients and seconds; dotted: that of a uniform"
        " guess."
    )
    return Drawing(figure, alt=f"{alt} {losses(result, inners[0])}", suffix="outcome")


def _rates(result: Result[Config]) -> Drawing:
    """Validation loss after the short trainings of the search."""
    figure, axes = style.figure(1, width=8.0, height=3.8)
    for method in result.distinct("method"):
        for inner in result.config.inner_rates:
            tried = result.rows(kind="tried", method=method, inner=inner)
            axes.plot(
                [row["rate"] for row in tried],
                [math.nan if row["loss"] is None else row["loss"] for row in tried],
                **style.line(method) | {"label": f"{method}, inner rate {inner:g}"},
            )
    axes.set(xscale="log", xlabel="meta-learning rate", ylabel="loss on validation tasks")
    style.legend(axes)
    chosen = "; ".join(
        f"{row['method']}, inner rate {row['inner']:g}: {row['rate']:g}"
        for row in result.rows(kind="chosen")
    )
    alt = f"Loss on validation tasks after short trainings. Chosen: {chosen}."
    return Drawing(figure, alt=alt, suffix="rates")
