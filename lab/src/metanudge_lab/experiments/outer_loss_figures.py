"""The figures and the table of the outer loss."""

from __future__ import annotations

import math
from typing import Any

from metanudge_lab import style
from metanudge_lab.experiments import quadratics as q
from metanudge_lab.experiments.base import Drawing, Result, ResultTable, Shown
from metanudge_lab.experiments.outer_loss_rows import (
    LIMITED,
    LOSSES,
    at_rest,
    best_rate,
    cost,
    last_of,
    trained,
)
from metanudge_lab.experiments.spread import short


def draw(result: Result[Any]) -> list[Drawing]:
    """Excess outer loss on the way and in the limit, one panel for each of the two losses."""
    drawings = [_draw_descent(result), _draw_spent(result)] if trained(result) else []
    return [*drawings, _draw_limits(result)] if result.distinct("steps") else drawings


def _draw_descent(result: Result[Any]) -> Drawing:
    """Against iterations, at every method's best rate."""
    figure, axes = style.figure(2, width=10.8, height=4.6)
    for one, (loss, name) in zip(axes, LOSSES.items(), strict=True):
        for method in trained(result):
            rate = best_rate(result, method, loss)
            at = sorted({row["iteration"] for row in result.rows(method=method, rate=rate)})
            curve = result.spreads(loss, "iteration", at, method=method, rate=rate)
            style.band(one, curve, **_look(method), markevery=0.12)
        one.set(yscale="log", xlabel="meta-iterations", ylabel="above the minimum", title=name)
        one.set_ylim(bottom=max(1e-6, one.get_ylim()[0]))
        one.xaxis.get_major_locator().set_params(integer=True)
    style.legend(axes[-1])
    return Drawing(figure, alt=_alt(result))


def _draw_spent(result: Result[Any]) -> Drawing:
    """Against gradients spent, at the best rate of every method for all iterations."""
    figure, axes = style.figure(1, width=8.2, height=4.2)
    told = []
    for method in trained(result):
        rate, each = best_rate(result, method, "exact"), cost(result, method)
        at = sorted({row["iteration"] for row in result.rows(method=method, rate=rate)})
        curve = result.spreads("exact", "iteration", at, method=method, rate=rate)
        spent = {k * each: spread for k, spread in curve.items() if k}
        style.band(axes, spent, **_look(method), markevery=0.12)
        told.append(f"{method} {each}")
    axes.set(xscale="log", yscale="log", xlabel="gradients spent a task", title=LOSSES["exact"])
    axes.set(ylabel="above the minimum", ylim=(max(1e-6, axes.get_ylim()[0]), None))
    style.legend(axes)
    alt = f"Excess outer loss against gradients spent; a meta-iteration takes {', '.join(told)}."
    return Drawing(figure, alt=alt, suffix="gradients")


def _draw_limits(result: Result[Any]) -> Drawing:
    """Against inner steps, where the estimate vanishes."""
    figure, axes = style.figure(2, width=10.8, height=4.2)
    at, methods = (
        sorted(result.distinct("steps")),
        [m for m in LIMITED if any("steps" in row for row in result.rows(method=m))],
    )
    for one, (loss, name) in zip(axes, LOSSES.items(), strict=True):
        for method in methods:
            style.band(one, result.spreads(loss, "steps", at, method=method), **_look(method))
        one.set(
            xscale="log",
            xlabel="inner steps K",
            ylabel="above the minimum, in the limit",
            title=name,
        )
        # MAML ends at the minimum itself
        if positive := [y for line in one.lines for y in line.get_ydata() if 1e-7 < y < math.inf]:
            one.set(yscale="log", ylim=(min(positive) / 2, None))
        one.set_xticks(at, labels=[str(k) for k in at])
        one.set_xticks([], minor=True)
    style.legend(axes[-1])
    ends = ", ".join(
        f"{m} {short(at_rest(result, m, 'adapted', at[-1]))}"
        for m in methods
        if result.values("exact", method=m, steps=at[-1])
    )
    return Drawing(
        figure,
        alt=(
            "Excess outer loss where each method comes to rest, against inner steps; after"
            f" {at[-1]}: {ends}."
        ),
        suffix="limit",
    )


def _look(method: str) -> dict[str, Any]:
    above = {"markersize": 4.5, "zorder": 3 if method == q.SYMMETRIC else 2}
    return {**style.line(method), **above}


def table(result: Result[Any]) -> ResultTable:
    """The last excess loss at the best rate, which rate that was, and the loss in the limit."""
    names = ("at the inner solution", f"after {result.config.steps} inner steps")
    header = (
        "method",
        *(
            column
            for name in names
            for column in (name, "best rate (edge of the grid?)", "in the limit")
        ),
    )
    rows = []
    for method in trained(result):
        values: list[Shown | None] = []
        for loss in LOSSES:
            rate = best_rate(result, method, loss)
            limits = result.values(loss, method=method, steps=result.config.steps)
            limit = (
                Shown.short(at_rest(result, method, loss, result.config.steps)) if limits else None
            )
            values += [Shown.short(last_of(result, method, loss, rate)), _rate(result, rate), limit]
        rows.append((method, *values))
    return ResultTable(header, rows)


def _rate(result: Result[Any], rate: float) -> Shown:
    edge = len(result.config.rates) > 1 and rate in (
        result.config.rates[0],
        result.config.rates[-1],
    )
    return Shown(rate, f"{rate:g}" + (" (edge)" if edge else ""))


def _alt(result: Result[Any]) -> str:
    ends = [
        f"{m} {short(last_of(result, m, 'exact', best_rate(result, m, 'exact')))}"
        for m in trained(result)
    ]
    return (
        "Excess outer loss against meta-iterations, logarithmic. At the inner solution, after the"
        f" last iteration: {', '.join(ends)}."
    )
