"""Before the first meta-step: where a run lives and begins, and everything that could be wrong with it. Only `claim` writes."""

from __future__ import annotations

import copy
import dataclasses
import os
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
from metanudge.training.config import TrainConfig, flag
from metanudge.training.distributed import Group
from metanudge.training.errors import UserError
from metanudge.training.files import is_real_folder, open_to_append, write_text
from metanudge.training.runs import CHECKPOINTS, CONFIG, METRICS, SUMMARY, TIMING, read_config

# What a resumed run may change: how far and where it goes, not what it computes.
MAY_CHANGE = ("iterations", "test_tasks", "checkpoint_every", "device", "engine", "chunk", "compile", "tensorboard", "wandb")


@dataclass(frozen=True)
class Plan:
    """Where a run lives and where it begins; made by rank 0 without writing anything."""

    folder: Path
    saved: TrainConfig | None  # the configuration in the folder, for a run that goes on
    checkpoint: Checkpoint | None


def make_plan(config: TrainConfig, resume: Path | None, group: Group) -> Plan:
    """Where the run goes: the folder of `resume`, `--out`, or a new one; `UserError` where that cannot be."""
    if resume is not None:
        chosen: str = "last"
        if resume.parent.name == CHECKPOINTS and not (resume / CONFIG).exists():
            resume, chosen = resume.parent.parent, resume.name
        saved = read_config(resume, trust=True)  # only compared: what is built is `config`, the caller's word
        if config.out not in (None, saved.out):
            raise UserError(
                f"--out {config.out} and --resume {resume} contradict each other: a run goes on where it is. Leave --out out."
            )
        return Plan(resume, saved, _checkpoint(resume, chosen))
    folder = Path(config.out).expanduser() if config.out else _default_folder(config, group)
    if not folder.exists() or (folder.is_dir() and not _contents(folder)):
        return Plan(folder, None, None)
    if not folder.is_dir():
        raise UserError(f"--out {folder} is a file. Give a new or empty folder.")
    if group.elastic and (folder / CONFIG).is_file():  # torchrun starts the same command again after a failure
        return Plan(folder, read_config(folder, trust=True), _checkpoint(folder, "last"))
    more = f", or continue the run in it: metanudge train --resume {shlex.quote(str(folder))}" if (folder / CONFIG).is_file() else ""
    raise UserError(f"--out {folder} is not empty (it holds {_contents(folder)[0]}). Give a new or empty folder{more}.")


def _contents(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir() if not path.name.startswith(".new-"))
    except OSError as error:
        raise UserError(f"{folder} cannot be read ({error.strerror}). Give a folder of yours.") from error


def _default_folder(config: TrainConfig, group: Group) -> Path:
    name = Path(config.data).expanduser().resolve().stem
    if group.restarted:  # the first start chose a name; go on there
        for folder in sorted(Path("runs").glob(f"{name}-*"), reverse=True):
            if (folder / CONFIG).is_file() and not (folder / SUMMARY).exists():
                return folder
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = Path("runs") / f"{name}-{stamp}"
    number = 1
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{name}-{stamp}-{number}"
    return folder


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
        command = f"metanudge train --resume {shlex.quote(str(folder / CHECKPOINTS / error.alternative))}"
        raise UserError(f"{error} Continue from it with: {command}") from error


def check_unchanged(plan: Plan, config: TrainConfig) -> None:
    """Refuse to go on with a run under another configuration than the one it was started with."""
    assert plan.saved is not None
    changed = dataclasses.replace(plan.saved, out=config.out).differences(config)
    fixed = [name for name in changed if name not in MAY_CHANGE or (name == "iterations" and config.schedule == "cosine")]
    if fixed:
        detail = "; ".join(f"{flag(name)} was {changed[name][0]!r}, now {changed[name][1]!r}" for name in fixed)
        raise UserError(
            f"{plan.folder} was started with another configuration ({detail}), and would not be the same run any more. Leave these flags "
            f"out to continue it, or start a new run with another --out. A resumed run may change {', '.join(map(flag, MAY_CHANGE))}."
        )
    done = plan.checkpoint.step if plan.checkpoint is not None else 0
    if config.iterations < done:
        raise UserError(f"--iterations {config.iterations}: {plan.folder} has already done {done} meta-steps. Give {done} or more.")


def try_out(learner: MetaLearner, source: Episodes, config: TrainConfig) -> None:
    """One task through the learner before anything is written: a model that does not fit the data fails here."""
    batch = source.batch([0])
    inputs, _ = batch[0].query
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            outputs = copy.deepcopy(learner.model)(inputs)  # a copy: BatchNorm would note the batch's statistics
    except Exception as error:
        raise UserError(f"--model {config.model} cannot take the data, inputs of shape {tuple(inputs.shape)}: {error}") from error
    wanted = (len(inputs), source.num_outputs)
    if isinstance(outputs, Tensor) and tuple(outputs.shape) != wanted:
        raise UserError(
            f"--model {config.model} gives outputs of shape {tuple(outputs.shape)} for {len(inputs)} examples; the tasks need {wanted}. "
            "Give it as many outputs as there are ways (1 for regression)."
        )
    try:
        learner.meta_gradient(batch, seed=0)
    except (NonFiniteError, torch.OutOfMemoryError):
        pass  # the training loop deals with these
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        raise UserError(str(error)) from error


def claim(folder: Path, config: TrainConfig) -> None:
    """Make the folder and write the configuration, which makes it a run."""
    _check_contents(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / CONFIG, config.to_json())
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written ({error.strerror}). Give a folder of yours on a disk with space left: --out FOLDER"
        ) from error


def _check_contents(folder: Path) -> None:
    """Refuse a folder in which something else stands where the run adds to files and other packages write theirs."""
    try:
        for name in (METRICS, TIMING):
            if os.path.lexists(folder / name):
                open_to_append(folder / name).close()
        for name in (CHECKPOINTS, "tensorboard", "wandb"):
            is_real_folder(folder / name)
    except OSError as error:
        raise UserError(f"{error.filename} cannot be written to ({error.strerror}).") from error
