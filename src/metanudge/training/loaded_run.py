"""A run in Python: its learner, source and configuration, and what is done with it afterwards."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from metanudge.tasks.episodes import Split
from metanudge.training import runs
from metanudge.training.config import Device
from metanudge.training.evaluation import EvaluationReport, evaluate_run
from metanudge.training.runs import Run
from metanudge.training.use import Classifier, Regressor, adapt


@dataclass(frozen=True)
class LoadedRun(Run):
    """What `metanudge.load_run` gives: a `Run` that adapts and evaluates.

    `run.learner`, `run.source` (read when first asked for) and `run.config` are its parts;
    `run.state` and `run.shapes` the checkpoint and what it remembers of the data.
    """

    def adapt(
        self, support: str | os.PathLike[str], *, steps: int | None = None
    ) -> Classifier | Regressor:
        """What `metanudge adapt` does; see `metanudge.training.use.adapt`. To tensors adapts
        `run.learner.adapt((inputs, targets))`.
        """
        return adapt(self, support, steps=steps)

    def evaluate(
        self,
        *,
        tasks: int = 1000,
        split: Split = "test",
        steps: Sequence[int] | None = None,
        baselines: bool = False,
    ) -> EvaluationReport:
        """What `metanudge eval` measures; see `metanudge.training.evaluation.evaluate_run`."""
        return evaluate_run(self, tasks=tasks, split=split, steps=steps, baselines=baselines)


def load_run(
    run: str | os.PathLike[str], *, checkpoint: str, device: Device | None, trust: bool
) -> LoadedRun:
    """See `metanudge.load_run`."""
    found = runs.load(run, checkpoint=checkpoint, device=device, trust=trust)
    return LoadedRun(found.folder, found.config, found.learner, found.state, found.shapes)
