"""The figures of the ablation: cosines against ν, and accuracies variant by variant."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from metanudge_lab import style
from metanudge_lab.experiments.base import Drawing, Result
from metanudge_lab.experiments.network_errors import TARGETS
from metanudge_lab.experiments.variants import (
    AT_EQUAL_COST,
    DATA,
    POINTS,
    Choice,
    Variant,
    accuracy,
    cosine,
    trained_choices,
)

NUDGES = {
    "loss": style.METHODS["FO-B-MAML"]["color"],
    "gradient": style.METHODS["FO-B-MAML gradient"]["color"],
}


def cosines(result: Result[Any]) -> Drawing:
    """Cosine with both targets at the smallest K, symmetric stencil; open markers for what has no ν
    or chooses its own.
    """
    points = [point for point in POINTS if result.rows(part="error", point=point)]
    steps = min(result.distinct("steps"))
    figure, axes = style.figure(
        2 * len(points), width=3.1 * 2 * len(points) + 1.6, height=4.2, sharey=True, squeeze=False
    )
    looks = {"theta": ("-", "o"), "shifted": ((0, (5, 2)), "s"), "solution": ((0, (1, 1.2)), "^")}
    panels = [(point, key) for point in points for key in TARGETS]
    nus = [nu for nu in result.config.nus if nu != "auto"]
    numbers = [float(nu) for nu in nus]
    left, right = min(numbers) / 6, max(numbers) * 6  # of what has no ν, or chooses its own
    for one, (point, key) in zip(axes[0], panels, strict=True):
        for nudge, colour in NUDGES.items():
            for start, (dash, marker) in looks.items():
                base = Variant(nudge, start, "symmetric", "")
                values = [cosine(result, key, point, steps, replace(base, nu=nu)) for nu in nus]
                look = {
                    "color": colour,
                    "linestyle": dash,
                    "marker": marker,
                    "markersize": 4.5,
                    "linewidth": 1.6,
                }
                one.plot(numbers, values, **look, label=f"{nudge} nudge, from {start}")
                for place, other in (
                    (left, replace(base, stencil="tangent")),
                    (right, replace(base, nu="auto")),
                ):
                    one.plot(
                        [place],
                        [cosine(result, key, point, steps, other)],
                        **{**look, "fillstyle": "none", "linestyle": ""},
                    )
        one.set(xscale="log", xlabel="ν", title=f"{point}: {TARGETS[key]}")
        one.set_xticks([left, *numbers, right], ["tangent", *nus, "auto"], fontsize=8)
        one.xaxis.minorticks_off()
        one.title.set_fontsize(9.5)
    axes[0][0].set_ylabel(f"cosine with the target, K = {steps}")
    style.legend(axes[0][-1])
    return Drawing(figure, alt=_cosine_alt(result, steps))


def accuracies(result: Result[Any], parts: Sequence[str]) -> Drawing:
    """One line for each trained variant, one panel for each data set; open markers for more steps
    of adaptation than in training, crosses for as many gradients as the default takes.
    """
    variants = [
        v
        for v in trained_choices(result.config.options)
        if any(accuracy(result, part + view, v) for part in parts for view in ("", AT_EQUAL_COST))
    ]
    figure, axes = style.figure(
        len(parts),
        width=3.6 + 3.4 * len(parts),
        height=0.9 + 0.26 * len(variants),
        sharey=True,
        squeeze=False,
    )
    for one, part in zip(axes[0], parts, strict=True):
        _panel(one, result, part, variants)
    names = [
        f"{variant}{'  (default)' if variant == Variant.default() else ''}"
        for variant in reversed(variants)
    ]
    axes[0][0].set_yticks(range(len(variants)), names)
    ends = "; ".join(
        f"{v} {found.mean:.3f}"
        for v in variants
        if (found := accuracy(result, parts[0], v)) is not None
    )
    return Drawing(
        figure,
        alt=f"Accuracy after training for each variant. {DATA[parts[0]]}: {ends}.",
        suffix="accuracy",
    )


def _panel(axes: Any, result: Result[Any], part: str, variants: Sequence[Choice]) -> None:
    for place, variant in enumerate(reversed(variants)):
        found, more = (
            accuracy(result, part, variant, key) for key in ("accuracy", "accuracy_more")
        )
        dot: dict[str, Any] = {"color": _colour(variant), "marker": "o", "markersize": 5}
        if found is not None:
            interval = None if math.isnan(found.ci95) else found.ci95
            axes.errorbar(found.mean, place, xerr=interval, linewidth=1.4, **dot)
            if more is not None:
                axes.plot(more.mean, place, fillstyle="none", linestyle="", **dot)
        equal = accuracy(result, part + AT_EQUAL_COST, variant)
        if equal is not None and variant != Variant.default():
            axes.plot(equal.mean, place, linestyle="", **dot | {"marker": "x"})
    base = accuracy(result, part, Variant.default())
    if base is not None:
        axes.axvline(base.mean, color=style.INK, linewidth=0.8, linestyle=(0, (1, 3)))
    low, high = axes.get_xlim()
    what = "accuracy on test tasks" if part in ("mnist1d", "omniglot") else "variance explained"
    axes.set(
        xlabel=f"{what} (open: {result.config.more_steps} steps; ×: equal cost)",
        title=DATA[part],
        xlim=(max(low, -0.05), min(high, 1.02)),
    )


def _colour(choice: Choice) -> str:
    found = (
        NUDGES[choice.nudge] if isinstance(choice, Variant) else style.line(choice.name)["color"]
    )
    return str(found)


def _cosine_alt(result: Result[Any], steps: int) -> str:
    default = Variant.default()
    pairs = [
        f"{point}, {TARGETS[key]} {cosine(result, key, point, steps, default):.2f}"
        for point in POINTS
        for key in TARGETS
    ]
    return (
        "Cosine of the meta-gradient with two exact targets against ν, by nudge and start, K ="
        f" {steps}. Default: {'; '.join(pairs)}."
    )
