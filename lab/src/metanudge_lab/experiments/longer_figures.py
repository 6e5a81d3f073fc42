"""What is drawn of adapting longer than trained."""

from __future__ import annotations

from metanudge_lab import style
from metanudge_lab.experiments.base import Drawing, Result, ResultTable
from metanudge_lab.experiments.longer_runs import Config


def draw(result: Result[Config]) -> list[Drawing]:
    """Accuracy against steps of adaptation."""
    figure, _ = style.figure()
    return [Drawing(figure, alt="Accuracy on test tasks against the number of steps.")]


def table(result: Result[Config]) -> ResultTable:
    """Accuracy by steps of adaptation."""
    return ResultTable(("trained",), [(one,) for one in result.config.trained])
