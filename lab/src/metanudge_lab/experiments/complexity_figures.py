"""The figure of Table 1: evaluations against precision, steps against condition number, memory
against steps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from metanudge_lab import style
from metanudge_lab.experiments.base import Drawing, Result
from metanudge_lab.experiments.spending import GD, MEMORY, PRECISION, kappa, reach


def costs(result: Result[Any]) -> Drawing:
    """Evaluations against precision for both solvers, steps against κ, memory against steps."""
    figure, axes = style.figure(2, 2, width=10.8, height=7.6)
    solvers = [name for name in result.config.solvers if result.rows(what=PRECISION, solver=name)]
    largest = max(result.config.conditions)
    for one, solver in zip(axes[0], result.config.solvers, strict=False):
        for method in result.distinct("method"):
            found = [
                (e, reach(result, method, solver, largest, e)) for e in result.config.precisions
            ]
            points = [
                (e, spent.gradients + spent.products)
                for e, spent in found
                if spent is not None and math.isfinite(spent.steps)
            ]
            if points:
                one.plot(*zip(*points, strict=True), **look(method))
        one.set(
            xscale="log",
            yscale="log",
            xlabel="precision ε of the meta-gradient",
            title=f"inner solver: {solver}, κ = {kappa(largest):g}",
        )
        one.invert_xaxis()
    axes[0][0].set_ylabel("gradients and Hessian products")
    _against_kappa(axes[1][0], result, solvers)
    for method in result.distinct("method"):
        rows = [
            row
            for row in result.rows(what=MEMORY, method=method)
            if row["examples"] == min(result.config.memory_examples)
        ]
        if rows:
            axes[1][1].plot(
                [row["steps"] for row in rows], [row["memory"] for row in rows], **look(method)
            )
    axes[1][1].set(
        xscale="log",
        yscale="log",
        xlabel="inner steps K",
        ylabel="peak memory, in copies of θ",
        title="perceptron, one task",
    )
    for one in figure.axes:
        one.title.set_fontsize(10)
        style.short_ticks(one.yaxis)
    for one in axes[1]:
        style.short_ticks(one.xaxis)
    _legend(figure, result)
    return Drawing(figure, alt=_alt(result))


def _against_kappa(axes: Any, result: Result[Any], solvers: Sequence[str]) -> None:
    last = min(result.config.precisions)
    for solver, method in itertools.product(solvers, result.distinct("method")):
        found = [(kappa(c), _steps(result, method, solver, c)) for c in result.config.conditions]
        points = [point for point in found if math.isfinite(point[1])]
        if points:
            axes.plot(
                *zip(*points, strict=True),
                **{
                    **look(method),
                    "linestyle": "-" if solver == GD else (0, (2, 1.5)),
                    "linewidth": 1.5,
                },
            )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="condition number κ",
        ylabel="inner steps K",
        title=f"steps to ε = {last:g}",
    )


def _steps(result: Result[Any], method: str, solver: str, condition: float) -> float:
    found = reach(result, method, solver, condition, min(result.config.precisions))
    return math.nan if found is None else found.steps


def _legend(figure: Any, result: Result[Any]) -> None:
    from matplotlib.lines import Line2D

    line: dict[str, Any] = {"color": style.INK, "linewidth": 1.5}
    looks = [look(method) for method in result.distinct("method")]
    looks.append({**line, "label": "lower left: gradient descent"})
    looks.append({**line, "linestyle": (0, (2, 1.5)), "label": "lower left: Nesterov"})
    style.figure_legend(figure, [Line2D([], [], **one) for one in looks])


def look(method: str) -> dict[str, Any]:
    """The method's own line; the five-point stencil has one of its own."""
    line = style.line(method)
    return {**line, "color": "#c2459c", "marker": "X"} if method.endswith("five-point") else line


def _alt(result: Result[Any]) -> str:
    last, largest = min(result.config.precisions), max(result.config.conditions)
    parts = []
    for solver, method in itertools.product(result.config.solvers, result.distinct("method")):
        found = reach(result, method, solver, largest, last)
        if found is not None:
            parts.append(
                f"{method} {found.gradients:.0f} ({solver})"
                if math.isfinite(found.steps)
                else f"{method} never ({solver})"
            )
    return (
        "Gradient evaluations and Hessian products against precision, inner steps against"
        f" condition number, and peak memory against steps, all logarithmic. Gradients to {last:g}"
        f" at κ = {kappa(largest):g}: {', '.join(parts)}."
    )
