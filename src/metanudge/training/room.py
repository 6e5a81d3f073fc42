"""What the meta-steps of a run need, before it starts and where the memory has run out."""

from __future__ import annotations

import torch

from metanudge.learner import MetaLearner
from metanudge.planning import MemoryPlan, plan
from metanudge.tasks import Episodes
from metanudge.training import sources
from metanudge.training.config import TrainConfig
from metanudge.training.device import computing_in, device_called


def plan_of_run(config: TrainConfig) -> MemoryPlan:
    """What a run of this configuration would need, with its estimator and others."""
    device = device_called(config.device)
    config = sources.for_device(config, device)
    source = sources.build_source(config, device=device, remembered=None)
    config = sources.resolve(config, source)
    learner = sources.build_learner(config, source)
    with computing_in(config.precision, source.device):
        return plan(learner, source.batch(range(config.tasks)))


def advice_of_plan(learner: MetaLearner, source: Episodes, tasks: int) -> str:
    """What to change where a meta-step of so many tasks does not fit the device; empty where it
    does, or where nobody can tell.
    """
    if source.device.type != "cuda":
        return ""
    try:
        batch = source.batch(range(max(1, tasks)))
        own = plan(learner, batch, estimators=[learner.estimator], timed=False)
        return plan(learner, batch, timed=False).advice if own.advice else ""
    except (RuntimeError, ValueError, TypeError, NotImplementedError, StopIteration):
        return ""
    finally:
        torch.cuda.empty_cache()
