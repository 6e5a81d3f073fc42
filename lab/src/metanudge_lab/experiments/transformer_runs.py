"""Training the Transformer: sizes, estimators, the search for meta-learning rates, and what a run
leaves behind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

import metanudge as mn
from metanudge.estimators import Estimator
from metanudge.evaluation import ci95
from metanudge.tuning import NuTuner
from metanudge_lab.experiments import fewshot
from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.base import Row, Settings
from metanudge_lab.experiments.omniglot_runs import TUNING_SEED, watched
from metanudge_lab.experiments.transformer_tasks import GPT, MarkovChains

DIFFERENCE = "MAML by differences"
AUTOMATIC = "FO-B-MAML, automatic ν"
SHIFTED = "FO-B-MAML gradient nudge, shifted start, ν = 0.1"
TANGENT = "FO-B-MAML tangent of the gradient nudge, shifted start"
METHODS: dict[str, Estimator] = {
    DIFFERENCE: mn.MAML(products="difference"),
    m.MAML: mn.MAML(),
    m.FO_MAML: mn.FOMAML(),
    AUTOMATIC: mn.FOBMAML(),
    SHIFTED: mn.FOBMAML(nu=0.1, nudge="gradient", start="shifted"),
    TANGENT: mn.FOBMAML(stencil="tangent", nudge="gradient", start="shifted"),
    m.IMAML: m.ESTIMATORS[m.IMAML],
    m.DAMPED: m.DAMPED_IMAML,
    m.REPTILE: m.ESTIMATORS[m.REPTILE],
}
# The tangent is the limit of the shifted gradient nudge, by second derivatives: compared only.
TRAINED = tuple(name for name in METHODS if name != TANGENT)


@dataclass(frozen=True)
class Config(Settings):
    """Sizes of the measurement. In full about twenty minutes on a GPU.

    Attributes:
        inner_rates: learning rates of the inner steps.
        methods: those that are trained; gradients are compared of all.
        meta_rates: the grid of every method at every inner rate.
        tuning: meta-steps for each of the grid, with one seed of its own.
        iterations: meta-steps of a training.
        points: meta-steps at which gradients are compared, along the training by differences.
        tasks: per meta-step; `quality_tasks` where gradients are compared.
        symbols, length, sequences: of the tasks.
        width, layers, heads: of the network.
        save_every: meta-steps between checkpoints.
    """

    inner_rates: tuple[float, ...] = (0.1, 0.3, 1.0)
    meta_rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3, 1e-2)
    tuning: int = 200
    iterations: int = 1000
    points: tuple[int, ...] = (0, 100, 300, 1000)
    seeds: int = 5
    methods: tuple[str, ...] = TRAINED
    tasks: int = 16
    quality_tasks: int = 16
    val_tasks: int = 200
    test_tasks: int = 400
    lam: float = 0.5
    steps: int = 5
    symbols: int = 32
    length: int = 32
    sequences: int = 8
    width: int = 64
    layers: int = 2
    heads: int = 4
    save_every: int = 100

    @classmethod
    def quick(cls) -> Config:
        """Two minutes or so: a narrow network, short sequences, two seeds."""
        return cls(
            meta_rates=(3e-3,),
            iterations=40,
            points=(0, 40),
            seeds=2,
            methods=(DIFFERENCE, m.MAML, m.FO_MAML, AUTOMATIC),
            tasks=4,
            quality_tasks=4,
            test_tasks=40,
            symbols=16,
            length=8,
            sequences=4,
            width=16,
            layers=1,
            heads=2,
        )


def make_trial(method: str, config: Config, *, seed: int, device: torch.device) -> fewshot.Trial:
    """What is trained: the seed is that of the weights and of the tasks."""
    source = MarkovChains(
        symbols=config.symbols,
        length=config.length,
        sequences=config.sequences,
        seed=seed,
        device=device,
    )
    model = m.seeded(
        seed,
        lambda: GPT(
            symbols=config.symbols,
            length=config.length,
            width=config.width,
            layers=config.layers,
            heads=config.heads,
        ),
        device,
    )
    return fewshot.Trial(model, METHODS[method], source, lam=config.lam, steps=config.steps)


def course_of(inner: float, rate: float, iterations: int, config: Config) -> fewshot.Recipe:
    """How to train."""
    return fewshot.Recipe(
        inner, rate, iterations, config.tasks, cosine=True, save_every=config.save_every
    )


def search(method: str, inner: float, config: Config, device: torch.device) -> list[Row]:
    """The meta-learning rate with the least loss on validation tasks after a short training, as the
    last row; before it, what was tried.
    """
    if len(config.meta_rates) == 1:
        return [{"kind": "chosen", "rate": config.meta_rates[0]}]
    trial = make_trial(method, config, seed=TUNING_SEED, device=device)
    tried: dict[float, float] = {}
    for rate in config.meta_rates:
        learner = trial.learner(inner)
        learner.tuner = NuTuner()  # or it would remember the ν of the training before
        fine = trial.train(course_of(inner, rate, config.tuning, config))
        batch = trial.source.batch(range(config.val_tasks), "val")
        tried[rate] = learner.evaluate(batch).mean_loss if fine else math.nan
    finite = {rate: loss for rate, loss in tried.items() if math.isfinite(loss)}
    best = min(finite, key=lambda rate: finite[rate], default=config.meta_rates[0])
    rows: list[Row] = [{"kind": "tried", "rate": r, "loss": loss} for r, loss in tried.items()]
    return [*rows, {"kind": "chosen", "rate": best}]


def train(
    method: str,
    recipe: tuple[float, float],
    seed: int,
    config: Config,
    device: torch.device,
    *,
    at: Collection[int] = (),
    see: Callable[[int, fewshot.Trial, float], list[Row]] | None = None,
) -> list[Row]:
    """Loss on test tasks along a training, with what was spent until then; last a row that says so
    where a gradient was not finite.

    Args:
        method: the estimator.
        recipe: inner and meta-learning rate.
        at: meta-steps at which `see` is called; its rows are added.
        see: gets the meta-step, what is trained and the inner rate.
    """
    inner, rate = recipe
    trial = make_trial(method, config, seed=seed, device=device)
    test = trial.source.batch(range(config.test_tasks), "test")
    watch, rows = watched(config.iterations), list[Row]()
    each = trial.cost(inner) * config.tasks

    def look(step: int, learner: mn.MetaLearner) -> None:
        if step in watch:
            loss = learner.evaluate(test).loss
            rows.append(
                {
                    "kind": "curve",
                    "method": method,
                    "rate": rate,
                    "iteration": step,
                    "gradients": step * each + learner.tuner.gradients,
                    "seconds": trial.seconds,
                    "loss": float(loss.mean()),
                    "ci95": ci95(loss),
                }
            )
        if see is not None and step in at:
            rows.extend(see(step, trial, inner))

    course = course_of(inner, rate, config.iterations, config)
    if not trial.train(course, at={*watch, *at}, see=look, rows=rows):
        rows.append({"kind": "diverged", "method": method, "rate": rate})
    return rows
