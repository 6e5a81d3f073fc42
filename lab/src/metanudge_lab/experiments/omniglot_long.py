"""Omniglot trained longer: all methods with the same steps and seeds, adapting with fewer and more
steps than in training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch

import metanudge as mn
from metanudge.estimators import Estimator
from metanudge.tasks.episodes import Split
from metanudge.training.device import computing_in
from metanudge_lab import style
from metanudge_lab.device_memory import release
from metanudge_lab.experiments import fewshot
from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments import omniglot_runs as runs
from metanudge_lab.experiments.base import (
    Cell,
    Drawing,
    Experiment,
    Result,
    ResultTable,
    Row,
    Settings,
    Shown,
    Statement,
    Verdict,
)
from metanudge_lab.experiments.omniglot_rows import PUBLISHED
from metanudge_lab.experiments.omniglot_runs import (
    FIVE_WAY,
    SHIFTED,
    Sizes,
    make_recipe,
    make_trial,
    search,
    watched,
)
from metanudge_lab.experiments.omniglot_verdict import MARGIN
from metanudge_lab.experiments.spread import Mean, paired, sentence

AUTOMATIC = "FO-B-MAML, automatic ν"
ESTIMATORS: dict[str, Estimator] = {
    m.LOSS: m.ESTIMATORS[m.LOSS],
    AUTOMATIC: mn.FOBMAML(),
    SHIFTED: runs.ESTIMATORS[SHIFTED],
    m.FO_MAML: m.ESTIMATORS[m.FO_MAML],
    m.MAML: m.ESTIMATORS[m.MAML],
    m.DAMPED: m.DAMPED_IMAML,
}
# Setting, methods, meta-steps, seeds. Not part of the config: more may be added without measuring
# anew what there is.
PLAN: tuple[tuple[str, tuple[str, ...], int, int], ...] = (
    (FIVE_WAY[0], tuple(ESTIMATORS), 12000, 3),
)


@dataclass(frozen=True)
class Config(Sizes, Settings):
    """Sizes of the measurement. In full an hour on a GPU.

    Attributes:
        shorten: divide the plan's numbers of meta-steps by this.
        seeds: at most so many of the plan's.
        inner_rates: of the grid of learning rates.
        tuning_keep: how many pairs of the grid go on to the next round.
        adapt_steps: with how many steps the trained learners adapt.
    """

    shorten: int = 1
    seeds: int = 3
    inner_rates: tuple[float, ...] = (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4)
    tuning_keep: int = 3
    adapt_steps: tuple[int, ...] = (1, 2, 3, 5, 8, 12, 16, 25, 50)

    @classmethod
    def quick(cls) -> Config:
        """A minute or two; a narrow network, one seed, one pair of learning rates."""
        return cls(shorten=400, seeds=1, test_tasks=100, adapt_steps=(1, 5, 16), **runs.QUICK)


def cells(config: Config) -> list[Cell]:
    """The search for learning rates of each setting and method, then the training runs."""
    pairs = dict.fromkeys(
        (setting, method) for setting, methods, _, _ in PLAN for method in methods
    )
    searches: list[Cell] = [
        {"part": "rates", "setting": setting, "method": method} for setting, method in pairs
    ]
    trainings: list[Cell] = [
        {
            "part": "training",
            "setting": setting,
            "method": method,
            "iterations": max(1, iterations // config.shorten),
            "seed": seed,
        }
        for setting, methods, iterations, seeds in PLAN
        for method in methods
        for seed in range(min(seeds, config.seeds))
    ]
    return [*searches, *trainings]


def measure(cell: Cell, config: Config, device: torch.device) -> list[Row]:
    """Find the learning rates on validation tasks; or train, and test on the way and at the end."""
    setting, method = str(cell["setting"]), str(cell["method"])
    release(device)
    with computing_in("tf32", device):
        if cell["part"] == "rates":
            return _search(setting, method, config, device)
        return _training(
            setting, method, int(cell["iterations"] or 0), int(cell["seed"] or 0), config, device
        )


_known: dict[tuple[str, str, Config], fewshot.Recipe] = {}


def remember(result: Result[Config]) -> None:
    """Learning rates that were found before."""
    for row in result.rows(kind="chosen"):
        setting, inner, rate = str(row["setting"]), float(row["inner"]), float(row["rate"])
        recipe = make_recipe(setting, inner, rate, result.config.tuning[-1], result.config)
        _known[str(row["setting"]), str(row["method"]), result.config] = recipe


def _search(setting: str, method: str, config: Config, device: torch.device) -> list[Row]:
    found = search(
        setting,
        ESTIMATORS[method],
        config,
        inner_rates=config.inner_rates,
        keep=config.tuning_keep,
        device=device,
    )
    _known[setting, method, config] = found.best
    return [*found.rows("tried"), {"kind": "chosen", **found.best.rates}]


def _training(
    setting: str, method: str, last: int, seed: int, config: Config, device: torch.device
) -> list[Row]:
    if (setting, method, config) not in _known:
        _search(setting, method, config, device)
    best = _known[setting, method, config]
    trial, data = make_trial(setting, ESTIMATORS[method], config, seed=seed, device=device)
    about: Row = {**best.rates, "data": data}
    rows: list[Row] = []

    def see(iteration: int, learner: mn.MetaLearner) -> None:
        found = fewshot.accuracies(learner, trial.source, "test", config.watch_tasks)
        rows.append(
            {
                "kind": "curve",
                "iteration": iteration,
                "seconds": trial.seconds,
                "tasks": len(found),
                **about,
                **fewshot.summary(found),
            }
        )
        if iteration == last:
            spent = learner.meta_gradient(trial.source.batch(range(best.tasks)), metrics=False)[1]
            cost = {
                name: getattr(spent, name)
                for name in ("support_gradients", "query_gradients", "hessian_products")
            }
            rows.append({"kind": "cost", **cost})
            for split, steps in (("val", m.STEPS), *(("test", k) for k in config.adapt_steps)):
                tasks = config.test_tasks
                tested = fewshot.accuracies(
                    learner, trial.source, cast(Split, split), tasks, steps=steps
                )
                rows.append(
                    {
                        "kind": split,
                        "steps": steps,
                        "tasks": len(tested),
                        **about,
                        **fewshot.summary(tested),
                    }
                )

    recipe = make_recipe(setting, best.inner, best.rate, last, config)
    if not trial.train(recipe, at=watched(last), see=see, rows=rows):
        rows.append({"kind": "diverged", **about})
    return rows


def _accuracies(
    result: Result[Config], setting: str, method: str, iterations: int, steps: int
) -> list[float]:
    """At the end, in percent, seed by seed; none where a run diverged."""
    where = {"setting": setting, "method": method, "iterations": iterations}
    return [100 * value for value in result.values("accuracy", kind="test", steps=steps, **where)]


def _runs(result: Result[Config]) -> list[tuple[str, str, int]]:
    """Setting, method and meta-steps of what has been trained."""
    rows = result.rows(part="training")
    return list(
        dict.fromkeys(
            (str(row["setting"]), str(row["method"]), int(row["iterations"])) for row in rows
        )
    )


def draw(result: Result[Config]) -> list[Drawing]:
    """The search for inner rates; errors against meta-steps, and against the number of steps that
    trained learners adapt with.
    """
    trained = _runs(result)
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
            if (found := _accuracies(result, setting, method, iterations, k))
        }
        axes[1].plot(list(ends), [100 - sum(found) / len(found) for found in ends.values()], **look)
    axes[0].set(xscale="log", yscale="log", xlabel="meta-steps", ylabel="errors on test tasks, %")
    axes[1].set(xscale="log", yscale="log", xlabel=f"steps of adaptation (trained with {m.STEPS})")
    style.legend(axes[1])
    alt = (
        "Errors on Omniglot test tasks against meta-steps, and against the number of steps of"
        " adaptation."
    )
    return [Drawing(figure, alt=f"{alt} {_measured(result)}"), _draw_rates(result)]


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
    """Accuracy at the end, with the steps of training and with others, and what a meta-step
    costs.
    """
    steps = result.config.adapt_steps
    rows = []
    for setting, method, iterations in _runs(result):
        found = {k: _accuracies(result, setting, method, iterations, k) for k in steps}
        shown = [Shown.of(Mean.of(found[k]), 2) if found[k] else None for k in steps]
        where = {"setting": setting, "method": method, "iterations": iterations}
        costs = result.rows(kind="cost", **where)
        gradients = costs[0]["support_gradients"] + costs[0]["query_gradients"] if costs else None
        times = [row["seconds"] for row in result.rows(kind="curve", iteration=iterations, **where)]
        minutes = sum(times) / len(times) / 60 if times else None
        used = result.rows(part="training", **where)[0]
        seeds = len(result.rows(kind="val", **where))
        rates = f"{used['inner']:g}, {used['rate']:g}"
        rows.append((setting, method, iterations, seeds, rates, gradients, minutes, *shown))
    header = (
        "setting",
        "method",
        "meta-steps",
        "seeds",
        "inner, meta-rate",
        "gradients a task",
        "minutes",
    )
    return ResultTable((*header, *(f"K = {k}, %" for k in steps)), rows)


def judge(result: Result[Config]) -> Verdict:
    """Whether FO-B-MAML, trained longer, reaches what is published and is not behind any
    baseline.
    """
    statements = []
    for setting, methods, iterations, _ in PLAN:
        length = max(1, iterations // result.config.shorten)
        ours = _accuracies(result, setting, m.LOSS, length, m.STEPS)
        if m.LOSS not in methods or not ours:
            continue
        published, ci = PUBLISHED[m.LOSS].get(setting, (0.0, 0.0))
        good = sum(ours) / len(ours) >= published - ci
        words = f"{setting}: {published:g} ± {ci:g} % is {{}}"
        statements.append(
            Statement(good, words.format("reached"), words.format("missed"), "accuracy")
        )
        for method in (m.FO_MAML, m.MAML, m.DAMPED):
            theirs = _accuracies(result, setting, method, length, m.STEPS)
            if len(theirs) == len(ours):
                ahead = paired(theirs, ours)
                fine = ahead.mean + ahead.half <= MARGIN
                words = (
                    f"{method} {{}} ahead by more than {MARGIN:g} points"
                    f" ({ahead.mean:+.2f} ± {ahead.ci95:.2f}, paired by seed)"
                )
                statements.append(
                    Statement(fine, words.format("is not"), words.format("may be"), "second order")
                )
    return Verdict.of(statements, _measured(result))


def _measured(result: Result[Config]) -> str:
    texts = []
    for setting, method, iterations in _runs(result):
        found = {
            k: _accuracies(result, setting, method, iterations, k)
            for k in (m.STEPS, max(result.config.adapt_steps))
        }
        each = ", ".join(
            f"{Mean.of(values).text(2)} with {k} steps" for k, values in found.items() if values
        )
        texts.append(f"{method}, {setting}, {iterations} meta-steps: {each or 'diverged'}")
    return sentence(*texts) if texts else ""


EXPERIMENT = Experiment(
    name="omniglot-long",
    title="Omniglot, trained longer",
    where="Table 2",
    claim=(
        "Longer training would bring more; FO-B-MAML matches or exceeds the second-order methods."
    ),
    config=Config,
    cells=cells,
    measure=measure,
    draw=draw,
    table=table,
    judge=judge,
    remember=remember,
    notes=(
        "As the experiment before, with a wider grid of learning rates, chosen on validation tasks"
        " by every method for itself, and the same meta-steps and seeds for all. ± is a 95 %"
        " confidence interval over the seeds (Student's t); differences are paired by seed, which"
        " fixes initial weights, training tasks and test tasks. Gradients a task are support and"
        " query gradients of one meta-step; second-order methods take Hessian products besides. The"
        " automatic ν looks at a few tasks again every 50 meta- steps, which is not counted there."
    ),
)
