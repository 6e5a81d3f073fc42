"""Solvers with learned rates in the place of their own: which take them, and how they solve."""

from __future__ import annotations

from metanudge.rates import LearnedRates, Rates
from metanudge.solvers.adjoint import LinearUpdate, Update
from metanudge.solvers.base import LinearSolver, Oracle, Solver
from metanudge.solvers.gradient_descent import GradientDescent
from metanudge.solvers.nesterov import Nesterov
from metanudge.solvers.optimizer_update import OptimizerUpdate, rule_of
from metanudge.solvers.torch_optimizer import TorchOptimizer


def own_rate(solver: Solver) -> float:
    """The learning rate of a solver whose rates can be learned; raises for others."""
    if not isinstance(solver, GradientDescent | Nesterov | TorchOptimizer):
        raise ValueError(
            f"learn_lr learns the rates of the inner steps, and {type(solver).__name__} has none of"
            " its own. Use GradientDescent, Nesterov, or TorchOptimizer with SGD, Adam or AdamW, or"
            " leave learn_lr out."
        )
    if solver.tol is not None:
        raise ValueError(
            f"learn_lr needs a fixed number of inner steps, but the solver has tol={solver.tol!r}."
            " Leave tol out."
        )
    if isinstance(solver, TorchOptimizer):
        lr = rule_of(solver).lr
    else:
        lr = solver.rate if isinstance(solver, GradientDescent) else solver.lr
    if not lr > 0:
        raise ValueError(
            f"learn_lr starts at the solver's lr, which is {lr!r}. Give it a positive one."
        )
    return lr


def update_of(solver: Solver, oracle: Oracle, learned: LearnedRates | None) -> Update:
    """The steps of a solver, with learned rates where there are some."""
    rates: Rates | None = None
    if learned is not None:
        own_rate(solver)
        rates = learned.now()
    if isinstance(solver, TorchOptimizer):
        return OptimizerUpdate(solver, rates)
    assert isinstance(solver, LinearSolver)
    return LinearUpdate(solver, oracle, rates)
