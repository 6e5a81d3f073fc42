"""An estimator at work on a batch of tasks: the mean meta-gradient."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial

import torch

from metanudge.engines import Cost, Engine
from metanudge.engines.capture import Captures
from metanudge.estimators.base import Estimator
from metanudge.estimators.total import MetaGradient, Stats
from metanudge.params import Params
from metanudge.problem import Problem
from metanudge.proximal import Diagonal
from metanudge.solvers import stability_advice
from metanudge.solvers.base import LinearSolver, Solver
from metanudge.task import TaskBatch


class DivergenceWarning(UserWarning):
    """The inner steps overshoot, so that the meta-gradient may mean nothing."""


def check(
    problem: Problem, tasks: TaskBatch, *, solver: Solver, estimator: Estimator, engine: Engine
) -> None:
    """Raise where problem, tasks, solver, estimator and engine do not go together."""
    estimator.check(solver)
    estimator.check_problem(problem)
    if engine.name not in estimator.engines:
        raise ValueError(
            f"{type(estimator).__name__} runs on {' and '.join(estimator.engines)}, not on"
            f" {engine.name}. "
            f'Use engine="{estimator.engines[0]}" or engine="auto", or an estimator that needs only'
            " loss.backward() "
            "(FOBMAML, FOMAML, Reptile)."
        )
    problem.check_tasks(tasks)


def meta_gradient(
    problem: Problem,
    tasks: TaskBatch,
    *,
    solver: Solver,
    estimator: Estimator,
    engine: Engine,
    seed: int = 0,
    metrics: bool = True,
    first: int = 0,
    captures: Captures | None = None,
) -> tuple[Params, Stats]:
    """The mean meta-gradient of a batch of tasks, and its statistics. Changes neither the model nor
    `.grad`.

    `first` is the place of the batch's first task in a larger meta-batch that is shared among
    machines: random draws that differ from task to task follow the place. With `captures` a
    meta-step that repeats itself on a CUDA device is recorded and replayed.
    """
    check(problem, tasks, solver=solver, estimator=estimator, engine=engine)
    cost = Cost()

    def compute(tasks: TaskBatch) -> tuple[MetaGradient, Cost]:
        nonlocal cost
        cost = Cost()
        total = MetaGradient(problem, len(tasks), metrics=metrics, seed=seed)
        with engine.session(
            problem, tasks, width=estimator.width, seed=seed, cost=cost, first=first
        ) as groups:
            for inner in groups:
                estimator.accumulate(inner, solver, total)
        total.seal(flat=recorded)
        return total, cost

    recorded = captures is not None and _repeats_itself(problem, solver, estimator, engine)
    if captures is not None and recorded:
        key = (
            _addresses(problem),
            _shapes(tasks),
            solver,
            estimator,
            engine,
            metrics,
            first,
            _precision(problem.device),
        )
        total, cost = captures.run(key, tasks, compute, drew=lambda: cost.drew)
        gradient = total.copy()  # asked for before `finish` waits for the device
        return gradient, total.finish(cost, engine.name, partial(advice_on, problem, solver))
    total, cost = compute(tasks)
    return total.gradient, total.finish(cost, engine.name, partial(advice_on, problem, solver))


def advice_on(problem: Problem, solver: Solver) -> str:
    """What to change where the inner steps diverge; waits for the device."""
    lam = (
        max(float(leaf.max()) for leaf in problem.lam.values())
        if isinstance(problem.proximal, Diagonal)
        else None
    )
    return stability_advice(getattr(solver, "lr", None), lam)


def _repeats_itself(problem: Problem, solver: Solver, estimator: Estimator, engine: Engine) -> bool:
    """Whether every meta-step launches the same kernels and never waits for the device."""
    steady = isinstance(solver, LinearSolver) and solver.tol is None and solver.batch_size is None
    # an operator or a regulariser may do anything
    steady = steady and isinstance(problem.proximal, Diagonal)
    return (
        steady
        and problem.device.type == "cuda"
        and engine.name == "stacked"
        and estimator.repeats_itself
    )


def _addresses(problem: Problem) -> Hashable:
    """Where the meta-parameters and buffers lie (the stiffness belongs to the problem), and the
    modes of the model's parts.
    """
    parameters = [leaf.data_ptr() for leaf in problem.meta_parameters.values()]
    buffers = [
        leaf.data_ptr()
        for module in problem.modules
        for leaf in module._buffers.values()
        if leaf is not None
    ]
    return problem, *parameters, *buffers, *[module.training for module in problem.modules]


def _shapes(tasks: TaskBatch) -> Hashable:
    return tuple((stack.places, stack.signature) for stack in tasks.stacks)


def _precision(device: torch.device) -> Hashable:
    autocast = (
        torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    )
    return autocast, torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
