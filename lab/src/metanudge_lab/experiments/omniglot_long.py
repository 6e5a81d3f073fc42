"""Omniglot trained longer: all methods with the same steps and seeds, adapting with fewer and more
steps than in training; and what some ingredients bring.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch

import metanudge as mn
from metanudge.tasks.episodes import Split
from metanudge.training.device import computing_in
from metanudge_lab.device_memory import release
from metanudge_lab.experiments import fewshot, omniglot_recipes
from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.base import Cell, Experiment, Result, Row
from metanudge_lab.experiments.omniglot_long_figures import draw, table
from metanudge_lab.experiments.omniglot_long_plan import (
    ESTIMATORS,
    RECIPE_METHOD,
    RECIPE_SEEDS,
    Config,
)
from metanudge_lab.experiments.omniglot_long_verdict import enough, judge
from metanudge_lab.experiments.omniglot_recipes import RECIPES
from metanudge_lab.experiments.omniglot_runs import make_recipe, make_trial, search, watched


def cells(config: Config) -> list[Cell]:
    """The search for learning rates of each setting and method, the training runs, the recipes."""
    pairs = dict.fromkeys(
        [(setting, method) for setting, methods, _, _ in config.plan for method in methods]
        + [(setting, RECIPE_METHOD) for setting, _, _ in config.recipes]
    )
    searches: list[Cell] = [
        {"part": "rates", "setting": setting, "method": method} for setting, method in pairs
    ]
    trainings: list[Cell] = [
        {
            "part": "training",
            "setting": setting,
            "method": method,
            "iterations": iterations,
            "seed": seed,
        }
        for setting, methods, iterations, seeds in config.plan
        for method in methods
        for seed in range(seeds)
    ]
    recipes: list[Cell] = [
        {
            "part": "recipe",
            "setting": setting,
            "recipe": recipe,
            "iterations": iterations,
            "seed": seed,
        }
        for setting, recipe, iterations in config.recipes
        for seed in range(min(RECIPE_SEEDS, config.seeds))
    ]
    return [*searches, *trainings, *recipes]


def measure(cell: Cell, config: Config, device: torch.device) -> list[Row]:
    """Find the learning rates on validation tasks; or train, and test on the way and at the end."""
    setting, method = str(cell["setting"]), str(cell.get("method", RECIPE_METHOD))
    seed, last = int(cell.get("seed") or 0), int(cell.get("iterations") or 0)
    release(device)
    with computing_in("tf32", device):
        if cell["part"] == "rates" or (setting, method, config) not in _known:
            found = _search(setting, method, config, device)
            if cell["part"] == "rates":
                return found
        best = replace(_known[setting, method, config], iterations=last)
        if cell["part"] == "recipe":
            used = RECIPES[str(cell["recipe"])]
            trial, data = omniglot_recipes.make_trial(
                setting, used, ESTIMATORS[method], config, seed=seed, device=device
            )
        else:
            trial, data = make_trial(setting, ESTIMATORS[method], config, seed=seed, device=device)
        return _trained(trial, best, data, config)


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


def _trained(trial: fewshot.Trial, best: fewshot.Recipe, data: str, config: Config) -> list[Row]:
    """Accuracy along the training, and at its end with fewer and more steps."""
    last = best.iterations
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

    if not trial.train(best, at=watched(last), see=see, rows=rows):
        rows.append({"kind": "diverged", **about})
    return rows


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
    enough=enough,
    notes=(
        "As the experiment before, with a wider grid of learning rates, chosen on validation"
        " tasks by every method for itself, and the same meta-steps and seeds for all. ± is a 95"
        " % confidence interval over the seeds (Student's t); differences are paired by seed,"
        " which fixes initial weights, training tasks and test tasks. Gradients a task are"
        " support and query gradients of one meta-step; second-order methods take Hessian"
        " products besides. The automatic ν looks at a few tasks again every 50 meta-steps,"
        " which is not counted there. Recipes are ours: MAML with one ingredient, or all of"
        " them, with the learning rates that were found without: an inner rate for each tensor"
        " and step that is learned; a head made from the support set (Proto-MAML); training"
        " images shifted by up to two pixels; three times as many meta-steps, the cosine as"
        " long. Aims (99.5 and 99.9 % 5-way, 97.5 and 99.3 % 20-way, 1 and 5 shots) are ours"
        " too."
    ),
)
