"""How well a learner adapts, task by task."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from metanudge.html_table import html_table
from metanudge.params import Params


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
