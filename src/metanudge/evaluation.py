"""How a learner adapts, and how well."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from metanudge.engines import Cost, Engine, InplaceEngine
from metanudge.engines.inplace import InplaceInner
from metanudge.estimators import NonFiniteError
from metanudge.estimators.run import advice_on
from metanudge.html_table import html_table
from metanudge.problem import Objective, Problem
from metanudge.solvers import Solver
from metanudge.task import Batch, Task, TaskBatch


@dataclass(frozen=True)
class Evaluation:
    """Query loss and accuracy of every task, before and after adaptation, in the order of the
    tasks.
    """

    loss_before: Tensor
    accuracy_before: Tensor
    loss: Tensor
    accuracy: Tensor

    @property
    def mean_loss(self) -> float:
        """Mean query loss after adaptation."""
        return float(self.loss.mean())

    @property
    def mean_accuracy(self) -> float:
        """Mean query accuracy after adaptation; NaN where the tasks are no classification."""
        return float(self.accuracy.mean())

    @property
    def accuracy_ci95(self) -> float:
        """Half-width of the 95 % confidence interval of the mean accuracy over tasks."""
        return ci95(self.accuracy)

    def __str__(self) -> str:
        text = f"query loss {float(self.loss_before.mean()):.4g} → {self.mean_loss:.4g}"
        if not math.isnan(self.mean_accuracy):
            text += (
                f", accuracy {float(self.accuracy_before.mean()):.2%} → {self.mean_accuracy:.2%} ±"
                f" {self.accuracy_ci95:.2%}"
            )
        return f"{text} ({len(self.loss)} tasks)"

    def _repr_html_(self) -> str:
        loss, loss_before = (f"{float(x.mean()):.4g}" for x in (self.loss, self.loss_before))
        rows = [("query loss", loss_before, loss)]
        if not math.isnan(self.mean_accuracy):
            after = f"{self.mean_accuracy:.2%} ± {self.accuracy_ci95:.2%}"
            rows.append(("accuracy", f"{float(self.accuracy_before.mean()):.2%}", after))
        return html_table(rows, head=(f"{len(self.loss)} tasks", "before", "after adaptation"))


def ci95(values: Tensor) -> float:
    """Half-width of the 95 % confidence interval of the mean of independent values; NaN for fewer
    than two.

    Example:
        >>> round(ci95(torch.tensor([0.5, 1.0, 0.5, 1.0])), 6)
        0.282902
    """
    n = len(values)
    return float(1.96 * values.std() / math.sqrt(n)) if n > 1 else math.nan


def with_steps(solver: Solver, steps: int | None) -> Solver:
    """The solver with another number of steps, if one is given."""
    return solver if steps is None else dataclasses.replace(solver, steps=steps)  # type: ignore[type-var]


def evaluate(
    problem: Problem, batch: TaskBatch, solver: Solver, engine: Engine, seed: int
) -> Evaluation:
    """Adapt to every task's support set and measure on its query set."""
    columns = [torch.zeros(len(batch), dtype=torch.float64) for _ in range(4)]
    with engine.session(problem, batch, width=1, seed=seed, cost=Cost()) as groups:
        for inner in groups:
            before = inner.measure_query(None)
            after = inner.measure_query(inner.solve(solver).displacement)
            values = (before.loss, before.accuracy, after.loss, after.accuracy)
            for column, value in zip(columns, values, strict=True):
                column[list(inner.places)] = value.double().cpu()
    return Evaluation(*columns)


def adapted(
    own: Problem, patterns: str | Sequence[str] | None, support: Batch, solver: Solver, seed: int
) -> nn.Module:
    """A copy of a problem's model after a solve on a support set; `patterns` say what adapts."""
    model = copy.deepcopy(own.objective.model)
    problem = Problem(Objective(model, own.objective.loss), own.proximal, adapt=patterns)
    batch = TaskBatch.of(Task(support, support))
    problem.check_tasks(batch)
    with InplaceEngine().session(problem, batch, width=1, seed=seed, cost=Cost()) as groups:
        inner = next(iter(groups))
        assert isinstance(inner, InplaceInner)
        solution = inner.solve(solver)
        if not bool(torch.isfinite(solution.residuals).all()):
            raise NonFiniteError(
                "Adaptation produced NaN or Inf: the inner steps diverge on this support"
                f" set. Take fewer steps, or {advice_on(problem, solver)}."
            )
        inner.adopt(solution.displacement)
    return model
