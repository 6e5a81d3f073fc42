"""The contract of an estimator, and what it adds up: a meta-gradient and the statistics of how it was made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from metanudge.engines import Cost, Engine, Inner, Measured
from metanudge.params import Params
from metanudge.problem import Problem
from metanudge.solvers.base import Solution, Solver
from metanudge.task import TaskBatch


class Estimator(Protocol):
    """How to differentiate: turns solves of the inner problem into a meta-gradient."""

    @property
    def engines(self) -> tuple[str, ...]:
        """Names of the engines it runs on."""

    @property
    def width(self) -> int:
        """How many inner problems of one task it solves side by side where the engine can."""

    def check(self, solver: Solver) -> None:
        """Raise where the estimator cannot work with this solver."""

    def accumulate(self, inner: Inner, solver: Solver, total: MetaGradient) -> None:
        """Add the meta-gradient of a group of tasks to `total`, divided by the number of tasks of the whole batch."""


class NonFiniteError(FloatingPointError):
    """An inner solve produced NaN or Inf; nothing has reached `.grad`."""


@dataclass(frozen=True)
class Stats:
    """What one meta-gradient cost and how good it is, averaged over the tasks.

    Attributes:
        query_loss_before, query_accuracy_before: on the query set at θ.
        query_loss, query_accuracy: after adaptation (for symmetric loss nudges: the mean over the nudged solutions, which differs
            from the un-nudged one by O(ν²)). Accuracy is NaN where the task is no classification.
        residual_start, residual: ‖∇g‖ of the inner problem at the first and the last gradient evaluation.
        delta: estimated precision δ of the inner solutions.
        nu: nudge used; None for estimators without one.
        error: estimated error of the finite difference from unconverged solves, ‖λδ/ν‖ summed over the stencil, relative to the
            meta-gradient's norm; None for estimators without a difference.
        gradient_norm: norm of the meta-gradient.
        support_gradients, query_gradients, hessian_products: evaluations per task.
        tasks: number of tasks.
        engine: where it ran.
    """

    query_loss_before: float
    query_accuracy_before: float
    query_loss: float
    query_accuracy: float
    residual_start: float
    residual: float
    delta: float
    nu: float | None
    error: float | None
    gradient_norm: float
    support_gradients: float
    query_gradients: float
    hessian_products: float
    tasks: int
    engine: str

    @property
    def diverged(self) -> bool:
        """Whether the inner residual grew: the inner learning rate is too large for the curvature met."""
        return self.residual > self.residual_start

    def __str__(self) -> str:
        parts = [f"query loss {self.query_loss_before:.4g} → {self.query_loss:.4g}"]
        if not math.isnan(self.query_accuracy):
            parts.append(f"accuracy {self.query_accuracy_before:.1%} → {self.query_accuracy:.1%}")
        parts.append(f"inner residual {self.residual_start:.3g} → {self.residual:.3g}")
        if self.diverged:
            parts[-1] += " (grew: try a smaller lr or a larger lam)"
        if self.nu is not None:
            parts.append(f"ν {self.nu:g}")
        parts.append(f"|meta-gradient| {self.gradient_norm:.3g}, {self.tasks} tasks, {self.engine}")
        return ", ".join(parts)


@dataclass(frozen=True)
class _Check:
    """Values that must be finite, `(steps, rows)`; outside the inner steps there is one step."""

    places: tuple[int, ...]
    quantity: str
    values: Tensor
    in_steps: bool

    @property
    def first_bad(self) -> tuple[int, int]:
        step, row = torch.nonzero(~torch.isfinite(self.values))[0].tolist()
        return step, row


class MetaGradient:
    """A meta-gradient being summed up over groups of tasks, with what is known about the solves."""

    def __init__(self, problem: Problem, num_tasks: int, *, metrics: bool) -> None:
        dtypes = problem.theta_dtypes
        self.gradient: Params = {n: torch.zeros_like(p, dtype=dtypes[n]) for n, p in problem.parameters.items()}
        self.num_tasks = num_tasks
        self.metrics = metrics
        self.nu: float | None = None
        self._sums: dict[str, Tensor] = {}
        self._checks: list[_Check] = []

    def add(self, rows: Params, weights: float | list[float], scale: Mapping[str, Tensor] | None = None) -> None:
        """gradient += scale ⊙ Σ_r w_r rows_r / num_tasks; one weight for all rows or one per nudge (rows are nudge by nudge)."""
        with torch.no_grad():
            for name, leaf in rows.items():
                target = self.gradient[name]
                if leaf.shape[0] == 1:  # the in-place engine: no temporary of the size of the model
                    weight = weights if isinstance(weights, (int, float)) else weights[0]
                    _add_scaled(target, leaf[0], weight / self.num_tasks, None if scale is None else scale[name])
                    continue
                if isinstance(weights, (int, float)):
                    combined, weight = leaf.sum(0), weights
                else:
                    by_nudge = leaf.unflatten(0, (len(weights), -1)).sum(1)
                    combined, weight = torch.tensordot(leaf.new_tensor(weights), by_nudge, dims=1), 1.0
                _add_scaled(target, combined, weight / self.num_tasks, None if scale is None else scale[name])

    def check(self, places: tuple[int, ...], quantity: str, values: Tensor) -> None:
        """Remember values that must be finite: `(steps, rows)`, or `(rows,)` for something outside the inner steps."""
        self._checks.append(_Check(places, quantity, values if values.ndim == 2 else values.unsqueeze(0), values.ndim == 2))

    def record(self, inner: Inner, solution: Solution, *, share: float = 1.0) -> None:
        """Note a solve's residuals; `share` is its weight where one task is solved several times."""
        self.check(inner.places, "support loss" if self.nu is None else "nudged loss", solution.losses)
        self.check(inner.places, "gradient", solution.residuals)
        nudges = solution.residual.shape[0] // inner.tasks
        self._mean("residual_start", solution.residuals[0], share / nudges)
        self._mean("residual", solution.residual, share / nudges)
        self._mean("delta", solution.delta, share / nudges)

    def record_error(self, solution: Solution, weights: list[float], stiffness: float) -> None:
        """Note the part of the difference's error that unconverged solves may cause: Σ_j |c_j| λ δ_j."""
        by_nudge = solution.delta.unflatten(0, (len(weights), -1)).sum(1)
        bound = stiffness * (by_nudge * by_nudge.new_tensor([abs(w) for w in weights])).sum()
        self._mean("error", bound.reshape(1), 1.0)

    def record_query(self, before: Measured | None, after: Measured | None, *, tasks: int, share: float = 1.0) -> None:
        """Note query loss and accuracy before and after adaptation."""
        for measured, suffix in ((before, "_before"), (after, "")):
            if measured is not None:
                weight = share * tasks / measured.loss.shape[0]
                self._mean("query_loss" + suffix, measured.loss, weight)
                self._mean("query_accuracy" + suffix, measured.accuracy, weight)

    def finish(self, cost: Cost, engine: str) -> Stats:
        """Check that everything was finite, in one go, and sum the statistics up."""
        self._raise_where_not_finite()
        norms = torch.stack([torch.linalg.vector_norm(g) for g in self.gradient.values()])
        self._sums["gradient_norm"] = torch.linalg.vector_norm(norms).double()
        keys = list(self._sums)
        values = dict(zip(keys, torch.stack([self._sums[k] for k in keys]).tolist(), strict=True))
        norm = values["gradient_norm"]
        if not math.isfinite(norm):
            raise NonFiniteError(
                "The meta-gradient is not finite although every inner solve was; the nudge or the query loss overflowed. "
                "Use a smaller lr, a larger lam or a larger nu. Nothing was written to .grad."
            )
        error = values["error"] / norm if "error" in values and norm > 0 else None
        nan = math.nan
        return Stats(
            query_loss_before=values.get("query_loss_before", nan),
            query_accuracy_before=values.get("query_accuracy_before", nan),
            query_loss=values.get("query_loss", nan),
            query_accuracy=values.get("query_accuracy", nan),
            residual_start=values.get("residual_start", nan),
            residual=values.get("residual", nan),
            delta=values.get("delta", nan),
            nu=self.nu,
            error=error,
            gradient_norm=norm,
            support_gradients=cost.support_gradients / self.num_tasks,
            query_gradients=cost.query_gradients / self.num_tasks,
            hessian_products=cost.hessian_products / self.num_tasks,
            tasks=self.num_tasks,
            engine=engine,
        )

    def _mean(self, key: str, values: Tensor, share: float) -> None:
        total = values.detach().double().sum() * (share / self.num_tasks)
        self._sums[key] = self._sums[key] + total if key in self._sums else total

    def _raise_where_not_finite(self) -> None:
        if not self._checks:
            return
        fine = torch.stack([torch.isfinite(check.values).all() for check in self._checks])
        if bool(fine.all()):
            return
        first = fine.tolist().index(False)
        # Checks come in the order of the computation, a solve's losses right before its gradients: of these two the earlier step counts.
        candidates = [self._checks[first]]
        if first + 1 < len(self._checks) and not fine[first + 1] and self._checks[first].in_steps and self._checks[first + 1].in_steps:
            candidates.append(self._checks[first + 1])
        check = min(candidates, key=lambda c: c.first_bad[0])
        step, row = check.first_bad
        quantity, places = check.quantity, check.places
        when = f"at inner step {step}" if check.in_steps else "after the inner steps"
        raise NonFiniteError(
            f"The {quantity} of task {places[row % len(places)]} became NaN or Inf {when}. Usually the inner steps diverge: use a "
            "smaller lr in the solver or a larger lam. If it is step 0, look for NaN in the data or the model's parameters. "
            "Nothing was written to .grad."
        )


def _add_scaled(target: Tensor, value: Tensor, weight: float, scale: Tensor | None) -> None:
    if scale is None:
        target.add_(value, alpha=weight)
    else:
        target.addcmul_(value, scale, value=weight)


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
) -> tuple[Params, Stats]:
    """The mean meta-gradient of a batch of tasks, and its statistics. Changes neither the model nor `.grad`.

    `first` is the place of the batch's first task in a larger meta-batch that is shared among machines: random draws that differ from
    task to task follow the place.
    """
    estimator.check(solver)
    if engine.name not in estimator.engines:
        raise ValueError(
            f"{type(estimator).__name__} runs on {' and '.join(estimator.engines)}, not on {engine.name}. "
            f'Use engine="{estimator.engines[0]}" or engine="auto", or an estimator that needs only loss.backward() '
            "(FOBMAML, FOMAML, Reptile)."
        )
    problem.check_tasks(tasks)
    total = MetaGradient(problem, len(tasks), metrics=metrics)
    cost = Cost()
    with engine.session(problem, tasks, width=estimator.width, seed=seed, cost=cost, first=first) as groups:
        for inner in groups:
            estimator.accumulate(inner, solver, total)
    return total.gradient, total.finish(cost, engine.name)


def solve_plainly(inner: Inner, solver: Solver, total: MetaGradient) -> Solution:
    """Solve the un-nudged problem of every task and note what it did to the query loss."""
    if total.metrics:
        total.record_query(inner.measure_query(None), None, tasks=inner.tasks)
    solution = inner.solve(solver)
    total.record(inner, solution)
    if total.metrics:
        total.record_query(None, inner.measure_query(solution.displacement), tasks=inner.tasks)
    return solution
