"""What an evaluation found, and how it is printed and drawn."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from metanudge.baselines import Comparison
from metanudge.training.files import without_nan
from metanudge.training.metrics import AFTER, BEFORE, VALIDATION, baseline_levels, new_figure, save

BatchNormProtocol = Literal["transductive", "inductive"]


@dataclass(frozen=True)
class StepResult:
    """Results after some number of adaptation steps, over all tasks.

    Attributes:
        steps: adaptation steps taken; 0 is the initialisation itself.
        batch_norm: how BatchNorm layers normalised the queries; None for a model without them.
        loss, loss_ci95: mean query loss and the half-width of its 95 % confidence interval over
            tasks.
        accuracy, accuracy_ci95: the same for the accuracy; NaN for regression.
        worst_decile: mean accuracy over the tenth of the tasks that went worst.
        diverged: tasks whose outputs were not finite; their examples count as wrong, and their loss
            is left out.
        r2: of regression: 1 − squared error / squared deviation from the mean, over the query
            examples of all tasks (mean over targets). NaN for classification.
        rmse: root of the mean squared error of each target, in its own units; empty for
            classification.
    """

    steps: int
    batch_norm: BatchNormProtocol | None
    loss: float
    loss_ci95: float
    accuracy: float
    accuracy_ci95: float
    worst_decile: float
    diverged: int
    r2: float = math.nan
    rmse: tuple[float, ...] = ()


@dataclass(frozen=True)
class TakenFor:
    """How often a class was taken for another: `times` of its `examples` in the tasks that had
    both.
    """

    name: str
    times: int
    examples: int


@dataclass(frozen=True)
class Mistake:
    """An example that was not recognised: its task, its place in the query set, and what it was
    taken for.
    """

    task: int
    query: int
    taken_for: str


@dataclass(frozen=True)
class ClassAccuracy:
    """Accuracy on the query examples of one class, over all the tasks it occurred in; what it was
    most often taken for, and its first few mistakes.
    """

    name: str
    accuracy: float
    examples: int
    taken_for: tuple[TakenFor, ...] = ()
    wrong: tuple[Mistake, ...] = ()


@dataclass(frozen=True)
class EvaluationReport:
    """What `evaluate_run` and `evaluate_tasks` found; `str` of it is a table.

    Attributes:
        tasks: number of tasks.
        split: the split they were drawn from, if from a source.
        steps: the solver's own number of steps, at which `accuracy`, `classes` and
            `task_accuracies` are taken.
        rows: one per number of steps and BatchNorm protocol.
        classes: per class, worst first; empty for regression. By place in the episode ("label 0")
            where classes have no names.
        task_accuracies, task_losses: per task, for comparisons of two learners task by task.
        baselines: simple methods on the same tasks; None where they were not measured.
        seconds: how long it took.
    """

    tasks: int
    split: str | None
    steps: int
    rows: tuple[StepResult, ...]
    classes: tuple[ClassAccuracy, ...]
    task_accuracies: tuple[float, ...]
    task_losses: tuple[float, ...]
    seconds: float
    baselines: Comparison | None = None

    def at(self, steps: int, batch_norm: BatchNormProtocol | None = None) -> StepResult:
        """The row for a number of steps; of a BatchNorm model the transductive one unless
        `batch_norm` says otherwise.
        """
        for row in self.rows:
            if row.steps == steps and batch_norm in (None, row.batch_norm):
                return row
        known = sorted({row.steps for row in self.rows})
        raise ValueError(
            f"There is no result for steps={steps}, batch_norm={batch_norm!r}. Steps measured:"
            f" {known}."
        )

    @property
    def main(self) -> StepResult:
        """The row at the solver's own number of steps."""
        return self.at(self.steps)

    @property
    def classification(self) -> bool:
        """Whether accuracies mean anything."""
        return not math.isnan(self.main.accuracy)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON-ready values; NaN becomes None."""
        own = dataclasses.asdict(dataclasses.replace(self, baselines=None))
        if self.baselines is None:
            del own["baselines"]
        else:
            own["baselines"] = self.baselines.as_dict()
        return without_nan(own)

    def __str__(self) -> str:
        parts = self._headline(), [""], self._table(), self._class_lines(), self._baseline_lines()
        return "\n".join(line for part in parts for line in part)

    def _headline(self) -> Iterator[str]:
        where = f"{self.split} tasks" if self.split else "tasks"
        for row in self.rows:
            if row.steps == self.steps:
                how = f", BatchNorm {row.batch_norm}" if row.batch_norm else ""
                value = (
                    f"accuracy {row.accuracy:.2%} ± {row.accuracy_ci95:.2%}, worst decile"
                    f" {row.worst_decile:.2%}"
                    if self.classification
                    else f"query loss {row.loss:.4g} ± {row.loss_ci95:.2g}, {_fit(row)}"
                )
                yield f"{value}  ({self.tasks} {where}, {self.steps} steps{how}, 95 % confidence)"

    def _table(self) -> Iterator[str]:
        """One line per number of steps, the BatchNorm protocols side by side."""
        protocols = list(dict.fromkeys(row.batch_norm for row in self.rows))
        titles = (
            "accuracy           worst decile      loss"
            if self.classification
            else "query loss               R²      RMSE"
        )
        if protocols != [None]:
            yield (
                "       "
                + "   │ ".join(
                    f"{f'BatchNorm {protocol}':{len(titles)}}" for protocol in protocols
                ).rstrip()
            )
        yield "steps  " + "   │ ".join([titles] * len(protocols)).rstrip()
        for steps in dict.fromkeys(row.steps for row in self.rows):
            rows = [row for row in self.rows if row.steps == steps]
            line = f"{steps:5d}  " + "   │ ".join(self._cells(row) for row in rows)
            line += "   ← as trained" if steps == self.steps else ""
            diverged = max(row.diverged for row in rows)
            yield line.rstrip() + (
                f"   diverged on {diverged} of {self.tasks} tasks" if diverged else ""
            )

    def _cells(self, row: StepResult) -> str:
        if not self.classification:
            rmse = ", ".join(f"{value:.4g}" for value in row.rmse)
            return f"{row.loss:8.4g} ± {row.loss_ci95:<7.2g} {row.r2:8.4f}  {rmse:>8}"
        return (
            f"{row.accuracy:7.2%} ± {row.accuracy_ci95:6.2%}   {row.worst_decile:12.2%} "
            f" {row.loss:8.4g}"
        )

    def _class_lines(self) -> Iterator[str]:
        if not self.classes:
            return
        shown = (
            self.classes
            if len(self.classes) <= 10
            else (*self.classes[:5], None, *self.classes[-3:])
        )
        width = max(len(c.name) for c in shown if c)
        yield ""
        yield f"accuracy by class, worst first ({len(self.classes)} classes)"
        for c in shown:
            yield f"  {c.name:{width}}  {c.accuracy:7.2%}  of {c.examples} examples" if c else "  …"

    def _baseline_lines(self) -> Iterator[str]:
        if self.baselines is None:
            return
        rows = self.baselines.rows()
        width = max(len(name) for name, _ in rows)
        yield ""
        yield "baselines on the same tasks" + ("" if self.classification else " (loss)")
        for name, value in rows:
            yield f"  {name:{width}}  {value}"
        if (verdict := self.baselines.verdict()) is not None:
            yield verdict


def _fit(row: StepResult) -> str:
    return f"R² {row.r2:.4f}, RMSE {', '.join(f'{value:.4g}' for value in row.rmse)}"


def plot_steps(report: EvaluationReport, path: Path | str, *, title: str = "") -> None:
    """Draw accuracy (or query loss) against the number of adaptation steps, with confidence
    intervals, chance and the best baseline, into an image file.
    """
    figure = steps_figure(report.as_dict())
    save(figure, Path(path), title or f"{report.tasks} {report.split or ''} tasks")


def steps_figure(found: Mapping[str, Any], size: tuple[float, float] = (8.0, 4.0)) -> Any:
    """The figure of `plot_steps`, from `EvaluationReport.as_dict`; width and height in inches."""
    from matplotlib.ticker import MaxNLocator

    figure, axes = new_figure(*size)
    rows = found["rows"]
    quantity = "accuracy" if any(row["accuracy"] is not None for row in rows) else "loss"
    percent = quantity == "accuracy"
    scale = 100.0 if percent else 1.0
    protocols = dict.fromkeys(row["batch_norm"] for row in rows)
    for protocol, color in zip(protocols, (AFTER, VALIDATION), strict=False):
        own = [r for r in rows if r["batch_norm"] == protocol and r[quantity] is not None]
        values = [scale * row[quantity] for row in own]
        errors = [scale * (row[f"{quantity}_ci95"] or 0.0) for row in own]
        label = f"BatchNorm {protocol}" if protocol else "mean, 95 % confidence"
        axes.errorbar(
            [row["steps"] for row in own], values, yerr=errors, color=color, marker="o",
            markersize=5, linewidth=2.0, elinewidth=1.2, capsize=3, label=label,
        )  # fmt: skip
    axes.axvline(
        found["steps"], color=BEFORE, linewidth=1, linestyle=":", zorder=0, label="as trained"
    )
    baseline_levels(axes, found.get("baselines") or {}, quantity, scale)
    axes.set_xlabel("adaptation steps")
    axes.set_ylabel("query accuracy (%)" if percent else "query loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if percent:
        axes.set_ylim(0, 102)
    return figure
