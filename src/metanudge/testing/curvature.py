"""How curved a learner's inner problems are: what a stable inner learning rate depends on."""

from __future__ import annotations

from metanudge.curvature import curvature as _curvature
from metanudge.engines import StackedEngine
from metanudge.learner import MetaLearner
from metanudge.task import TaskBatch


def curvature(learner: MetaLearner, tasks: TaskBatch) -> float:
    """The largest curvature of the tasks' support losses at θ, by 30 probes."""
    return _curvature(learner.problem(), tasks, engine=StackedEngine(), probes=30)
