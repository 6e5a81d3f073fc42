"""Appendix A.2 on networks: λ × inner rate, chosen on validation tasks, and how curved the inner
problem is beside λ.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch import nn

import metanudge as mn
from metanudge.models import Conv1D
from metanudge.tasks import MNIST1D, Sinusoid
from metanudge.testing.curvature import curvature
from metanudge_lab import style
from metanudge_lab.experiments import fewshot
from metanudge_lab.experiments import methods as m
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
from metanudge_lab.experiments.spread import Mean, paired, short

MNIST, WAVES = "MNIST-1D", "sinusoids"
CURVED = 8  # tasks whose curvature is looked at
ROBUST = 0.02  # "robust": at most so much below the best λ, in accuracy or explained variance


@dataclass(frozen=True)
class Config(Settings):
    """Sizes of the measurement; minutes on a CPU. `wave_iterations` are those on sinusoids."""

    lams: tuple[float, ...] = (0.1, 0.5, 2.0, 8.0, 32.0)
    rates: tuple[float, ...] = (0.005, 0.02, 0.1, 0.5)
    data: tuple[str, ...] = (MNIST, WAVES)
    iterations: int = 40
    wave_iterations: int = 120
    meta_rate: float = 0.01
    tasks: int = 8
    val_tasks: int = 50
    test_tasks: int = 100
    seeds: int = 3

    @classmethod
    def quick(cls) -> Config:
        """Half a minute."""
        few = {"iterations": 10, "val_tasks": 20, "test_tasks": 20, "tasks": 4, "seeds": 1}
        return cls(lams=(0.5, 2.0, 8.0), rates=(0.02, 0.1), data=(MNIST,), **few)


def cells(config: Config) -> list[Cell]:
    """One for each seed, data set, λ and inner rate."""
    keys = itertools.product(range(config.seeds), config.data, config.lams, config.rates)
    return [{"data": data, "lam": lam, "inner": inner, "seed": s} for s, data, lam, inner in keys]


def measure(cell: Cell, config: Config, device: torch.device) -> list[Row]:
    """Accuracy (or explained variance) after training, and the curvature of the support losses at
    the trained θ.
    """
    seed, lam, inner = int(cell["seed"] or 0), float(cell["lam"] or 0), float(cell["inner"] or 0)
    trial = _trial(str(cell["data"]), lam, seed, device)
    last = config.iterations if cell["data"] == MNIST else config.wave_iterations
    recipe = fewshot.Recipe(inner, config.meta_rate, last, config.tasks)
    rows: list[Row] = []

    def see(iteration: int, learner: mn.MetaLearner) -> None:
        quality = fewshot.explained if trial.regression else fewshot.accuracies
        val = quality(learner, trial.source, "val", config.val_tasks)
        test = quality(learner, trial.source, "test", config.test_tasks)
        curved = curvature(learner, trial.source.batch(range(CURVED), "val"))
        rows.append({"val": float(val.mean()), "test": float(test.mean()), "curvature": curved})

    trial.train(recipe, at=(last,), see=see)
    return rows or [{"val": 0.0, "test": 0.0, "curvature": None}]


def _trial(data: str, lam: float, seed: int, device: torch.device) -> fewshot.Trial:
    if data == MNIST:
        source = MNIST1D(ways=3, shots=5, queries=10, seed=seed, device=device)
        model = m.seeded(seed, lambda: Conv1D(ways=3), device)
        return fewshot.Trial(model, mn.FOBMAML(nu=m.NU), source, lam=lam)
    waves = Sinusoid(shots=10, queries=10, seed=seed, device=device)
    model = m.seeded(seed, perceptron, device)
    return fewshot.Trial(model, mn.FOBMAML(nu=m.NU), waves, lam=lam, regression=True)


def perceptron() -> nn.Module:
    """Two hidden layers of 40, as for sinusoids in the MAML literature."""
    return nn.Sequential(
        nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1)
    )


def chosen(result: Result[Config], data: str, lam: float) -> float | None:
    """The inner rate with the best mean on validation tasks."""
    means = {
        rate: Mean.of(found).mean
        for rate, found in result.along(
            "val", "inner", result.config.rates, data=data, lam=lam
        ).items()
    }
    return max(means, key=lambda rate: means[rate]) if means else None


def reached(
    result: Result[Config], data: str, lam: float, inner: float | None = None
) -> list[float]:
    """On test tasks, seed by seed: with that inner rate, or with the chosen one."""
    rate = chosen(result, data, lam) if inner is None else inner
    return result.values("test", data=data, lam=lam, inner=rate)


def judge(result: Result[Config]) -> Verdict:
    """λ = 2 beside the best λ; α = 1/λ beside the best α; L̂₁ beside λ."""
    statements, told = [], []
    for data in result.config.data:
        means = {lam: Mean.of(reached(result, data, lam)) for lam in result.config.lams}
        best = max(means, key=lambda lam: means[lam].mean)
        behind = paired(*(reached(result, data, lam) for lam in (best, m.LAM)))
        apart = f" ({behind.mean:+.3f} ± {behind.ci95:.3f}, paired by seed)"
        words = (
            f"on {data} λ = {m.LAM:g} reaches {means[m.LAM].mean:.3f}, λ = {best:g}, the best of"
            f" the grid, {means[best].mean:.3f}{apart if best != m.LAM else ''}"
        )
        statements.append(Statement(behind.mean <= ROBUST, words, words, "robust"))
        told.append(
            f"{data}: {', '.join(f'{one.mean:.3f} (λ = {k:g})' for k, one in means.items())}"
        )
        statements += [_inverse(result, data), _convex(result, data)]
    return Verdict.of(statements, f"With the inner rate chosen on validation: {'; '.join(told)}.")


def _inverse(result: Result[Config], data: str) -> Statement:
    """Whether the rule's inner rate does as well as the chosen one, for every λ whose 1/λ lies
    within the grid.
    """
    rates = sorted(result.config.rates)
    worse, told = [], []
    for lam in result.config.lams:
        if rates[0] / 2 <= 1 / lam <= 2 * rates[-1]:
            rule = min(rates, key=lambda rate: abs(math.log(rate * lam)))
            mean, best = (Mean.of(reached(result, data, lam, r)).mean for r in (rule, None))
            told.append(
                f"λ = {lam:g}: {mean:.3f} at α = {rule:g}, {best:.3f} at"
                f" {chosen(result, data, lam):g}"
            )
            worse += [lam] if best - mean > ROBUST else []
    words = f"on {data} α ≈ 1/λ {{}} the chosen α ({'; '.join(told)})"
    return Statement(
        not worse, words.format("does as well as"), words.format("is behind"), "inverse rate"
    )


def _convex(result: Result[Config], data: str) -> Statement:
    """Whether λ exceeds the curvature of the support losses at the trained θ, for λ = 2."""
    ratios = ratio(result, data, m.LAM)
    words = (
        f"on {data} the support losses' largest curvature is {short(min(ratios))} to"
        f" {short(max(ratios))} times λ = {m.LAM:g} at the trained θ"
    )
    return Statement(max(ratios) < 1, words, words, "convex")


def ratio(result: Result[Config], data: str, lam: float) -> list[float]:
    """L̂/λ at the trained θ with the chosen inner rate."""
    found = result.values("curvature", data=data, lam=lam, inner=chosen(result, data, lam))
    return [math.inf if math.isnan(value) else value / lam for value in found]


def draw(result: Result[Config]) -> list[Drawing]:
    """Test quality over the grid."""
    known = result.distinct("data")
    figure, axes = style.figure(len(known), width=1.2 + 4.2 * len(known), height=3.9, squeeze=False)
    rates, lams = sorted(result.config.rates), sorted(result.config.lams)
    for one, data in zip(axes[0], known, strict=True):
        found = [[_mean(result, data, lam, rate) for lam in lams] for rate in rates]
        style.heat(one, found, low=0.0, high=1.0, dark=0.6)
        one.set_xticks(range(len(lams)), [f"{lam:g}" for lam in lams])
        one.set_yticks(range(len(rates)), [f"{rate:g}" for rate in rates])
        one.set(xlabel="λ", title=data)
    axes[0][0].set_ylabel("inner learning rate α")
    alt = "Test accuracy on MNIST-1D and explained variance on sinusoids over λ and inner rate."
    return [Drawing(figure, alt=alt)]


def _mean(result: Result[Config], data: str, lam: float, inner: float) -> float:
    found = reached(result, data, lam, inner)
    return Mean.of(found).mean if found else math.nan


def table(result: Result[Config]) -> ResultTable:
    """For every λ the chosen inner rate, what it reaches, and L̂/λ."""
    rows = []
    for data, lam in itertools.product(result.distinct("data"), result.config.lams):
        rate = chosen(result, data, lam)
        if rate is not None:
            found = Mean.of(reached(result, data, lam))
            edge = rate in (min(result.config.rates), max(result.config.rates))
            shown = Shown(rate, f"{rate:g}" + (" (edge)" if edge else ""))
            largest = Shown.short(max(ratio(result, data, lam)))
            rows.append((data, lam, shown, Shown.of(found, 3), largest))
    return ResultTable(
        ("data", "λ", "chosen inner rate", "on test tasks", "L̂₁ / λ (largest)"), rows
    )


EXPERIMENT = Experiment(
    name="lambda-networks",
    title="λ and the inner rate on networks",
    where="Appendix A.2, and after Assumption 4",
    claim=(
        "Start with λ ≈ 1/α, α the inner learning rate; λ = 2 is robust across benchmarks; λ > L̂₁"
        " makes the inner problem strongly convex."
    ),
    config=Config,
    cells=cells,
    measure=measure,
    draw=draw,
    table=table,
    judge=judge,
    notes=(
        "Symmetric FO-B-MAML with ν = 0.1 and K = 5, trained shortly on MNIST-1D (accuracy) and on"
        " sinusoids with a ReLU perceptron (share of the variance explained, 0 where training ended"
        " in NaN). For every λ the inner rate is chosen on validation tasks; “robust” and “as well"
        f" as” mean at most {ROBUST:g} behind on test tasks. L̂₁ is the largest curvature of the"
        f" support losses of {CURVED} validation tasks at the trained θ, by power iteration."
    ),
)
