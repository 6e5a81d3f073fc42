"""What is drawn of adapting longer than trained."""

from __future__ import annotations

import statistics
from typing import Any

from metanudge_lab import style
from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.base import Drawing, Result, ResultTable, Shown
from metanudge_lab.experiments.longer_rows import (
    SHORT,
    gradients,
    mean,
    percent,
    seen,
    sharpness,
)
from metanudge_lab.experiments.longer_runs import LENGTHS, PARTS, Config, name_of
from metanudge_lab.experiments.omniglot_runs import SHIFTED

TRAJECTORY = {
    "residual": "residual ‖∇g(φ)‖",
    "distance": "distance ‖φ − θ‖",
    "support_loss": "support loss",
    "loss": "query loss",
}


def draw(result: Result[Config]) -> list[Drawing]:
    """Accuracy against steps of adaptation, one panel for each way to train; and what happens on
    the way.
    """
    parts = [part for part in PARTS if result.rows(part=part, what="training")]
    if not parts:
        return [_draw_rates(result)]
    figure, axes = style.figure(
        len(LENGTHS), len(parts), width=13.0, height=3.9 * len(parts), sharey="row", squeeze=False
    )
    for row, part in zip(axes, parts, strict=True):
        for one, length in zip(row, LENGTHS, strict=True):
            for method in result.config.methods:
                trained = name_of(method, length)
                found = {k: percent(result, part, trained, k) for k in _steps(result)}
                lines = {k: mean(values).spread for k, values in found.items() if values}  # type: ignore[union-attr]
                if lines:
                    style.band(one, lines, **_look(method))
            one.set(xscale="log", title=f"trained with {length}")
            style.plain_ticks(one.xaxis)
        row[0].set_ylabel(f"accuracy, {PARTS[part]}, %")
        low, high = row[0].get_ylim()
        row[0].set_ylim(max(low, 0.0), min(high, 101.0))
    for one in axes[-1]:
        one.set_xlabel("steps of adaptation")
    style.legend(axes[0][-1])
    return [Drawing(figure, alt=_alt(result, parts)), _draw_way(result, parts)]


def _draw_way(result: Result[Config], parts: list[str]) -> Drawing:
    """Along adaptation, of what was trained with K = 5: medians over the seeds."""
    columns = len(TRAJECTORY) + 1
    figure, axes = style.figure(
        columns, len(parts), width=3.3 * columns, height=3.3 * len(parts), squeeze=False
    )
    for row, part in zip(axes, parts, strict=True):
        for method in result.config.methods:
            trained = name_of(method, SHORT)
            for one, key in zip(row, TRAJECTORY, strict=False):
                found = {k: seen(result, part, trained, key, k) for k in _steps(result)}
                line = {k: statistics.median(v.values()) for k, v in found.items() if v}
                if line:
                    one.plot(list(line), list(line.values()), **_look(method))
            sharp = {k: sharpness(result, part, trained, k) for k in result.config.curved_at}
            line = {k: statistics.median(values) for k, values in sharp.items() if values}
            if line:
                row[-1].plot(list(line), list(line.values()), **_look(method))
        for one, name in zip(row, (*TRAJECTORY.values(), "α(L̂ + λ)"), strict=True):
            one.set(title=name, yscale="log", xlabel="steps of adaptation")
        row[-1].axhline(2.0, color=style.INK, linewidth=0.8, dashes=(1, 3))
        row[0].set_ylabel(PARTS[part])
    style.legend(axes[0][-1])
    alt = (
        "Residual, distance from θ, losses and α times curvature plus λ along the steps of"
        f" adaptation, of what was trained with {SHORT}; dotted: 2, above which steps overshoot."
    )
    return Drawing(figure, alt=alt, suffix="way")


def _draw_rates(result: Result[Config]) -> Drawing:
    """The search for inner rates, before anything is trained."""
    figure, axes = style.figure(1, width=9.0, height=3.8)
    for trained, (method, _) in result.config.trained.items():
        tried = result.rows(kind="tried", trained=trained)
        found = [(row["inner"], 100 * row["accuracy"]) for row in tried]
        if found:
            axes.plot(*zip(*sorted(found), strict=True), **_look(method) | {"label": trained})
    axes.set(xscale="log", xlabel="inner learning rate", ylabel="validation accuracy, %")
    style.legend(axes)
    alt = "Validation accuracy against the inner learning rate, after short trainings."
    return Drawing(figure, alt=alt, suffix="rates")


def _look(method: str) -> dict[str, Any]:
    dotted = {"linestyle": (0, (1, 1)), "fillstyle": "none"} if method == SHIFTED else {}
    return style.line(method) | dotted


def _steps(result: Result[Config]) -> list[int]:
    return [steps for steps in result.config.adapt_steps if steps]


def table(result: Result[Config]) -> ResultTable:
    """Accuracy by steps of adaptation, also with the smaller rate; cost, rates, and α(L̂ + λ)."""
    steps = [k for k in _steps(result) if k in (1, 5, 16, 25, 50)]
    rows = []
    for part in PARTS:
        for trained in result.config.trained:
            found = [percent(result, part, trained, k) for k in steps]
            if not all(found):
                continue
            slow = percent(result, part, trained, steps[-1], "slower")
            shown = [Shown.of(one, 1) if (one := mean(values)) else None for values in found]
            small = Shown.of(one, 1) if (one := mean(slow)) else None
            used = result.rows(part=part, trained=trained, kind="test")
            rates = f"{used[0]['inner']:g}, {used[0]['rate']:g}" if used else None
            sharp = sharpness(result, part, trained, m.STEPS)
            curved = statistics.median(sharp) if sharp else None
            costs = result.values("seconds", part=part, trained=trained, kind="cost")
            seconds = statistics.fmean(costs) if costs else None
            own = gradients(result.config, trained)
            run = (PARTS[part], trained, len(found[0]), rates, own, seconds)
            rows.append((*run, *shown, small, curved))
    head = ("data", "trained", "seeds", "inner, meta-rate", "gradients a task and meta-step")
    after = (f"after {k} steps, %" for k in steps)
    quarter = f"after {steps[-1]} with {result.config.slower:g} of the rate, %"
    return ResultTable((*head, "seconds", *after, quarter, "α(L̂ + λ)"), rows)


def _alt(result: Result[Config], parts: list[str]) -> str:
    last, texts = max(result.config.adapt_steps), []
    for part in parts:
        for trained in result.config.trained:
            ends = (percent(result, part, trained, k) for k in (m.STEPS, last))
            found = [one.mean for values in ends if (one := mean(values))]
            if len(found) == 2:
                texts.append(f"{trained} {found[0]:.0f} to {found[1]:.0f}")
    return (
        f"Accuracy in percent against steps of adaptation, from {m.STEPS} to {last} steps:"
        f" {'; '.join(texts)}."
    )
