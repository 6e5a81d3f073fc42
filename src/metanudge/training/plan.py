"""Before the first meta-step: where a run lives and begins, and everything that could be wrong with
it. Only `claim` writes.
"""

from __future__ import annotations

import copy
import dataclasses
import glob
import itertools
import os
import reprlib
import shlex
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from metanudge.estimators import NonFiniteError
from metanudge.learner import MetaLearner
from metanudge.tasks import Episodes
from metanudge.training.checkpoint import Checkpoint, CheckpointError, CheckpointStore
from metanudge.training.config import TrainConfig
from metanudge.training.distributed import Group
from metanudge.training.errors import UserError
from metanudge.training.files import is_real_folder, open_to_append, write_text
from metanudge.training.lock import LOCK, RunLock, check_free, job_of
from metanudge.training.metrics import check_metrics
from metanudge.training.runs import CHECKPOINTS, CONFIG, METRICS, TIMING, check_config, read_config
from metanudge.tuning import NuTuner


@dataclass(frozen=True)
class Plan:
    """Where a run lives and where it begins; made by rank 0 without writing anything."""

    folder: Path
    saved: TrainConfig | None = None  # the configuration in the folder, for a run that goes on
    checkpoint: Checkpoint | None = None
    named: bool = (
        True  # the user chose the folder; where not, `claim` adds a number to a name that is taken
    )


def make_plan(config: TrainConfig, resume: Path | None, group: Group, lock: RunLock) -> Plan:
    """Where the run goes: the folder of `resume`, `--out`, or a new one; `UserError` where that
    cannot be.

    A run that is there is locked before any of it is read, a new one by `claim`.
    """
    if resume is not None:
        chosen: str = "last"
        if resume.parent.name == CHECKPOINTS and not (resume / CONFIG).exists():
            resume, chosen = resume.parent.parent, resume.name
        plan = _going_on(resume, chosen, lock)
        if plan.saved is not None and config.out not in (None, plan.saved.out):
            raise UserError(
                f"--out {config.out} and --resume {resume} contradict each other: a run goes on"
                " where it is. Leave --out out."
            )
        return plan
    folder = Path(config.out).expanduser() if config.out else _default_folder(config, group)
    if group.job is not None and (folder / CONFIG).is_file() and job_of(folder) == group.job:
        # torchrun starts the same command again after a failure
        return _going_on(folder, "last", lock)
    if config.out and folder.exists():
        check_free(folder)
        _check_empty(folder)
    return Plan(folder, named=bool(config.out))


def _going_on(folder: Path, chosen: str, lock: RunLock) -> Plan:
    """The plan for a run that is there already, all of it verified."""
    if (folder / CONFIG).is_file():
        lock.take(folder)
    # only compared: what is built is the caller's configuration
    saved = read_config(folder, trust=True)
    checkpoint = _checkpoint(folder, chosen)
    if checkpoint is not None:
        check_config(folder, saved, checkpoint)
        _check_state(checkpoint)
        check_metrics(
            folder / METRICS,
            size=checkpoint.state["metrics_size"],
            sha256=checkpoint.state.get("metrics_sha256"),
        )
    return Plan(folder, saved, checkpoint)


def _check_empty(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"--out {folder} is a file. Give a new or empty folder.")
    found = _contents(folder)
    if found:
        more = (
            f", or continue the run in it: metanudge train --resume {shlex.quote(str(folder))}"
            if CONFIG in found
            else ""
        )
        raise UserError(
            f"--out {folder} is not empty (it holds {found[0]}). Give a new or empty folder{more}."
        )


def _contents(folder: Path) -> list[str]:
    try:
        return sorted(
            path.name
            for path in folder.iterdir()
            if not path.name.startswith(".new-") and path.name != LOCK
        )
    except OSError as error:
        raise UserError(
            f"{folder} cannot be read ({error.strerror}). Give a folder of yours."
        ) from error


def _default_folder(config: TrainConfig, group: Group) -> Path:
    name = Path(config.data).expanduser().resolve().stem
    if group.job is not None:  # an earlier start of this job may have chosen a name; go on there
        for folder in Path("runs").glob(f"{glob.escape(name)}-*"):
            if job_of(folder) == group.job:
                return folder
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _checkpoint(folder: Path, name: str) -> Checkpoint | None:
    """The checkpoint to go on from; None where the run was stopped before its first one."""
    store = CheckpointStore(folder / CHECKPOINTS)
    if name == "last" and not store.list():
        return None
    try:
        return store.load(name)
    except CheckpointError as error:
        if error.alternative is None:
            raise
        command = (
            f"metanudge train --resume {shlex.quote(str(folder / CHECKPOINTS / error.alternative))}"
        )
        raise UserError(f"{error} Continue from it with: {command}") from error


# What the state of a run's checkpoint holds, as version 0.1 and all later ones wrote it.
_STATE: dict[str, tuple[type, ...]] = {
    "config": (dict,), "shapes": (dict,), "optimizer": (dict,), "lrs": (list,), "best": (dict,
    type(None)), "chunk": (int, type(None)),
    "tuner": (dict, type(None)), "metrics_size": (int,),
}  # fmt: skip


def _check_state(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint that is intact but was not written by a run."""
    for name, kinds in _STATE.items():
        if name not in checkpoint.state or type(checkpoint.state[name]) not in kinds:
            raise UserError(
                f"{checkpoint.folder} is not a run's checkpoint: {name} in its state is"
                f" {reprlib.repr(checkpoint.state.get(name))}. Resume from a folder that metanudge"
                " train wrote."
            )


def try_out(learner: MetaLearner, source: Episodes, config: TrainConfig) -> None:
    """One task through the learner before anything is written: a model that does not fit the data
    fails here.
    """
    batch = source.batch([0])
    inputs, _ = batch[0].query
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            # a copy: BatchNorm would note the batch's statistics
            outputs = copy.deepcopy(learner.model)(inputs)
    except Exception as error:
        raise UserError(
            f"--model {config.model} cannot take the data, inputs of shape {tuple(inputs.shape)}:"
            f" {error}"
        ) from error
    wanted = (len(inputs), source.num_outputs)
    if isinstance(outputs, Tensor) and tuple(outputs.shape) != wanted:
        raise UserError(
            f"--model {config.model} gives outputs of shape {tuple(outputs.shape)} for"
            f" {len(inputs)} examples; the tasks need {wanted}. Give it as many outputs as there"
            " are ways (1 for regression)."
        )
    tuner, learner.tuner = learner.tuner, NuTuner()  # the run chooses a ν on tasks of its own
    try:
        learner.meta_gradient(batch, seed=0)
    except (NonFiniteError, torch.OutOfMemoryError):
        pass  # the training loop deals with these
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        raise UserError(str(error)) from error
    finally:
        learner.tuner = tuner


def claim(plan: Plan, config: TrainConfig, lock: RunLock) -> Path:
    """Make the folder and write the configuration, which makes it a run; returns the folder."""
    folder = plan.folder
    _check_contents(folder)
    try:
        if plan.saved is None:
            folder = _make_folder(plan)
            lock.take(folder)
            _check_empty(folder)  # another process may have come first
        write_text(folder / CONFIG, dataclasses.replace(config, out=str(folder)).to_json())
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written ({error.strerror}). Give a folder of yours on a disk with"
            " space left: --out FOLDER"
        ) from error
    return folder


def _check_contents(folder: Path) -> None:
    """Refuse a folder in which something else stands where the run adds to files and other packages
    write theirs.
    """
    try:
        for name in (METRICS, TIMING):
            if os.path.lexists(folder / name):
                open_to_append(folder / name).close()
        for name in (CHECKPOINTS, "tensorboard", "wandb"):
            is_real_folder(folder / name)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be written to ({error.strerror}).") from error


def _make_folder(plan: Plan) -> Path:
    for number in itertools.count(1):
        folder = (
            plan.folder if number == 1 else plan.folder.with_name(f"{plan.folder.name}-{number}")
        )
        try:
            folder.mkdir(parents=True, exist_ok=plan.named)
            return folder
        except FileExistsError:
            if plan.named:
                raise
    raise AssertionError("unreachable")
