"""`train`: from a configuration to a finished run. Everything is checked before anything is
written.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import torch

from metanudge.training import specs
from metanudge.training.config import MAY_CHANGE, TrainConfig
from metanudge.training.continuing import (
    check_data,
    check_unchanged,
    load_optimizer,
    say_what_differs,
)
from metanudge.training.distributed import Group
from metanudge.training.divergence import check_steps
from metanudge.training.environment import environment
from metanudge.training.errors import EXIT_DONE
from metanudge.training.lock import RunLock
from metanudge.training.loop import Trainer
from metanudge.training.memory import check_data_fits, check_solves_fit
from metanudge.training.metrics import check_sinks
from metanudge.training.plan import claim, make_plan, try_out
from metanudge.training.progress import ConsoleReporter, Quiet, Reporter
from metanudge.training.runs import (
    DataShapes,
    build_learner,
    build_source,
    check_splits,
    choose_device,
    load_weights,
    precision,
    resolve,
)
from metanudge.training.signals import StopRequest
from metanudge.training.summary import check_summary


def train(
    config: TrainConfig,
    *,
    resume: Path | None = None,
    reporter: Reporter | None = None,
    allow_changed_data: bool = False,
) -> int:
    """Train as configured, or continue the run in the folder `resume` (also on data that have
    changed, if allowed); returns 0.

    Raises `UserError` for what the user can put right (nothing is written then), `StopTraining`
    where a run ends early.
    """
    with StopRequest() as stop:
        stop.patience = 0.0  # until something is written
        group = Group.from_environment()
        reporter = reporter or (ConsoleReporter() if group.leads else Quiet())
        try:
            with RunLock(reporter.note, job=group.job) as lock:
                return _train(config, resume, group, stop, reporter, lock, allow_changed_data)
        finally:
            group.close()


def _train(
    config: TrainConfig,
    resume: Path | None,
    group: Group,
    stop: StopRequest,
    reporter: Reporter,
    lock: RunLock,
    allow_changed_data: bool,
) -> int:
    config.check()
    device = choose_device(config)
    plan = group.share(lambda: make_plan(config, resume, group, lock))
    check_sinks(config)
    remembered = (
        DataShapes.from_dict(plan.checkpoint.state["shapes"])
        if plan.checkpoint is not None
        else None
    )
    source = group.one_after_the_other(
        lambda: build_source(config, device=device, remembered=remembered)
    )
    tasks = len(group.slice(config.tasks))
    check_data_fits(config, source, tasks)
    check_splits(config, source)
    config = dataclasses.replace(resolve(config, source), out=str(plan.folder))
    config.check()  # once more: it has absolute paths now
    if plan.saved is not None:
        config = check_unchanged(plan, config, source)
        check_data(plan, source, allow=allow_changed_data, note=reporter.note)
        say_what_differs(plan, config, environment(device, processes=group.world), reporter.note)
        if group.leads:
            check_summary(plan.folder, reporter.note)
    learner = build_learner(config, source)
    check_solves_fit(config, source, tasks, learner)
    if plan.saved is None:
        check_steps(config.lam, learner.solver)
    optimizer = specs.build_optimizer(
        config.optimizer, specs.parameter_groups(learner, config.lam_lr)
    )
    if plan.checkpoint is not None:
        load_weights(learner, plan.checkpoint)
        load_optimizer(optimizer, plan.checkpoint)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    with precision(config, device):
        try_out(learner, source, config)
        stop.patience = None
        folder = group.share(lambda: claim(plan, config, lock))
        config, plan = (
            dataclasses.replace(config, out=str(folder)),
            dataclasses.replace(plan, folder=folder),
        )
        trainer = Trainer(config, plan, source, learner, optimizer, group, stop, reporter)
        try:
            trainer.run()
        finally:
            reporter.end()
            trainer.close()
    return EXIT_DONE


__all__ = ["MAY_CHANGE", "Trainer", "train"]
