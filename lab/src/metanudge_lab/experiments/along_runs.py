"""Real networks along their training: the exact meta-gradients at some points, and what estimates
make of them there.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor, nn

import metanudge as mn
from metanudge.estimators import Estimator
from metanudge.models import Conv1D, Conv4
from metanudge.tasks import MNIST1D
from metanudge.testing.problems import vector
from metanudge_lab.experiments import fewshot
from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments import omniglot_runs as omniglot
from metanudge_lab.experiments import transformer_runs as transformer
from metanudge_lab.experiments.base import Row, Settings
from metanudge_lab.experiments.network_errors import TARGETS, Exact, compared

METHODS: dict[str, Estimator] = {
    **transformer.METHODS,
    m.LOSS: m.ESTIMATORS[m.LOSS],
    m.GRADIENT: m.ESTIMATORS[m.GRADIENT],
}
NETWORKS = {
    "mnist1d": "MNIST-1D, ReLU and max-pooling",
    "smooth": "MNIST-1D, GELU and average pooling",
    "conv4": "Conv4 on Omniglot",
    "transformer": "a small GPT on Markov chains",
}
CORE = ("mnist1d", "smooth")  # without these there is no verdict; the others can wait for a GPU
KINKED = ("mnist1d", "conv4")  # ReLU and max-pooling


@dataclass(frozen=True)
class Config(Settings):
    """Sizes of the measurement. In full some minutes of a CPU core.

    Attributes:
        points: meta-steps after which gradients are compared.
        networks: those that are trained.
        seeds, tasks, quality_tasks: of training, and where gradients are compared.
        reach: steps of L-BFGS with which the inner optimum is looked for.
        channels, queries: of Conv4, and of its tasks.
        width, length: of the GPT, and of its sequences.
        glyphs: take invented characters where Omniglot is not at hand.
    """

    networks: tuple[str, ...] = tuple(NETWORKS)
    points: tuple[int, ...] = (0, 30, 100)
    seeds: int = 3
    tasks: int = 4
    quality_tasks: int = 2
    reach: int = 400
    channels: int = 32
    queries: int = 5
    width: int = 32
    length: int = 16
    glyphs: bool = False

    @classmethod
    def quick(cls) -> Config:
        """A minute or so."""
        return cls(
            networks=("mnist1d", "smooth"),
            points=(0, 40),
            seeds=2,
            reach=200,
            glyphs=True,
        )


@dataclass(frozen=True)
class Point:
    """A place along a training.

    Attributes:
        step: meta-steps done.
        trial: with the weights of that moment.
        implicit, adaptation: the exact meta-gradients.
        about: what stands in every row.
    """

    step: int
    trial: fewshot.Trial
    implicit: Tensor
    adaptation: Tensor
    about: Row


@lru_cache(maxsize=1)
def course(
    network: str, seed: int, config: Config, device: torch.device
) -> tuple[float, list[Point]]:
    """Training by the exact gradient of the K steps, which favours no estimate: the inner rate, and
    the points.
    """
    trial, recipe = _training(network, seed, config, device)
    tasks = trial.source.batch(range(config.quality_tasks), "val")
    points: list[Point] = []

    def see(step: int, learner: mn.MetaLearner) -> None:
        here = replace(trial, model=copy.deepcopy(learner.model))
        exact = Exact(
            here.model,
            tasks,
            steps=trial.steps,
            optimum=mn.LBFGS(steps=config.reach),
            rate=recipe.inner,
            lam=trial.lam,
        )
        about = {"residual": exact.residual, "growth": exact.growth}
        points.append(Point(step, here, exact.implicit, exact.adaptation, about))

    trial.train(recipe, at=config.points, see=see)
    return recipe.inner, points


def qualities(
    network: str, method: str, seed: int, config: Config, device: torch.device
) -> list[Row]:
    """A row for every point: relative error and cosine of an estimate in float32 against both exact
    gradients, which are in float64; NaN where it is not finite.
    """
    inner, points = course(network, seed, config, device)
    rows: list[Row] = []
    for point in points:
        tasks = point.trial.source.batch(range(config.quality_tasks), "val")
        row: Row = {"iteration": point.step, **point.about}
        try:
            found, _, nu = point.trial.gradient(inner, METHODS[method], tasks)
        except mn.NonFiniteError:
            keys = (f"{kind}_{key}" for kind in ("error", "cosine") for key in TARGETS)
            rows.append({**row, "nu": None, **dict.fromkeys(keys, math.nan)})
            continue
        estimate = vector(found).double()
        rows.append({**row, "nu": nu, **compared(estimate, point.implicit, point.adaptation)})
    return rows


def _training(
    network: str, seed: int, config: Config, device: torch.device
) -> tuple[fewshot.Trial, fewshot.Recipe]:
    """What is trained, and how."""
    last, tasks = max(config.points), config.tasks
    if network == "transformer":
        sizes = transformer.Config(
            symbols=16, length=config.length, sequences=4, width=config.width, heads=2
        )
        trial = transformer.make_trial(m.MAML, sizes, seed=seed, device=device)
        return trial, fewshot.Recipe(0.3, 3e-3, last, tasks, cosine=True)
    if network == "conv4":
        ways, shots = 5, 1
        source, _ = omniglot.tasks_of(
            ways, shots, config.queries, glyphs=config.glyphs, seed=seed, device=device
        )
        model: nn.Module = m.seeded(
            seed, lambda: Conv4(ways=ways, channels=config.channels), device
        )
        trial = fewshot.Trial(model, mn.MAML(), source)
        return trial, fewshot.Recipe(0.05, 3e-3, last, tasks, cosine=True)
    source = MNIST1D(ways=3, shots=5, queries=10, seed=seed, device=device)
    model = m.seeded(seed, lambda: Conv1D(ways=3), device)
    if network == "smooth":
        _smooth(model)
    recipe = fewshot.Recipe(0.1, 1e-2, last, tasks, cosine=True)
    return fewshot.Trial(model, mn.MAML(), source), recipe


def _smooth(model: nn.Module) -> None:
    """GELU and average pooling in the place of what has kinks."""
    for parent in [*model.modules()]:
        for name, layer in [*parent.named_children()]:
            if isinstance(layer, nn.ReLU):
                setattr(parent, name, nn.GELU())
            elif isinstance(layer, nn.MaxPool1d):
                setattr(parent, name, nn.AvgPool1d(2))
