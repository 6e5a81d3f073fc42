"""What is drawn of gradient quality along training."""

from __future__ import annotations

import math
from typing import Any

from metanudge_lab import style
from metanudge_lab.experiments.along_runs import METHODS, NETWORKS, Config
from metanudge_lab.experiments.along_verdict import cosine, measured
from metanudge_lab.experiments.base import Drawing, Result, ResultTable, Shown
from metanudge_lab.experiments.network_errors import TARGETS
from metanudge_lab.experiments.spread import Spread, short
from metanudge_lab.experiments.transformer_runs import AUTOMATIC, SHIFTED, TANGENT


def draw(result: Result[Config]) -> list[Drawing]:
    """Cosines with both exact gradients against meta-steps, a column for each network."""
    networks = [network for network in NETWORKS if result.rows(network=network)]
    columns, points = len(networks), result.config.points
    figure, axes = style.figure(
        columns, 2, width=3.6 + 2.7 * columns, height=6.4, sharey=True, squeeze=False
    )
    for row, (target, name) in zip(axes, TARGETS.items(), strict=True):
        for one, network in zip(row, networks, strict=True):
            for method in METHODS:
                found = result.along(
                    f"cosine_{target}", "iteration", points, network=network, method=method
                )
                lines = {
                    points.index(point): Spread.of([-1.0 if math.isnan(v) else v for v in values])
                    for point, values in found.items()
                }
                if lines:
                    style.band(one, lines, alpha=0.08, **_look(method))
            one.set_xticks(range(len(points)), [str(point) for point in points])
            one.set_ylim(-0.35, 1.05)
        row[0].set_ylabel(f"cosine with the\n{name}")
    for one, network in zip(axes[0], networks, strict=True):
        one.set_title(NETWORKS[network].replace(", ", ",\n", 1), fontsize=10)
    for one in axes[-1]:
        one.set_xlabel("meta-steps of training")
    style.legend(axes[0][-1])
    alt = "Cosine of every estimate with both exact meta-gradients along training."
    return [Drawing(figure, alt=f"{alt} {measured(result)}")]


def _look(method: str) -> dict[str, Any]:
    """Dotted and open what else would look like another one."""
    look = style.line(method)
    if method not in (TANGENT, AUTOMATIC, SHIFTED):
        return look
    dotted = {"linestyle": (0, (1, 1)), "fillstyle": "none"}
    return look | dotted | {"markeredgecolor": look["color"]}


def table(result: Result[Config]) -> ResultTable:
    """Cosines and errors, medians over points and seeds."""
    rows: list[tuple[str | float | Shown, ...]] = []
    for network in NETWORKS:
        for method in METHODS:
            if not result.rows(network=network, method=method):
                continue
            cells: list[Shown] = []
            for target in TARGETS:
                errors = result.values(f"error_{target}", network=network, method=method)
                value = cosine(result, network, method, target)
                error = Spread.of(errors)
                text = f"{value:.4f} ({short(error.median)}, at most {short(error.high)})"
                cells.append(Shown(value, text))
            optimum = Spread.of(result.values("residual", network=network)).median
            rows.append((NETWORKS[network], method, *cells, optimum))
    heads = (f"{name}: cosine (error)" for name in TARGETS.values())
    return ResultTable(("network", "estimate", *heads, "residual at the optimum"), rows)
