"""The figure and the table of accuracies on Omniglot."""

from __future__ import annotations

from typing import Any

from metanudge_lab import style
from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.base import Drawing, Result, ResultTable, Shown
from metanudge_lab.experiments.equal_cost import passes
from metanudge_lab.experiments.omniglot_rows import PUBLISHED, at_end, final, lengths, measured
from metanudge_lab.experiments.omniglot_runs import ESTIMATORS, MORE_STEPS, SHIFTED, watched


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
    return [Drawing(figure, alt=_alt(result))]


def _look(method: str, *, thin: bool) -> dict[str, Any]:
    look = style.line(method)
    if method == SHIFTED:
        dotted = {"linestyle": (0, (1, 1)), "fillstyle": "none", "markeredgecolor": look["color"]}
        look |= dotted
    return look | {"linewidth": 1.0, "markersize": 3, "label": None} if thin else look


def table(result: Result[Any]) -> ResultTable:
    """Accuracy at the end beside the published one."""
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
                    each = passes(ESTIMATORS[method], m.STEPS)
                    took = (len(times), each, Shown(minutes, f"{minutes:.2g}"), rates)
                    rows.append((*run, *shown, *took, _published(method, setting)))
    accuracy = ("accuracy, %", f"with {MORE_STEPS} steps, %")
    used_for = ("seeds", "gradients a task and meta-step", "minutes", "inner, meta-rate")
    return ResultTable(
        ("setting", "method", "meta-steps", *accuracy, *used_for, "published, %"), rows
    )


def _curve(
    result: Result[Any], setting: str, method: str, length: int
) -> tuple[list[int], list[float]]:
    where = {"kind": "test", "setting": setting, "method": method, "iterations": length}
    at = watched(length) if length else []
    found = result.along("accuracy", "iteration", at, **where)
    return list(found), [100 * (1 - sum(values) / len(values)) for values in found.values()]


def _published(method: str, setting: str) -> Shown | None:
    known = PUBLISHED.get(method, {}).get(setting)
    return None if known is None else Shown(known[0], f"{known[0]:g} ± {known[1]:g}")


def _alt(result: Result[Any]) -> str:
    return f"Errors on Omniglot test tasks against meta-steps, both logarithmic. {measured(result)}"
