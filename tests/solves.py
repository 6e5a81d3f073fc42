"""Inner problems solved outside a learner: what the tests of the solvers share."""

from __future__ import annotations

import torch

import metanudge as mn
from metanudge.engines import Cost, InplaceEngine, StackedEngine
from metanudge.objective import Objective
from metanudge.problem import Problem
from metanudge.solvers import Solution, Solver
from metanudge.solvers.base import join
from problems import Setup, logistic_regression

ENGINES = {"stacked": StackedEngine(), "inplace": InplaceEngine()}


def solve(
    setup: Setup, solver: Solver, *, lam: float, engine: str = "stacked", seed: int = 0
) -> Solution:
    """The un-nudged inner problem of every task, in order."""
    problem = Problem(Objective(setup.model, setup.loss), lam)
    with ENGINES[engine].session(problem, setup.tasks, width=1, seed=seed, cost=Cost()) as groups:
        return join([inner.solve(solver) for inner in groups])


def one_by_one(setup: Setup, solver: Solver, *, lam: float) -> Solution:
    return join(
        [
            solve(setup._replace(tasks=mn.TaskBatch.of(task)), solver, lam=lam)
            for task in setup.tasks
        ]
    )


def uneven() -> Setup:
    """Logistic regression on tasks whose inputs differ in size, so that some are solved much sooner
    than others.
    """
    setup = logistic_regression(tasks=4)
    (x, y), query = setup.tasks.stacks[0].support, setup.tasks.stacks[0].query
    scale = torch.tensor([0.02, 0.3, 1.0, 2.0], dtype=torch.float64)[:, None, None]
    return setup._replace(tasks=mn.TaskBatch(support=(x * scale, y), query=query))
