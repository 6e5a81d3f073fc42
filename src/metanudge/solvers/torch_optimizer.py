"""Any optimizer of torch.optim as inner solver, unchanged."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from metanudge.params import Params
from metanudge.solvers.base import Oracle, Solution, Trace, check_solver_options, solve_rows

OptimizerFactory = Callable[..., torch.optim.Optimizer]


@dataclass(frozen=True)
class TorchOptimizer:
    """The inner problem solved by a `torch.optim` class (or any callable `params -> Optimizer`).

    Args:
        optimizer: e.g. `torch.optim.Adam`.
        steps: number of `optimizer.step()` calls.
        options: keyword arguments for the optimizer, e.g. `{"lr": 1e-2}`.
        tol: stop a task early once ‖∇g‖ is at most this.
        batch_size: support examples per step, as in `GradientDescent`.

    The optimizer's parameters are the displacements d = φ − θ, so its own `weight_decay` pulls
    towards θ, as λ does. Every task and every nudge gets a fresh optimizer. Optimizers that need a
    closure (L-BFGS) get one.

    Cost: `steps` gradients; the optimizer's state comes on top of the memory.

    Example:
        >>> TorchOptimizer(torch.optim.SGD, steps=5, options={"lr": 0.1, "momentum": 0.9}).steps
        5
    """

    optimizer: OptimizerFactory
    steps: int
    options: Mapping[str, Any] = field(default_factory=dict)
    tol: float | None = None
    batch_size: int | None = None

    def __post_init__(self) -> None:
        check_solver_options(self.steps, self.tol, self.batch_size)
        if not callable(self.optimizer):
            raise TypeError(
                f"optimizer must be a class such as torch.optim.Adam, got {self.optimizer!r}. Pass"
                " the class and its options, not an instance: TorchOptimizer(torch.optim.Adam,"
                " steps=5, options={'lr': 1e-2})."
            )
        if "differentiable" in self.options:
            raise ValueError(
                "TorchOptimizer updates in place; take 'differentiable' out of its options."
            )
        try:  # a wrong option should fail here, not in the middle of training
            self._probe()
        except (TypeError, ValueError) as error:
            name = getattr(self.optimizer, "__name__", repr(self.optimizer))
            raise ValueError(
                f"{name} does not accept the options {dict(self.options)!r}: {error}. Check"
                " its documentation for the names."
            ) from error

    @property
    def lr(self) -> float | None:
        """The optimizer's own learning rate, where it has one."""
        group = self._probe().param_groups[0]
        return float(group["lr"]) if "lr" in group else None

    def build(self, tensors: list[Tensor]) -> torch.optim.Optimizer:
        """A fresh optimizer for these tensors."""
        return self.optimizer(tensors, **self.options)

    def solve(self, oracle: Oracle, start: Params | None = None) -> Solution:
        """Minimise from `start` (default: d = 0)."""
        closure = inspect.signature(type(self._probe()).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            return solve_rows(self._solve_with_closure, oracle, start)
        return self._solve(oracle, oracle.zeros() if start is None else start)

    def _probe(self) -> torch.optim.Optimizer:
        return self.build([torch.zeros(1, 1)])

    def _solve(self, oracle: Oracle, d: Params) -> Solution:
        # One optimizer per row, each on views of the stacked tensors: right also for optimizers
        # that are not elementwise.
        views = [[leaf[row].detach() for leaf in d.values()] for row in range(oracle.rows)]
        optimizers = [self.build(tensors) for tensors in views]
        trace = Trace(oracle)
        steps = torch.zeros(oracle.rows, dtype=torch.long)
        for step in range(self.steps):
            loss, g = oracle.gradient(d, step, self.batch_size)
            residual = trace.record(loss, g)
            active = [True] * oracle.rows if self.tol is None else (residual > self.tol).tolist()
            if not any(active):
                break
            for row in (r for r in range(oracle.rows) if active[r]):
                for tensor, leaf in zip(views[row], g.values(), strict=True):
                    tensor.grad = leaf[row]
                optimizers[row].step()
                optimizers[row].zero_grad(set_to_none=True)
                steps[row] += 1
            del g
        return trace.solution(d, steps.to(next(iter(d.values())).device))

    def _solve_with_closure(self, oracle: Oracle, d: Params) -> Solution:
        views = [leaf[0].detach() for leaf in d.values()]
        optimizer = self.build(views)
        trace = Trace(oracle)
        taken = 0
        for step in range(self.steps):

            def closure(step: int = step) -> Tensor:
                loss, g = oracle.gradient(d, step, self.batch_size)
                trace.record(loss, g)
                for tensor, leaf in zip(views, g.values(), strict=True):
                    tensor.grad = leaf[0]
                return oracle.objective(loss, d)[0]

            if self.tol is not None and taken and float(trace.last_residual) <= self.tol:
                break
            optimizer.step(closure)  # type: ignore[arg-type]
            taken += 1
        # A line search may have looked at other points last: what is reported must belong to the
        # point that is returned.
        trace.record(*oracle.gradient(d, taken - 1, self.batch_size))
        iterations = optimizer.state[views[0]].get("n_iter", taken)
        return trace.solution(d, iterations)
