"""Training on Omniglot: where the tasks come from, what is trained, and when it is tested."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import metanudge as mn
from metanudge.estimators import Estimator
from metanudge.models import Conv4
from metanudge.tasks import Episodes, Omniglot
from metanudge.training.errors import UserError
from metanudge_lab.experiments import fewshot
from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.glyphs import glyph_tasks

MORE_STEPS = 16  # with which the published iMAML adapts
SHIFTED = f"{m.GRADIENT}, shifted start, ν = 0.5"
LONG_METHODS = (m.LOSS, SHIFTED)
ESTIMATORS: dict[str, Estimator] = {
    **m.ESTIMATORS,
    m.DAMPED: m.DAMPED_IMAML,
    SHIFTED: mn.FOBMAML(nu=0.5, nudge="gradient", start="shifted"),
}

FIVE_WAY, TWENTY_WAY = ("5-way 1-shot", "5-way 5-shot"), ("20-way 1-shot", "20-way 5-shot")
TUNING_SEED = 1000


def watched(iterations: int) -> list[int]:
    """After which meta-steps a run is tested.

    Example:
        >>> watched(2000)
        [125, 250, 500, 1000, 1500, 2000]
    """
    return sorted(
        {max(1, round(iterations * share)) for share in (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)}
    )


@dataclass(frozen=True)
class Sizes:
    """What all measurements on Omniglot set.

    Attributes:
        meta_rates: of the grid of learning rates, the same for every method.
        tuning: meta-steps per pair of the grid; the best of a round go on to the next.
        tasks, many_way_tasks: per meta-step.
        glyphs: take invented characters where Omniglot is not at hand.
    """

    meta_rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    tuning: tuple[int, ...] = (150, 1000)
    tasks: int = 32
    many_way_tasks: int = 16
    queries: int = 15
    channels: int = 64
    val_tasks: int = 200
    watch_tasks: int = 500
    test_tasks: int = 2000
    glyphs: bool = False


# A narrow network and one pair of learning rates, on invented characters where there are no others.
QUICK: Any = {
    "inner_rates": (0.1,),
    "meta_rates": (1e-2,),
    "tasks": 4,
    "queries": 5,
    "channels": 16,
    "watch_tasks": 50,
    "glyphs": True,
}


def make_recipe(
    setting: str, inner: float, rate: float, iterations: int, sizes: Sizes
) -> fewshot.Recipe:
    """Training with these learning rates."""
    tasks = sizes.many_way_tasks if setting in TWENTY_WAY else sizes.tasks
    return fewshot.Recipe(inner, rate, iterations, tasks, cosine=True)


def make_trial(
    setting: str, estimator: Estimator, sizes: Sizes, *, seed: int, device: torch.device
) -> tuple[fewshot.Trial, str]:
    """What is trained in a setting such as "5-way 1-shot", and the name of its data."""
    ways, shots = settings_of(setting)
    source, name = tasks_of(
        ways, shots, sizes.queries, glyphs=sizes.glyphs, seed=seed, device=device
    )
    model = m.seeded(seed, lambda: Conv4(ways=ways, channels=sizes.channels), device)
    return fewshot.Trial(model, estimator, source), name


def settings_of(setting: str) -> tuple[int, int]:
    """Ways and shots.

    Example:
        >>> settings_of("20-way 5-shot")
        (20, 5)
    """
    ways, shots = map(int, re.findall(r"\d+", setting))
    return ways, shots


def tasks_of(
    ways: int, shots: int, queries: int, *, glyphs: bool, seed: int, device: torch.device
) -> tuple[Episodes, str]:
    """Omniglot from a folder or the cache, or invented characters where they are allowed in its
    place.
    """
    try:
        return (
            Omniglot(
                ways, shots, queries, seed=seed, split_by="random", download=False, device=device
            ),
            "Omniglot",
        )
    except FileNotFoundError as error:
        if glyphs:
            return (
                glyph_tasks(ways, shots, queries, seed=seed, device=device),
                "invented characters",
            )
        raise UserError(
            f"{error} `metanudge data omniglot` fetches it; METANUDGE_DATA names a folder that"
            " has it."
        ) from error


def search(
    setting: str,
    estimator: Estimator,
    sizes: Sizes,
    *,
    inner_rates: Sequence[float],
    keep: int,
    device: torch.device,
) -> fewshot.Search:
    """The best pair of learning rates of a grid, on a model and a stream of tasks of its own; the
    same for all seeds.
    """
    trial, _ = make_trial(setting, estimator, sizes, seed=TUNING_SEED, device=device)
    recipes = [
        make_recipe(setting, inner, rate, sizes.tuning[-1], sizes)
        for inner, rate in itertools.product(inner_rates, sizes.meta_rates)
    ]
    return fewshot.best_recipe(trial, recipes, sizes.tuning, keep=keep, tasks=sizes.val_tasks)
