"""An estimator at work on a batch of tasks: the mean meta-gradient."""

from __future__ import annotations

import warnings
from functools import partial

from metanudge.engines import Engine
from metanudge.engines.packed import zeros
from metanudge.engines.stacked import MetaStep, Recorder
from metanudge.estimators.base import Estimator
from metanudge.estimators.total import MetaGradient, Stats
from metanudge.params import Params, names_to_pack
from metanudge.problem import Problem
from metanudge.solvers import stability_advice
from metanudge.solvers.base import Solver
from metanudge.spread import whole
from metanudge.task import TaskBatch

_MANY = 10  # meta-steps


class DivergenceWarning(UserWarning):
    """The inner steps overshoot, so that the meta-gradient may mean nothing."""


class ZeroGradientWarning(UserWarning):
    """A meta-gradient is zero in all its entries: nothing is learned."""


class Watch:
    """Says once that inner steps diverge: tenfold in one meta-step, or twofold in many in a row;
    less may be dropout's noise. And once that a meta-gradient is zero.
    """

    def __init__(self) -> None:
        self._grew = 0
        self._warned = False
        self._warned_of_zero = False

    def see(self, stats: Stats, problem: Problem, solver: Solver) -> None:
        """Hear of one more meta-step."""
        if stats.gradient_norm == 0 and not self._warned_of_zero:
            self._warned_of_zero = True
            warnings.warn(
                "The meta-gradient is exactly zero in all entries, so that nothing is learned. The"
                " loss may not depend on the parameters that require grad (detached, computed under"
                " no_grad, or only frozen weights on the way), the loss may be at its floor, or"
                " quantised layers have repacked their weights for inference, which they do in"
                " evaluation mode under no_grad, and give no gradients any more: load it anew.",
                ZeroGradientWarning,
                stacklevel=3,
            )
        self._grew = self._grew + 1 if stats.residual > 2 * stats.residual_start else 0
        if self._warned or not (self._grew >= _MANY or stats.residual > 10 * stats.residual_start):
            return
        self._warned = True
        warnings.warn(
            f"The inner steps diverge: the residual grew from {stats.residual_start:.3g} to"
            f" {stats.residual:.3g}, so that adaptation makes the model worse and the meta-gradient"
            f" may mean nothing. To mend it, {advice_on(problem, solver)}. If the"
            " inputs are large numbers, standardise them.",
            DivergenceWarning,
            stacklevel=3,
        )


def check(
    problem: Problem, tasks: TaskBatch, *, solver: Solver, estimator: Estimator, engine: Engine
) -> None:
    """Raise where problem, tasks, solver, estimator and engine do not go together."""
    estimator.check(solver)
    check_learnable(estimator, problem)
    if engine.name not in estimator.engines:
        raise ValueError(
            f"{type(estimator).__name__} runs on {' and '.join(estimator.engines)}, not on"
            f" {engine.name}. "
            f'Use engine="{estimator.engines[0]}" or engine="auto", or an estimator that needs only'
            " loss.backward() "
            "(FOBMAML, FOMAML, Reptile)."
        )
    problem.check_tasks(tasks)


def check_learnable(estimator: Estimator, problem: Problem) -> None:
    """Raise where the estimator cannot learn all that this problem wants learned."""
    estimator.check_problem(problem)
    if problem.rates is not None and not estimator.learns_rates:
        raise ValueError(
            f"{type(estimator).__name__} has no gradient for the inner learning rates (learn_lr):"
            " they act through the steps, which only MAML differentiates. Use MAML(), first-order"
            ' in the model with MAML(products="difference"), or leave learn_lr out.'
        )


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
    recorder: Recorder | None = None,
) -> tuple[Params, Stats]:
    """The mean meta-gradient of a batch of tasks, and its statistics. Changes neither the model nor
    `.grad`.

    `first` is the place of the batch's first task in a larger meta-batch that is shared among
    machines: random draws that differ from task to task follow the place. A recorder may play a
    meta-step that repeats itself again.
    """
    check(problem, tasks, solver=solver, estimator=estimator, engine=engine)

    def compute(tasks: TaskBatch) -> MetaGradient:
        total = MetaGradient(
            problem, len(tasks), metrics=metrics, seed=seed, gradient=_zero(problem, engine)
        )
        with engine.session(
            problem, tasks, width=estimator.width, seed=seed, cost=total.cost, first=first
        ) as groups:
            for inner in groups:
                estimator.accumulate(inner, solver, total)
                total.paths[inner.path] = None
        total.seal()
        return total

    if recorder is None:
        total = compute(tasks)
    else:
        # metrics may be any code, also such that waits for the device
        plain = not (metrics and problem.metrics)
        repeats = estimator.repeats_itself and engine.name == "stacked" and plain
        step = MetaStep(problem, solver, estimator, engine, metrics, first, repeats)
        total = recorder.run(step, tasks, compute)
    stats = total.finish(engine.name, partial(advice_on, problem, solver))
    meta, found = problem.meta_parameters, total.gradient
    # what is packed is let go of when it is opened
    return {n: whole(found.pop(n), meta[n]) for n in list(found)}, stats


def _zero(problem: Problem, engine: Engine) -> Params:
    """A meta-gradient of zero; in place that of large 16-bit parameters is packed."""
    if engine.name == "inplace":
        names = names_to_pack({**problem.parameters, **problem.shared})
        if names:
            return zeros(problem.meta_parameters, names)
    return problem.zero_gradient()


def advice_on(problem: Problem, solver: Solver) -> str:
    """What to change where the inner steps diverge; waits for the device."""
    if problem.rates is not None:
        return "learn the inner rates more slowly, or start them at a smaller lr in the solver"
    return stability_advice(getattr(solver, "lr", None), problem.largest_lam)
