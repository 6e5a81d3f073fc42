"""Table 2: accuracy on Omniglot."""

from __future__ import annotations

import functools
import itertools
import math
import time
from dataclasses import dataclass
from typing import Any

import torch

import metanudge as mn
from metanudge.estimators import Estimator
from metanudge.training.precision import computing_in
from metanudge_lab import style
from metanudge_lab.experiments import fewshot
from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.base import (
    Cell,
    Drawing,
    Experiment,
    Result,
    Row,
    Settings,
    Shown,
    Table,
    Verdict,
)
from metanudge_lab.experiments.omniglot_runs import (
    FIVE_WAY,
    TWENTY_WAY,
    Sizes,
    make_recipe,
    make_trial,
    watched,
)
from metanudge_lab.experiments.spread import Mean, paired

MORE_STEPS = 16  # with which the published iMAML adapts
SHIFTED = f"{m.GRADIENT}, shifted start, ν = 0.5"
LONG_METHODS = (m.LOSS, SHIFTED)
ESTIMATORS: dict[str, Estimator] = {
    **m.ESTIMATORS,
    m.DAMPED: m.DAMPED_IMAML,
    SHIFTED: mn.FOBMAML(nu=0.5, nudge="gradient", start="shifted"),
}

# In percent, as in the paper's Table 2; 20-way as in Table 2 of Rajeswaran et al. 2019, from which
# the paper takes most of its rows.
PUBLISHED: dict[str, dict[str, tuple[float, float]]] = {
    m.LOSS: dict(zip(FIVE_WAY, ((99.24, 0.29), (99.70, 0.17)), strict=True)),
    m.MAML: dict(
        zip(
            (*FIVE_WAY, *TWENTY_WAY),
            ((98.7, 0.4), (99.9, 0.1), (95.8, 0.3), (98.9, 0.2)),
            strict=True,
        )
    ),
    m.FO_MAML: dict(
        zip(
            (*FIVE_WAY, *TWENTY_WAY),
            ((98.3, 0.5), (99.2, 0.2), (89.4, 0.5), (97.9, 0.1)),
            strict=True,
        )
    ),
    m.REPTILE: dict(
        zip(
            (*FIVE_WAY, *TWENTY_WAY),
            ((97.68, 0.04), (99.48, 0.06), (89.43, 0.14), (97.12, 0.32)),
            strict=True,
        )
    ),
    m.IMAML: dict(
        zip(
            (*FIVE_WAY, *TWENTY_WAY),
            ((99.16, 0.35), (99.67, 0.12), (94.46, 0.42), (98.69, 0.1)),
            strict=True,
        )
    ),
}


@dataclass(frozen=True)
class Config(Sizes, Settings):
    """Sizes of the measurement. In full nearly an hour on a GPU.

    Attributes:
        settings, extra_settings: those of the paper, and those it leaves out.
        methods, second_order, once: of the comparison; the latter two in the paper's settings only,
            the last with one seed.
        iterations: meta-steps of the comparison.
        long: meta-steps of the longer runs of FO-B-MAML, or 0.
        longest: those of one run still longer, with the variant that learns fastest, in each
            setting.
        seeds, second_order_seeds, long_seeds, extra_seeds: how many runs.
        inner_rates: of the grid of learning rates.
        tuning_keep: how many pairs of the grid go on to the next round.
    """

    settings: tuple[str, ...] = FIVE_WAY
    extra_settings: tuple[str, ...] = TWENTY_WAY
    methods: tuple[str, ...] = (m.LOSS, m.GRADIENT, SHIFTED, m.FO_MAML, m.REPTILE)
    second_order: tuple[str, ...] = (m.MAML, m.DAMPED)
    once: tuple[str, ...] = (m.IMAML,)
    iterations: int = 2000
    long: int = 12000
    longest: tuple[int, ...] = (40000, 20000)
    seeds: int = 5
    second_order_seeds: int = 5
    long_seeds: int = 1
    extra_seeds: int = 1
    inner_rates: tuple[float, ...] = (0.05, 0.1)
    tuning_keep: int = 2

    @classmethod
    def quick(cls) -> Config:
        """Two or three minutes; a narrow network, one seed, one pair of learning rates."""
        few = {
            "seeds": 1,
            "second_order_seeds": 1,
            "tasks": 4,
            "queries": 5,
            "channels": 16,
            "watch_tasks": 50,
            "test_tasks": 200,
        }
        methods = tuple(method for method in cls.methods if method != SHIFTED)
        rates = {"inner_rates": (0.1,), "meta_rates": (1e-2,)}
        options: dict[str, Any] = {
            **few,
            **rates,
            "methods": methods,
            "extra_settings": (),
            "iterations": 60,
            "long": 0,
            "longest": (),
            "glyphs": True,
        }
        return cls(settings=FIVE_WAY[:1], **options)


def cells(config: Config) -> list[Cell]:
    """One for each setting, method, length of training and seed, the most telling first."""

    def runs(
        settings: tuple[str, ...], methods: tuple[str, ...], iterations: int, seeds: int
    ) -> list[Cell]:
        keys = ("setting", "method", "iterations", "seed")
        return [
            dict(zip(keys, (s, method, iterations, k), strict=True))
            for s in settings
            for method in methods
            for k in range(seeds)
        ]

    longer = (
        runs(config.settings, LONG_METHODS, config.long, config.long_seeds) if config.long else []
    )
    pairs = zip(config.settings, config.longest, strict=False)
    longest = [
        cell
        for setting, iterations in pairs
        for cell in runs((setting,), (SHIFTED,), iterations, 1)
    ]
    return [
        *runs(config.settings, config.methods, config.iterations, config.seeds),
        *longer,
        *longest,
        *runs(config.settings, config.second_order, config.iterations, config.second_order_seeds),
        *runs(config.settings, config.once, config.iterations, 1),
        *runs(config.extra_settings, config.methods, config.iterations, config.extra_seeds),
    ]


def measure(cell: Cell, config: Config, device: torch.device) -> list[Row]:
    """Find the rates on validation tasks, train, and test on the way and at the end."""
    setting, method, seed = str(cell["setting"]), str(cell["method"]), int(cell["seed"] or 0)
    last = int(cell["iterations"] or 0)
    fewshot.release(device)
    with computing_in("tf32", device):
        best, tried, scores = tuned(setting, method, config, device)
        rows: list[Row] = [
            {
                "kind": "tuning",
                "inner": one.inner,
                "rate": one.rate,
                "iteration": one.iterations,
                "accuracy": score,
            }
            for one, score in zip(tried, scores, strict=True)
        ]
        trial, data = make_trial(setting, ESTIMATORS[method], config, seed=seed, device=device)
        recipe = make_recipe(setting, best.inner, best.rate, last, config)
        begin, testing = time.perf_counter(), 0.0

        def see(iteration: int, learner: mn.MetaLearner) -> None:
            nonlocal testing
            now = time.perf_counter()
            count = config.test_tasks if iteration == last else config.watch_tasks
            about = {
                "iteration": iteration,
                "tasks": count,
                "seconds": now - begin - testing,
                **recipe_of(best),
                "data": data,
            }
            rows.append(
                {
                    "kind": "test",
                    **about,
                    **fewshot.summary(fewshot.accuracies(learner, trial.source, "test", count)),
                }
            )
            if iteration == last:
                more = fewshot.accuracies(learner, trial.source, "test", count, steps=MORE_STEPS)
                rows.append({"kind": "more steps", **about, **fewshot.summary(more)})
            testing += time.perf_counter() - now

        if not trial.train(recipe, at=watched(last), see=see):
            none = {"accuracy": None, "ci95": None, "tasks": 0, "seconds": None}
            rows.append(
                {"kind": "test", "iteration": last, **none, **recipe_of(best), "data": data}
            )
    return rows


# the best, and all that were tried with their accuracies
Tuned = tuple[fewshot.Recipe, list[fewshot.Recipe], list[float]]
_known: dict[tuple[str, str, Config], Tuned] = {}


def remember(result: Result[Config]) -> None:
    """Learning rates that were found for other seeds, or other numbers of meta-steps."""
    config = result.config
    for one in result.measured:
        setting, method = str(one.cell["setting"]), str(one.cell["method"])

        def recipe(row: Row, iterations: Any, setting: str = setting) -> fewshot.Recipe:
            return make_recipe(
                setting, float(row["inner"] or 0), float(row["rate"] or 0), int(iterations), config
            )

        tried = [row for row in one.rows if row["kind"] == "tuning"]
        best = recipe(next(row for row in one.rows if row["kind"] == "test"), config.tuning[-1])
        _known[setting, method, config] = (
            best,
            [recipe(row, row["iteration"]) for row in tried],
            [row["accuracy"] for row in tried],
        )


@functools.cache
def tuned(setting: str, method: str, config: Config, device: torch.device) -> Tuned:
    """The best pair of learning rates for a setting and method, on a model and a stream of tasks of
    its own; the same for all seeds.
    """
    if (setting, method, config) in _known:
        return _known[setting, method, config]
    trial, _ = make_trial(setting, ESTIMATORS[method], config, seed=1000, device=device)
    grid = itertools.product(config.inner_rates, config.meta_rates)
    recipes = [make_recipe(setting, inner, rate, config.tuning[-1], config) for inner, rate in grid]
    return fewshot.best_recipe(
        trial, recipes, config.tuning, keep=config.tuning_keep, tasks=config.val_tasks
    )


def recipe_of(best: fewshot.Recipe) -> dict[str, float]:
    """Its learning rates, as they stand in a row."""
    return {"inner": best.inner, "rate": best.rate}


def final(
    result: Result[Config], setting: str, method: str, iterations: int, kind: str = "test"
) -> Mean | None:
    """Accuracy at the end in percent: mean over the seeds with its interval, that over the tasks
    where there is one seed.
    """
    where = {
        "kind": kind,
        "setting": setting,
        "method": method,
        "iterations": iterations,
        "iteration": iterations,
    }
    values = [100 * value for value in result.values("accuracy", **where)]
    if not values:
        return None
    return (
        Mean.of(values)
        if len(values) > 1
        else Mean(values[0], 100 * result.values("ci95", **where)[0])
    )


def paired_by_seed(
    result: Result[Config], setting: str, one: str, other: str, iterations: int
) -> Mean:
    """By how many points one method is ahead of another at the end, with the seeds that both have:
    they fix weights and tasks.
    """
    where = {"kind": "test", "setting": setting, "iterations": iterations, "iteration": iterations}
    ones, others = (
        {row["seed"]: row["accuracy"] for row in result.rows(method=method, **where)}
        for method in (one, other)
    )
    seeds = [
        seed
        for seed, accuracy in ones.items()
        if accuracy is not None and others.get(seed) is not None
    ]
    return paired([100 * ones[seed] for seed in seeds], [100 * others[seed] for seed in seeds])


def lengths(result: Result[Config], setting: str, method: str) -> list[int]:
    """Meta-steps of the runs there are, the shortest first."""
    return sorted(
        {
            int(row["iterations"] or 0)
            for row in result.rows(kind="test", setting=setting, method=method)
        }
    )


def longest(result: Result[Config], setting: str, method: str) -> Mean | None:
    """The result of the longest runs there are."""
    found = [
        final(result, setting, method, length)
        for length in reversed(lengths(result, setting, method))
    ]
    return next((one for one in found if one is not None), None)


def draw(result: Result[Config]) -> list[Drawing]:
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
                    look = style.line(method)
                    look |= (
                        {
                            "linestyle": (0, (1, 1)),
                            "fillstyle": "none",
                            "markeredgecolor": look["color"],
                        }
                        if method == SHIFTED
                        else {}
                    )
                    thin = (
                        {"linewidth": 1.0, "markersize": 3, "label": None}
                        if length != result.config.iterations
                        else {}
                    )
                    one.plot(at, errors, **{**look, **thin})
        if setting in PUBLISHED[m.LOSS] and one.get_ylim()[0] < 10:
            mean, ci = PUBLISHED[m.LOSS][setting]
            one.axhspan(
                100 - mean - ci,
                100 - mean + ci,
                color=style.METHODS[m.LOSS]["color"],
                alpha=0.12,
                linewidth=0,
            )
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


def table(result: Result[Config]) -> Table:
    """Accuracy at the end beside the published one."""
    rows = []
    for setting in result.distinct("setting"):
        for method in ESTIMATORS:
            for length in lengths(result, setting, method):
                found = final(result, setting, method, length)
                if found is not None:
                    where = {
                        "kind": "test",
                        "setting": setting,
                        "method": method,
                        "iterations": length,
                        "iteration": length,
                    }
                    used, times = result.rows(**where)[0], result.values("seconds", **where)
                    rates = f"{used['inner']:g}, {used['rate']:g}"
                    minutes = Shown(
                        sum(times) / len(times) / 60, f"{sum(times) / len(times) / 60:.2g}"
                    )
                    more = final(result, setting, method, length, kind="more steps")
                    shown = (Shown.of(found, 2), None if more is None else Shown.of(more, 2))
                    rows.append(
                        (
                            setting,
                            method,
                            length,
                            *shown,
                            len(times),
                            minutes,
                            rates,
                            _published(method, setting),
                        )
                    )
    accuracy = ("accuracy, %", f"with {MORE_STEPS} steps, %")
    return Table(
        (
            "setting",
            "method",
            "meta-steps",
            *accuracy,
            "seeds",
            "minutes",
            "inner, meta-rate",
            "published, %",
        ),
        rows,
    )


def judge(result: Result[Config]) -> Verdict:
    """The claim's parts: the published accuracy, iMAML's (published and our own), and more with
    longer training.
    """
    wrong, parts = [], 0
    for setting in result.config.settings:
        ours = longest(result, setting, m.LOSS)
        assert ours is not None
        mean, ci = PUBLISHED[m.LOSS][setting]
        parts += 1
        if not ours.mean + _half(ours) >= mean - ci:
            wrong.append(f"{setting}: {ours.text(2)} %, where {mean:g} ± {ci:g} is published")
        parts += 1
        imaml, imaml_ci = PUBLISHED[m.IMAML][setting]
        if not ours.mean + _half(ours) >= imaml - imaml_ci:
            wrong.append(
                f"{setting}: {ours.text(2)} %, where {imaml:g} ± {imaml_ci:g} is published for"
                " iMAML"
            )
        last = result.config.iterations
        same = final(result, setting, m.LOSS, last)
        rivals = {method: final(result, setting, method, last) for method in (m.IMAML, m.DAMPED)}
        found = {method: one for method, one in rivals.items() if one is not None}
        if found and same is not None:
            parts += 1
            best = max(found, key=lambda method: found[method].mean)
            ahead = paired_by_seed(result, setting, best, m.LOSS, last)
            if ahead.mean - _half(ahead) > 0:
                more = [
                    final(result, setting, method, last, kind="more steps")
                    for method in (m.LOSS, best)
                ]
                both = " against ".join(one.text(2) for one in more if one is not None)
                apart = (
                    f"{ahead.mean:.2f}"
                    if math.isnan(ahead.ci95)
                    else f"{ahead.mean:.2f} ± {ahead.ci95:.2f}"
                )
                means = (
                    f"{same.text(2)} against {found[best].text(2)} %, {apart} points apart, paired"
                    " by seed"
                )
                text = f"{setting}: below our iMAML with as many meta-steps ({means})"
                wrong.append(
                    f"{text}; where adaptation takes {MORE_STEPS} steps instead of {m.STEPS},"
                    f" {both} %"
                    if both
                    else text
                )
        if result.config.long:
            parts += 1
            if same is not None and not ours.mean > same.mean:
                wrong.append(
                    f"{setting}: longer training does not help ({same.text(2)}, then"
                    f" {ours.text(2)} %)"
                )
    measured = _measured(result)
    if not wrong:
        return Verdict(
            "reproduced",
            measured,
            "The published accuracies are met, iMAML's and that of our own too, and longer training"
            " helps, in all settings.",
        )
    return Verdict(
        "partly" if len(wrong) < parts else "not",
        measured,
        f"{'; '.join(wrong)}. {explanation(result)}",
    )


def explanation(result: Result[Config]) -> str:
    """What would bring more: the last half of the meta-steps, longer runs, more steps of
    adaptation.
    """
    texts = []
    for setting in result.config.settings:
        last = result.config.iterations
        methods = (*result.config.methods, *result.config.second_order, *result.config.once)
        gains = [_gain(result, setting, method, last) for method in methods]
        known = [gain for gain in gains if gain == gain]
        if known:
            texts.append(
                f"{setting}: between {last // 2} and {last} meta-steps all methods gained"
                f" {min(known):+.1f} to {max(known):+.1f} points"
            )
        for method in LONG_METHODS:
            longer = lengths(result, setting, method)
            for one, two in itertools.pairwise(longer):
                short, long = (
                    final(result, setting, method, one),
                    final(result, setting, method, two),
                )
                if short is not None and long is not None:
                    texts.append(
                        f"{method} gained {long.mean - short.mean:+.2f} from {one} to {two}"
                    )
        more = {
            method: final(result, setting, method, last, kind="more steps") for method in ESTIMATORS
        }
        kept = ", ".join(
            f"{method} {found.mean:.1f}" for method, found in more.items() if found is not None
        )
        if kept:
            texts.append(
                f"trained with {last} meta-steps and adapting with {MORE_STEPS} steps instead of"
                f" {m.STEPS}: {kept}"
            )
    data = result.rows(kind="test")[0]["data"]
    small = f" The data are {data}." if data != "Omniglot" else ""
    return f"{'; '.join(texts)}.{small} The published runs of MAML have 60,000 meta-steps."


def _gain(result: Result[Config], setting: str, method: str, last: int) -> float:
    where = {"kind": "test", "setting": setting, "method": method, "iterations": last}
    before, after = (
        result.values("accuracy", iteration=k, **where) for k in (max(1, last // 2), last)
    )
    return (
        100 * (sum(after) / len(after) - sum(before) / len(before))
        if before and after
        else math.nan
    )


def _measured(result: Result[Config]) -> str:
    texts = []
    for setting in result.distinct("setting"):
        length = result.config.iterations
        found = {method: final(result, setting, method, length) for method in ESTIMATORS}
        each = ", ".join(
            f"{method} {one.text(2)}" for method, one in found.items() if one is not None
        )
        texts.append(f"{setting} after {length} meta-steps: {each}")
        for longer in sorted(
            {
                count
                for method in LONG_METHODS
                for count in lengths(result, setting, method)
                if count > length
            }
        ):
            ends = {method: final(result, setting, method, longer) for method in LONG_METHODS}
            more = ", ".join(
                f"{method} {one.text(2)}" for method, one in ends.items() if one is not None
            )
            texts += [f"after {longer}: {more}"] if more else []
    return "; ".join(texts) + " (percent)."


def _curve(
    result: Result[Config], setting: str, method: str, length: int
) -> tuple[list[int], list[float]]:
    where = {"kind": "test", "setting": setting, "method": method, "iterations": length}
    found = [
        (k, result.values("accuracy", iteration=k, **where))
        for k in (watched(length) if length else [])
    ]
    means = [(k, sum(values) / len(values)) for k, values in found if values]
    return [k for k, _ in means], [100 * (1 - mean) for _, mean in means]


def _half(found: Mean) -> float:
    return 0.0 if math.isnan(found.ci95) else found.ci95


def _published(method: str, setting: str) -> Shown | None:
    known = PUBLISHED.get(method, {}).get(setting)
    return None if known is None else Shown(known[0], f"{known[0]:g} ± {known[1]:g}")


def _alt(result: Result[Config]) -> str:
    return (
        f"Errors on Omniglot test tasks against meta-steps, both logarithmic. {_measured(result)}"
    )


EXPERIMENT = Experiment(
    name="omniglot",
    title="Omniglot",
    where="Table 2",
    claim=(
        "With 5 inner steps FO-B-MAML reaches 99.24 ± 0.29 % in 5-way 1-shot and 99.70 ± 0.17 % in"
        " 5-way 5-shot classification, matching or exceeding iMAML with gradient descent, which"
        " takes 16; longer training would bring more."
    ),
    config=Config,
    cells=cells,
    measure=measure,
    draw=draw,
    table=table,
    judge=judge,
    remember=remember,
    notes=(
        "Conv4 with 64 filters and BatchNorm, 15 queries a class, λ = 2, ν = 0.1, K = 5, Adam, as"
        " in the paper; 32 tasks a meta-step (16 in 20-way) and a cosine schedule are ours. The"
        " paper searches the meta-learning rate; it does not give the inner one, so every method"
        " chooses both on validation tasks from the same small grid. Characters are split at random"
        " as in the MAML literature (1100 train, 100 validation, 423 test), each turned by 90°,"
        " 180° and 270° as further classes. Accuracy is with the batch statistics of the query set,"
        " as in that literature. ± is a 95 % confidence interval over the seeds, or over the test"
        " tasks where there is one seed. Minutes are the clock's: runs that share a GPU take longer"
        " (in the project's own results all but the longest ones do, up to 14 at a time). Published"
        " numbers are those in the paper's table, for 20-way those of Rajeswaran et al. 2019 (Table"
        " 2), and for iMAML those with gradient descent; its Hessian-free variant is published with"
        " 99.50 ± 0.26 and 99.74 ± 0.11. Our baselines have the same K, λ and budget as FO-B-MAML,"
        " which their published runs had not: iMAML took 16 inner steps and was damped in the code"
        " that was released (its linear system has ∇²f̂ + λ + 22 there, here where it says so),"
        " Reptile adapted to ten examples a class in training; here it sees the support sets alone."
        " Thin lines are the longer runs, the band is FO-B-MAML as published."
    ),
)
