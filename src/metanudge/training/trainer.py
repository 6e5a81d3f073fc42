"""`train`: from a configuration to a finished run. Everything is checked before anything is written."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import torch

from metanudge.training import specs
from metanudge.training.config import TrainConfig
from metanudge.training.distributed import Group
from metanudge.training.divergence import check_steps
from metanudge.training.errors import EXIT_DONE
from metanudge.training.loop import Trainer
from metanudge.training.memory import check_data_fits, check_solves_fit
from metanudge.training.metrics import check_sinks
from metanudge.training.plan import MAY_CHANGE, check_unchanged, claim, make_plan, try_out
from metanudge.training.progress import ConsoleReporter, Quiet, Reporter
from metanudge.training.runs import build_learner, build_source, check_splits, choose_device, load_weights, precision, resolve
from metanudge.training.signals import StopRequest


def train(config: TrainConfig, *, resume: Path | None = None, reporter: Reporter | None = None) -> int:
    """Train as configured, or continue the run in the folder `resume`; returns 0.

    Raises `UserError` for what the user can put right (nothing is written then), `StopTraining` where a run ends early.
    """
    with StopRequest() as stop:
        stop.patience = 0.0  # until something is written
        group = Group.from_environment()
        try:
            return _train(config, resume, group, stop, reporter or (ConsoleReporter() if group.leads else Quiet()))
        finally:
            group.close()


def _train(config: TrainConfig, resume: Path | None, group: Group, stop: StopRequest, reporter: Reporter) -> int:
    config.check()
    device = choose_device(config)
    plan = group.share(lambda: make_plan(config, resume, group))
    check_sinks(config)
    source = group.one_after_the_other(lambda: build_source(config, device=device))
    tasks = len(group.slice(config.tasks))
    check_data_fits(config, source, tasks)
    check_splits(config, source)
    config = dataclasses.replace(resolve(config, source), out=str(plan.folder))
    config.check()  # again: paths are absolute now
    if plan.saved is not None:
        check_unchanged(plan, config)
    learner = build_learner(config, source)
    check_solves_fit(config, source, tasks, learner)
    if plan.saved is None:
        check_steps(config.lam, learner.solver)
    optimizer = specs.build_optimizer(config.optimizer, specs.parameter_groups(learner, config.lam_lr))
    if plan.checkpoint is not None:
        load_weights(learner, plan.checkpoint)
        optimizer.load_state_dict(plan.checkpoint.state["optimizer"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    with precision(config, device):
        try_out(learner, source, config)
        stop.patience = None
        group.share(lambda: claim(plan.folder, config))
        trainer = Trainer(config, plan, source, learner, optimizer, group, stop, reporter)
        try:
            trainer.run()
        finally:
            reporter.end()
            trainer.close()
    return EXIT_DONE


__all__ = ["MAY_CHANGE", "Trainer", "train"]
