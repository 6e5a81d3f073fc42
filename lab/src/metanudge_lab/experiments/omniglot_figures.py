"""The figure and the table of accuracies on Omniglot."""

from __future__ import annotations

import math
from typing import Any

from metanudge_lab import style
from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.base import Drawing, Result, ResultTable, Shown
from metanudge_lab.experiments.equal_cost import passes
from metanudge_lab.experiments.omniglot_rows import (
    PUBLISHED,
    at_end,
    final,
    lengths,
    longest,
    measured,
)
from metanudge_lab.experiments.omniglot_runs import ESTIMATORS, MORE_STEPS, SHIFTED, watched
from metanudge_lab.experiments.spread import Mean


def draw(result: Result[Any]) -> list[Drawing]:
    """Errors on test tasks against meta-steps, one panel for each setting; longer runs drawn thin;
    published numbers as lines.
    """
    settings = result.distinct("setting")
    columns = min(2, len(settings))
    rows = -(-len(settings) // columns)
    figure, axes = style.figure(
        columns, rows, width=3.4 + 4.4 * columns, height=4.2 * rows, squeeze=False
    )
    for one, setting in zip(axes.flat, settings, strict=False):
        for method in ESTIMATORS:
            for length in lengths(result, setting, method):
                at, errors = _curve(result, setting, method, length)
                if at:
                    one.plot(at, errors, **_look(method, thin=length != result.config.iterations))
        if setting in PUBLISHED[m.LOSS] and one.get_ylim()[0] < 10:
            mean, ci = PUBLISHED[m.LOSS][setting]
            colour = style.METHODS[m.LOSS]["color"]
            one.axhspan(100 - mean - ci, 100 - mean + ci, color=colour, alpha=0.12, linewidth=0)
        one.set(xscale="log", yscale="log", xlabel="meta-steps", title=setting)
        low, high = one.get_ylim()
        left, right = one.get_xlim()
        for axis, digits in (
            (one.xaxis, "25" if right < 100 * left else "3"),
            (one.yaxis, "235" if high > 4 * low else "23456789"),
        ):
            style.plain_ticks(axis)
            axis.set_minor_formatter(
                lambda value, _, digits=digits: f"{value:g}" if f"{value:e}"[0] in digits else ""
            )
    for one in axes.flat[len(settings) :]:
        one.set_axis_off()
    for row in axes:
        row[0].set_ylabel("errors on test tasks, %")
    style.legend(axes[0][-1])
    return [Drawing(figure, alt=_alt(result)), _draw_published(result)]


def _look(method: str, *, thin: bool) -> dict[str, Any]:
    look = style.line(method)
    if method == SHIFTED:
        dotted = {"linestyle": (0, (1, 1)), "fillstyle": "none", "markeredgecolor": look["color"]}
        look |= dotted
    return look | {"linewidth": 1.0, "markersize": 3, "label": None} if thin else look


def _draw_published(result: Result[Any]) -> Drawing:
    """Every method's longest runs beside what is published for it."""
    from matplotlib.lines import Line2D

    settings = result.distinct("setting")
    columns = min(2, len(settings))
    rows = -(-len(settings) // columns)
    methods = list(reversed(ESTIMATORS))
    figure, axes = style.figure(
        columns, rows, width=2.6 + 3.4 * columns, height=0.8 + 2.7 * rows, squeeze=False
    )
    for one, setting in zip(axes.flat, settings, strict=False):
        for place, method in enumerate(methods):
            look = {"color": style.line(method)["color"], "markersize": 6, "capsize": 3}
            found = longest(result, setting, method)
            if found is not None:
                one.errorbar(
                    100 - found.mean, place + 0.14, xerr=found.half, marker="o", **look,
                )  # fmt: skip
            if setting in PUBLISHED.get(method, {}):
                mean, ci = PUBLISHED[method][setting]
                one.errorbar(
                    100 - mean, place - 0.14, xerr=ci, marker="s", fillstyle="none", **look,
                )  # fmt: skip
        one.set_xscale("log")
        style.plain_ticks(one.xaxis)
        low, high = one.get_xlim()
        digits = "25" if high < 100 * low else ""
        one.xaxis.set_minor_formatter(
            lambda value, _, digits=digits: f"{value:g}" if f"{value:e}"[0] in digits else ""
        )
        one.set(title=setting, ylim=(-0.6, len(methods) - 0.4))
        names = [method.replace(", shifted", ",\nshifted") for method in methods]
        one.set_yticks(range(len(methods)), names, fontsize=8)
    for row in axes:
        for one in row[1:]:
            one.set_yticklabels([])
    for one in axes.flat[len(settings) :]:
        one.set_axis_off()
    for one in axes[-1]:
        one.set_xlabel("errors on test tasks, %")
    kinds = [
        Line2D([], [], color=style.INK, linestyle="", marker="o", label="ours, longest runs"),
        Line2D([], [], color=style.INK, linestyle="", marker="s", fillstyle="none",
               label="published"),
    ]  # fmt: skip
    style.figure_legend(figure, kinds, loc="outside upper center", ncols=2)
    told = "; ".join(
        f"{setting}: {method} {found.text(2)} (published {mean:g} ± {ci:g})"
        for method, known in PUBLISHED.items()
        for setting, (mean, ci) in known.items()
        if (found := longest(result, setting, method)) is not None
    )
    alt = f"Errors of the longest runs (filled) beside published ones (hollow squares). {told}."
    return Drawing(figure, alt=alt, suffix="published")


def table(result: Result[Any]) -> ResultTable:
    """Accuracy at the end, a column for each setting, with what is published below it; then every
    run.
    """
    settings = result.distinct("setting")
    rows: list[tuple[str | int | Shown | None, ...]] = []
    for method in ESTIMATORS:
        counts = {count for setting in settings for count in lengths(result, setting, method)}
        for count in sorted(counts):
            found = [final(result, setting, method, count) for setting in settings]
            each = passes(ESTIMATORS[method], m.STEPS)
            if any(found):
                cells = [
                    None if one is None else Shown.of(Mean(one.mean, one.ci95), 2) for one in found
                ]
                rows.append((method, Shown(count, f"{count:,}"), each, *cells))
        if counts and method in PUBLISHED:
            known = [PUBLISHED[method].get(setting) for setting in settings]
            cells = [
                None if one is None else Shown(one[0], f"{one[0]:g} ± {one[1]:g}") for one in known
            ]
            rows.append((method, Shown(math.inf, "published"), None, *cells))
    head = ("method", "meta-steps", "gradients a task")
    return ResultTable((*head, *(f"{setting}, %" for setting in settings)), rows, _runs(result))


def _runs(result: Result[Any]) -> ResultTable:
    """What the runs of a method took, and what they reach with more steps."""
    rows = []
    for setting in result.distinct("setting"):
        for method in ESTIMATORS:
            for length in lengths(result, setting, method):
                found = final(result, setting, method, length)
                if found is not None:
                    where = at_end(setting, method, length)
                    used, times = result.rows(**where)[0], result.values("seconds", **where)
                    rates = f"{used['inner']:g}, {used['rate']:g}"
                    minutes = sum(times) / len(times) / 60
                    more = final(result, setting, method, length, kind="more steps")
                    run = (setting, method, length)
                    shown = (Shown.of(found, 2), None if more is None else Shown.of(more, 2))
                    took = (len(times), Shown(minutes, f"{minutes:.2g}"), rates)
                    rows.append((*run, *shown, *took))
    accuracy = ("accuracy, %", f"with {MORE_STEPS} steps, %")
    used_for = ("seeds", "minutes", "inner, meta-rate")
    return ResultTable(("setting", "method", "meta-steps", *accuracy, *used_for), rows)


def _curve(
    result: Result[Any], setting: str, method: str, length: int
) -> tuple[list[int], list[float]]:
    where = {"kind": "test", "setting": setting, "method": method, "iterations": length}
    at = watched(length) if length else []
    found = result.along("accuracy", "iteration", at, **where)
    return list(found), [100 * (1 - sum(values) / len(values)) for values in found.values()]


def _alt(result: Result[Any]) -> str:
    return f"Errors on Omniglot test tasks against meta-steps, both logarithmic. {measured(result)}"
