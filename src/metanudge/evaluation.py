"""How a learner adapts, and how well."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from metanudge.engines import Cost, Engine, InplaceEngine
from metanudge.engines.undisturbed import Guard, claimed, restored, stands_still
from metanudge.estimators import NonFiniteError
from metanudge.estimators.run import advice_on
from metanudge.html_table import html_table
from metanudge.objective import Objective
from metanudge.params import Params
from metanudge.problem import Problem, is_constant
from metanudge.solvers import Solver
from metanudge.spread import local
from metanudge.task import Batch, Task, TaskBatch


@dataclass(frozen=True)
class Evaluation:
    """Query loss and accuracy of every task, before and after adaptation, in the order of the
    tasks; `extra` has the learner's metrics, and what a loss of the form `(loss, dict)` reports.
    """

    loss_before: Tensor
    accuracy_before: Tensor
    loss: Tensor
    accuracy: Tensor
    extra_before: Params = field(default_factory=dict)
    extra: Params = field(default_factory=dict)

    def columns(self, names: Sequence[str]) -> Tensor:
        """One row for each quantity, those of some metrics last, and a column for each task."""
        own = [part[name] for part in (self.extra_before, self.extra) for name in names]
        return torch.stack([self.loss_before, self.accuracy_before, self.loss, self.accuracy, *own])

    @classmethod
    def of(cls, columns: Tensor, names: Sequence[str]) -> Evaluation:
        """From what `columns` gives for these metrics."""
        rows, many = columns[4:], len(names)
        before, after = (dict(zip(names, part, strict=True)) for part in (rows[:many], rows[many:]))
        loss_before, accuracy_before, loss, accuracy = columns[:4]
        return cls(loss_before, accuracy_before, loss, accuracy, before, after)

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
        for name, (before, after) in self._means().items():
            text += f", {name} {before:.4g} → {after:.4g}"
        return f"{text} ({len(self.loss)} tasks)"

    def _means(self) -> dict[str, tuple[float, float]]:
        return {
            name: (float(self.extra_before[name].mean()), float(after.mean()))
            for name, after in self.extra.items()
        }

    def _repr_html_(self) -> str:
        loss, loss_before = (f"{float(x.mean()):.4g}" for x in (self.loss, self.loss_before))
        rows = [("query loss", loss_before, loss)]
        if not math.isnan(self.mean_accuracy):
            after = f"{self.mean_accuracy:.2%} ± {self.accuracy_ci95:.2%}"
            rows.append(("accuracy", f"{float(self.accuracy_before.mean()):.2%}", after))
        rows += [(name, f"{b:.4g}", f"{a:.4g}") for name, (b, a) in self._means().items()]
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
    extras: tuple[Params, Params] = ({}, {})
    with engine.session(problem, batch, width=1, seed=seed, cost=Cost()) as groups:
        for inner in groups:
            before = inner.measure_query(None)
            after = inner.measure_query(inner.solve(solver).displacement)
            values = (before.loss, before.accuracy, after.loss, after.accuracy)
            for column, value in zip(columns, values, strict=True):
                column[list(inner.places)] = value.double().cpu()
            for extra, found in zip(extras, (before.extra, after.extra), strict=True):
                for name, value in found.items():
                    unknown = torch.full((len(batch),), math.nan, dtype=torch.float64)
                    column = extra.setdefault(name, unknown)
                    column[list(inner.places)] = value.double().cpu()
    one, two, three, four = columns
    return Evaluation(one, two, three, four, extra_before=extras[0], extra=extras[1])


def adapted_copy(
    own: Problem, patterns: str | Sequence[str] | None, support: Batch, solver: Solver, seed: int
) -> nn.Module:
    """A copy of a problem's model after a solve on a support set; `patterns` say what adapts.

    Frozen parameters and buffers that are constants are the model's own.
    """
    if own.spread is not None:
        raise TypeError(
            f"adapt copies the model, whose parameters are spread over {own.spread.ranks} ranks."
            " `with learner.adapted(support) as model:` adapts it in place, and"
            " learner.evaluate(tasks) measures."
        )
    own_model = own.objective.model
    kept: list[Tensor] = [p for p in own_model.parameters() if not p.requires_grad]
    kept += [buffer for *_, buffer in _constants(own_model)]
    model = copy.deepcopy(own_model, {id(tensor): tensor for tensor in kept})
    problem = Problem(
        Objective(model, own.objective.loss), own.proximal, adapt=patterns, rates=own.rates
    )
    _move(problem, displacement(problem, support, solver, seed))
    for module, name, buffer in _constants(model):
        if not stands_still(module, name):
            module._buffers[name] = buffer.clone()
    return model


@contextmanager
def adapted_in_place(problem: Problem, moved: Params) -> Iterator[nn.Module]:
    """A problem's own model, displaced; on the way out all is put back that was changed within:
    what adapts, buffers, `.grad`, training or evaluation mode.
    """
    with claimed(problem):
        guard, modes = Guard(problem), [(module, module.training) for module in problem.modules]

        def restore() -> None:
            guard.restore()
            for module, training in modes:
                module.training = training

        with restored(restore):
            _move(problem, moved)
            guard.wrote()
            del moved
            yield problem.objective.model


def displacement(problem: Problem, support: Batch, solver: Solver, seed: int) -> Params:
    """How far what adapts moves in a solve on a support set; the model stays as it is."""
    batch = TaskBatch.of(Task(support, support))
    problem.check_tasks(batch)
    with InplaceEngine().session(problem, batch, width=1, seed=seed, cost=Cost()) as groups:
        solution = next(iter(groups)).solve(solver)
    if not bool(torch.isfinite(solution.residuals).all()):
        raise NonFiniteError(
            "Adaptation produced NaN or Inf: the inner steps diverge on this support"
            f" set. Take fewer steps, or {advice_on(problem, solver)}."
        )
    return {name: leaf[0] for name, leaf in solution.displacement.items()}


def _move(problem: Problem, moved: Params) -> None:
    with torch.no_grad():
        for name, parameter in problem.parameters.items():
            phi = local(parameter.data)
            phi.copy_(phi + moved[name])


def _constants(model: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    return [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and is_constant(module, name)
    ]
