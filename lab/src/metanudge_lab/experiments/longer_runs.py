"""Adapting longer than trained: what is trained, with how many inner steps, and on what."""

from __future__ import annotations

import itertools
import random
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch

import metanudge as mn
from metanudge.estimators import Estimator
from metanudge.models import Conv1D
from metanudge.tasks import MNIST1D
from metanudge.training.device import computing_in
from metanudge_lab.experiments import fewshot
from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments import omniglot_runs as runs
from metanudge_lab.experiments.base import Row, Settings
from metanudge_lab.experiments.omniglot_runs import FIVE_WAY, SHIFTED, TUNING_SEED
from metanudge_lab.experiments.trajectories import trajectory

METHODS: dict[str, Estimator] = {
    name: runs.ESTIMATORS[name]
    for name in (m.LOSS, m.FO_MAML, m.MAML, m.GRADIENT, SHIFTED, m.DAMPED)
}
CORE = (m.LOSS, m.FO_MAML, m.MAML)  # without these there is no verdict; they are measured first
MOST = 16  # inner steps in training
LENGTHS: dict[str, int] = {"K = 5": 5, "K = 16": MOST, "random K": MOST // 2}  # validated with
PARTS = {"mnist1d": "MNIST-1D", "omniglot": "Omniglot, 5-way 1-shot"}


@dataclass(frozen=True)
class Config(Settings):
    """Sizes of the measurement. In full half an hour of a CPU core for MNIST-1D, and about as long
    on a GPU for Omniglot.

    Attributes:
        methods: those that are trained.
        adapt_steps: after how many steps of adaptation test tasks are looked at.
        curved_at: of these, where the curvature is measured too, on `curved_tasks` of them.
        slower: adaptation is also looked at with the inner learning rate times this.
        inner_rates, meta_rates, tuning, val_tasks: the grid, the same for every method and number
            of steps, and the meta-steps for each of its pairs.
        seeds, iterations, tasks, test_tasks: of training on MNIST-1D.
        omniglot_…: the same on Omniglot; `omniglot_seeds=0` leaves it out.
    """

    methods: tuple[str, ...] = tuple(METHODS)
    adapt_steps: tuple[int, ...] = (0, 1, 2, 3, 5, 8, 12, 16, 25, 35, 50)
    curved_at: tuple[int, ...] = (0, 5, 16, 50)
    curved_tasks: int = 4
    slower: float = 0.25
    inner_rates: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1, 0.3)
    meta_rates: tuple[float, ...] = (1e-2,)
    tuning: int = 30
    val_tasks: int = 50
    seeds: int = 3
    iterations: int = 200
    tasks: int = 4
    test_tasks: int = 100
    omniglot_inner_rates: tuple[float, ...] = (0.025, 0.05, 0.1)
    omniglot_meta_rates: tuple[float, ...] = (3e-3,)
    omniglot_tuning: int = 150
    omniglot_seeds: int = 2
    omniglot_iterations: int = 2000
    omniglot_tasks: int = 16
    omniglot_test_tasks: int = 500

    @classmethod
    def quick(cls) -> Config:
        """A minute or two: MNIST-1D alone."""
        return cls(
            methods=CORE,
            inner_rates=(0.1,),
            meta_rates=(1e-2,),
            seeds=2,
            iterations=60,
            omniglot_seeds=0,
        )

    @property
    def trained(self) -> dict[str, tuple[str, str]]:
        """What is trained by its name: a method, and with how many inner steps."""
        return {
            name_of(method, length): (method, length)
            for some in (CORE, [one for one in self.methods if one not in CORE])
            for length in LENGTHS
            for method in some
            if method in self.methods
        }


def name_of(method: str, length: str) -> str:
    """Such as "MAML, K = 5"."""
    return f"{method}, {length}"


def seeds_of(config: Config) -> dict[str, int]:
    """How many each part has."""
    return {"mnist1d": config.seeds, "omniglot": config.omniglot_seeds}


def make_trial(
    part: str, trained: str, config: Config, *, seed: int, device: torch.device
) -> fewshot.Trial:
    """What is trained."""
    method, length = config.trained[trained]
    if part == "mnist1d":
        source = MNIST1D(ways=3, shots=5, queries=10, seed=seed, device=device)
        model = m.seeded(seed, lambda: Conv1D(ways=3), device)
        trial = fewshot.Trial(model, METHODS[method], source)
    else:
        trial, _ = runs.make_trial(
            FIVE_WAY[0], METHODS[method], runs.Sizes(), seed=seed, device=device
        )
    trial.steps = LENGTHS[length]
    if length == "random K":
        trial.drawn = lambda step: drawn(seed, step)
    return trial


def drawn(seed: int, step: int) -> int:
    """The number of inner steps of a meta-step, uniform on 1 … 16.

    Example:
        >>> [drawn(0, step) for step in range(6)] == [drawn(0, step) for step in range(6)]
        True
        >>> {drawn(1, step) for step in range(400)} == set(range(1, 17))
        True
    """
    return random.Random(f"{seed} {step}").randint(1, MOST)


def search(part: str, trained: str, config: Config, device: torch.device) -> list[Row]:
    """The best pair of learning rates with the number of steps that it was trained with, as the
    last row; before it, what was tried.
    """
    small = part == "mnist1d"
    grid = itertools.product(
        config.inner_rates if small else config.omniglot_inner_rates,
        config.meta_rates if small else config.omniglot_meta_rates,
    )
    length = config.tuning if small else config.omniglot_tuning
    recipes = [recipe_of(part, *rates, length, config) for rates in grid]
    trial = make_trial(part, trained, config, seed=TUNING_SEED, device=device)
    with precision(part, device):
        found = fewshot.best_recipe(trial, recipes, (length,), keep=1, tasks=config.val_tasks)
    return [*found.rows("tried"), {"kind": "chosen", **found.best.rates}]


def train(
    part: str,
    trained: str,
    rates: tuple[float, float],
    seed: int,
    config: Config,
    device: torch.device,
) -> list[Row]:
    """Train, and adapt to test tasks step by step with the inner rate of training and with a
    smaller one.
    """
    small = part == "mnist1d"
    trial = make_trial(part, trained, config, seed=seed, device=device)
    last = config.iterations if small else config.omniglot_iterations
    count = config.test_tasks if small else config.omniglot_test_tasks
    about: Row = {"inner": rates[0], "rate": rates[1]}
    rows: list[Row] = []

    def see(step: int, learner: mn.MetaLearner) -> None:
        rows.append({"kind": "cost", "iterations": step, "seconds": trial.seconds})
        tasks = trial.source.batch(range(count), "test")
        look = partial(trajectory, learner, tasks, at=config.adapt_steps)
        test = look(rate=rates[0], curved_at=config.curved_at, few=config.curved_tasks)
        slower = look(rate=config.slower * rates[0])
        rows.extend({"kind": "test", **about, **row} for row in test)
        rows.extend({"kind": "slower", **about, **row} for row in slower)

    with precision(part, device):
        if not trial.train(recipe_of(part, *rates, last, config), at=(last,), see=see, rows=rows):
            rows.append({"kind": "diverged", **about})
    return rows


def recipe_of(
    part: str, inner: float, rate: float, iterations: int, config: Config
) -> fewshot.Recipe:
    """How to train."""
    tasks = config.tasks if part == "mnist1d" else config.omniglot_tasks
    return fewshot.Recipe(inner, rate, iterations, tasks, cosine=True)


def precision(part: str, device: torch.device) -> AbstractContextManager[None]:
    """TF32 on Omniglot, as in its own experiment."""
    return nullcontext() if part == "mnist1d" else computing_in("tf32", device)
