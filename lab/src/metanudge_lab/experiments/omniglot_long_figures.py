"""What is drawn of the long trainings on Omniglot."""

from __future__ import annotations

from typing import Any

from metanudge_lab import style
from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.base import Drawing, Result, ResultTable, Shown
from metanudge_lab.experiments.omniglot_long_plan import AUTOMATIC, RECIPE_METHOD, Config
from metanudge_lab.experiments.omniglot_long_verdict import (
    accuracies,
    by_recipe,
    gain,
    measured,
    recipes_of,
    runs_of,
)
from metanudge_lab.experiments.omniglot_rows import PUBLISHED
from metanudge_lab.experiments.omniglot_runs import FIVE_WAY, watched
from metanudge_lab.experiments.spread import Mean


def draw(result: Result[Config]) -> list[Drawing]:
    """The search for inner rates; errors against meta-steps, and against the number of steps that
    trained learners adapt with.
    """
    trained = runs_of(result)
    if not trained:
        return [_draw_rates(result)]
    figure, axes = style.figure(2, width=11.5, height=4.2)
    for setting, method, iterations in trained:
        look = _look(method, setting)
        where = {"setting": setting, "method": method, "iterations": iterations}
        at = watched(iterations)
        curve = result.along("accuracy", "iteration", at, kind="curve", **where)
        errors = [100 - 100 * sum(found) / len(found) for found in curve.values()]
        axes[0].plot(list(curve), errors, **look)
        ends = {
            k: found
            for k in result.config.adapt_steps
            if (found := accuracies(result, setting, method, iterations, k))
        }
        axes[1].plot(list(ends), [100 - sum(found) / len(found) for found in ends.values()], **look)
    axes[0].set(xscale="log", yscale="log", xlabel="meta-steps", ylabel="errors on test tasks, %")
    axes[1].set(xscale="log", yscale="log", xlabel=f"steps of adaptation (trained with {m.STEPS})")
    style.legend(axes[1])
    alt = (
        "Errors on Omniglot test tasks against meta-steps, and against the number of steps of"
        " adaptation."
    )
    return [Drawing(figure, alt=f"{alt} {measured(result)}"), _draw_rates(result)]


def _draw_rates(result: Result[Config]) -> Drawing:
    """Validation accuracy after the first round of the search against the inner rate, with the best
    meta-rate for each.
    """
    figure, axes = style.figure(1, width=9.0, height=3.8)
    texts = []
    for row in result.rows(kind="chosen"):
        tried = result.rows(
            kind="tried",
            setting=row["setting"],
            method=row["method"],
            iteration=result.config.tuning[0],
        )
        rates = sorted({one["inner"] for one in tried})
        best = [max(one["accuracy"] for one in tried if one["inner"] == rate) for rate in rates]
        axes.plot(
            rates, [100 * value for value in best], **_look(str(row["method"]), str(row["setting"]))
        )
        texts.append(f"{row['method']}, {row['setting']}: {row['inner']:g}")
    axes.set_xscale("log")
    axes.set_xticks(result.config.inner_rates, [f"{rate:g}" for rate in result.config.inner_rates])
    axes.minorticks_off()
    axes.set(
        xlabel="inner learning rate",
        ylabel=f"validation accuracy after {result.config.tuning[0]} meta-steps, %",
    )
    if texts:
        style.legend(axes)
    alt = (
        "Validation accuracy against the inner learning rate, short runs. Chosen after longer"
        " ones: "
    )
    return Drawing(figure, alt=f"{alt}{'; '.join(texts)}.", suffix="rates")


def _look(method: str, setting: str) -> dict[str, Any]:
    dotted = {"linestyle": (0, (1, 1)), "fillstyle": "none"} if method == AUTOMATIC else {}
    return (
        style.line(method)
        | dotted
        | {"label": method if setting == FIVE_WAY[0] else f"{method}, {setting}"}
    )


def table(result: Result[Config]) -> ResultTable:
    """Accuracy at the end, with the steps of training and with others, what a meta-step costs, what
    an ingredient brings, and what is published.
    """
    steps = result.config.adapt_steps
    rows = []
    for setting, method, iterations in runs_of(result):
        found = {k: accuracies(result, setting, method, iterations, k) for k in steps}
        where = {"part": "training", "setting": setting, "method": method}
        known = PUBLISHED.get(method, {}).get(setting)
        published = None if known is None else Shown(known[0], f"{known[0]:g} ± {known[1]:g}")
        run = _run(result, iterations, where, found)
        rows.append((setting, method, iterations, *run, None, published))
    for setting, recipe, iterations in recipes_of(result):
        found = {k: by_recipe(result, setting, recipe, k) for k in steps}
        where = {"part": "recipe", "setting": setting, "recipe": recipe}
        more = gain(result, setting, recipe)
        brings = None if more is None else Shown.of(more, 2)
        run = _run(result, iterations, where, found)
        rows.append((setting, f"{RECIPE_METHOD} + {recipe}", iterations, *run, brings, None))
    header = ("setting", "method", "meta-steps", "seeds", "inner, meta-rate", "gradients a task")
    after = (f"K = {k}, %" for k in steps)
    return ResultTable((*header, "minutes", *after, "ingredient brings", "published, %"), rows)


def _run(
    result: Result[Config], iterations: int, where: dict[str, str], found: dict[int, list[float]]
) -> tuple[int | str | float | Shown | None, ...]:
    """Seeds, rates, what it cost, and the accuracies."""
    at = {"iterations": iterations, **where}
    costs = result.rows(kind="cost", **at)
    gradients = costs[0]["support_gradients"] + costs[0]["query_gradients"] if costs else None
    times = [row["seconds"] for row in result.rows(kind="curve", iteration=iterations, **at)]
    minutes = sum(times) / len(times) / 60 if times else None
    used = result.rows(**at)[0]
    rates = f"{used['inner']:g}, {used['rate']:g}"
    shown = [Shown.of(Mean.of(values), 2) if values else None for values in found.values()]
    return len(result.rows(kind="val", **at)), rates, gradients, minutes, *shown
