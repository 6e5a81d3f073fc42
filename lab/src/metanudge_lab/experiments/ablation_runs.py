"""What the ablation trains: the data sets with their recipes, and the search for learning rates of
one's own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from metanudge.estimators import Estimator
from metanudge.models import MLP, Conv1D
from metanudge.tasks import MNIST1D, Sinusoid
from metanudge_lab.experiments import fewshot
from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.base import Result, Row
from metanudge_lab.experiments.omniglot_runs import (
    FIVE_WAY,
    TUNING_SEED,
    Sizes,
    make_recipe,
    make_trial,
)
from metanudge_lab.experiments.variants import SEARCH, Choice, choice_of, data_of

if TYPE_CHECKING:
    from metanudge_lab.experiments.ablation import Config

_known: dict[tuple[str, Choice, Config], dict[str, float]] = {}


def training(
    data: str, estimator: Estimator, seed: int, config: Config, device: torch.device
) -> tuple[fewshot.Trial, fewshot.Recipe]:
    """What is trained on one data set, and how."""
    if data == "omniglot":
        trial, _ = make_trial(FIVE_WAY[0], estimator, Sizes(), seed=seed, device=device)
        rates = config.omniglot_inner, config.omniglot_rate
        return trial, make_recipe(FIVE_WAY[0], *rates, config.omniglot_iterations, Sizes())
    if data == "mnist1d":
        model = m.seeded(seed, lambda: Conv1D(ways=3), device)
        rates = config.inner, config.rate
        recipe = fewshot.Recipe(*rates, config.iterations, config.tasks)
        return fewshot.Trial(model, estimator, mnist1d(seed, device)), recipe
    inner = config.overshoot if data == "overshoot" else config.sinusoid_inner
    model = m.seeded(seed, lambda: MLP(1, 1, hidden=(40, 40)), device)
    source = Sinusoid(shots=10, queries=10, seed=seed, device=device)
    recipe = fewshot.Recipe(inner, config.sinusoid_rate, config.sinusoid_iterations, 8)
    return fewshot.Trial(model, estimator, source, regression=True), recipe


def mnist1d(seed: int, device: torch.device) -> MNIST1D:
    """The tasks of the MNIST-1D experiment."""
    return MNIST1D(ways=3, shots=5, queries=10, seed=seed, device=device)


def scores(trial: fewshot.Trial, recipe: fewshot.Recipe, config: Config) -> Row:
    """Accuracy (of a regression, the share of the variance explained) with as many inner steps as
    in training and with more.
    """
    found = trial.scores(
        recipe, split="test", tasks=config.test_tasks, steps=(None, config.more_steps)
    )
    same, more = map(fewshot.summary, found)
    return {**same, **{f"{key}_more": value for key, value in more.items()}}


def search(data: str, choice: Choice, config: Config, device: torch.device) -> list[Row]:
    """The learning rates with the highest validation accuracy, as the last row; before it, what was
    tried.
    """
    trial, recipe = training(data, choice.estimator, TUNING_SEED, config, device)
    grid = [
        replace(recipe, inner=inner, rate=rate)
        for inner in config.own_inner_rates
        for rate in config.own_rates
    ]
    found = fewshot.best_recipe(
        trial, grid, config.own_rounds, keep=config.own_keep, tasks=config.test_tasks
    )
    _known[data, choice, config] = found.best.rates
    return [*found.rows("tried"), {"kind": "chosen", **found.best.rates}]


def own_recipe(
    data: str, choice: Choice, recipe: fewshot.Recipe, config: Config, device: torch.device
) -> fewshot.Recipe:
    """The recipe with the rates that this choice takes."""
    if (data, choice, config) not in _known:
        search(data, choice, config, device)
    rates = _known[data, choice, config]
    return replace(recipe, inner=rates["inner"], rate=rates["rate"])


def remember(result: Result[Config]) -> None:
    """Learning rates that were found before."""
    for row in result.rows(kind="chosen"):
        part = str(row["part"])
        assert part.endswith(SEARCH), part
        rates = {key: float(row[key]) for key in ("inner", "rate")}
        _known[data_of(part), choice_of(row), result.config] = rates
