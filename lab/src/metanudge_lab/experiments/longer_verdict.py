"""What adapting longer than trained shows."""

from __future__ import annotations

from metanudge_lab.experiments.base import Result, Statement, Verdict
from metanudge_lab.experiments.longer_runs import Config


def judge(result: Result[Config]) -> Verdict:
    """Whether the loss nudge keeps its accuracy."""
    return Verdict.of([Statement(None, "all of it")], "0")
