"""What the rows of MNIST-1D say."""

from __future__ import annotations

from typing import Any

from metanudge.estimators import Estimator
from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.base import Result
from metanudge_lab.experiments.equal_cost import common_budget, passes, within
from metanudge_lab.experiments.spread import Mean

METHODS: dict[str, Estimator] = {**m.ESTIMATORS, m.DAMPED: m.DAMPED_IMAML}
CHANCE = 1 / 3


def curve(result: Result[Any], method: str) -> dict[int, Mean]:
    """Mean accuracy over the seeds with its interval at every iteration; chance where training
    diverged.
    """
    by_seed = curves(result, method).values()
    at = sorted({k for one in by_seed for k in one})
    return {k: Mean.of([one[k] for one in by_seed if k in one]) for k in at}


def curves(result: Result[Any], method: str) -> dict[int, dict[int, float]]:
    """The same, seed by seed."""
    found: dict[int, dict[int, float]] = {}
    for row in result.rows(kind="curve", method=method):
        value = row["accuracy"]
        found.setdefault(row["seed"], {})[row["iteration"]] = CHANCE if value is None else value
    return found


def at_equal_cost(result: Result[Any]) -> tuple[int, dict[str, tuple[int, Mean]]]:
    """What FO-MAML spends in all its iterations, and how far every method gets with it: the
    iteration, and the accuracy there.
    """
    means = {method: curve(result, method) for method in METHODS}
    each = {method: passes(METHODS[method], m.STEPS) for method in means}
    budget = common_budget({m.FO_MAML: each[m.FO_MAML]}, max(result.config.at))
    found = {}
    for method, one in means.items():
        at = within({k: k for k in one}, each[method], budget)
        if at is not None:
            found[method] = at, one[at]
    return budget, found


def last_before(result: Result[Any], iteration: int) -> int:
    """The last iteration up to some at which accuracy was measured."""
    return max(k for k in result.config.at if k <= iteration)
