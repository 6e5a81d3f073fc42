"""Before the first meta-step: where a run lives and begins, and everything that could be wrong with it. Only `claim` writes."""

from __future__ import annotations

import copy
import dataclasses
import glob
import reprlib
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metanudge.estimators import NonFiniteError
from metanudge.learner import MetaLearner
from metanudge.tasks import Episodes
from metanudge.training.checkpoint import Checkpoint, CheckpointError, CheckpointStore
from metanudge.training.config import MAY_CHANGE, TrainConfig, flag
from metanudge.training.distributed import Group
from metanudge.training.environment import changes
from metanudge.training.errors import UserError
from metanudge.training.lock import LOCK, RunLock, job_of
from metanudge.training.metrics import check_metrics
from metanudge.training.runs import CHECKPOINTS, CONFIG, METRICS, check_config, read_config, resolve, write_text


@dataclass(frozen=True)
class Plan:
    """Where a run lives and where it begins; made by rank 0 without writing anything."""

    folder: Path
    saved: TrainConfig | None  # the configuration in the folder, for a run that goes on
    checkpoint: Checkpoint | None


def make_plan(config: TrainConfig, resume: Path | None, group: Group, lock: RunLock) -> Plan:
    """Where the run goes: the folder of `resume`, `--out`, or a new one; `UserError` where that cannot be.

    A run that is there is locked before any of it is read, a new one by `claim`.
    """
    if resume is not None:
        chosen: str = "last"
        if resume.parent.name == CHECKPOINTS and not (resume / CONFIG).exists():
            resume, chosen = resume.parent.parent, resume.name
        plan = _going_on(resume, chosen, lock)
        if plan.saved is not None and config.out not in (None, plan.saved.out):
            raise UserError(
                f"--out {config.out} and --resume {resume} contradict each other: a run goes on where it is. Leave --out out."
            )
        return plan
    folder = Path(config.out).expanduser() if config.out else _default_folder(config, group)
    if group.job is not None and (folder / CONFIG).is_file() and job_of(folder) == group.job:
        return _going_on(folder, "last", lock)  # torchrun starts the same command again after a failure
    if folder.exists():
        _check_empty(folder)
    return Plan(folder, None, None)


def _going_on(folder: Path, chosen: str, lock: RunLock) -> Plan:
    """The plan for a run that is there already, all of it verified."""
    if (folder / CONFIG).is_file():
        lock.take(folder)
    saved = read_config(folder)
    checkpoint = _checkpoint(folder, chosen)
    if checkpoint is not None:
        check_config(folder, saved, checkpoint)
        _check_state(checkpoint)
        check_metrics(folder / METRICS, size=checkpoint.state["metrics_size"], sha256=checkpoint.state.get("metrics_sha256"))
    return Plan(folder, saved, checkpoint)


def _check_empty(folder: Path) -> None:
    if not folder.is_dir():
        raise UserError(f"--out {folder} is a file. Give a new or empty folder.")
    found = _contents(folder)
    if found:
        more = f", or continue the run in it: metanudge train --resume {shlex.quote(str(folder))}" if CONFIG in found else ""
        raise UserError(f"--out {folder} is not empty (it holds {found[0]}). Give a new or empty folder{more}.")


def _contents(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.iterdir() if not path.name.startswith(".new-") and path.name != LOCK)
    except OSError as error:
        raise UserError(f"{folder} cannot be read ({error.strerror}). Give a folder of yours.") from error


def _default_folder(config: TrainConfig, group: Group) -> Path:
    name = Path(config.data).expanduser().resolve().stem
    if group.job is not None:  # an earlier start of this job may have chosen a name; go on there
        for folder in Path("runs").glob(f"{glob.escape(name)}-*"):
            if job_of(folder) == group.job:
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


# What the state of a run's checkpoint holds, as version 0.1 and all later ones wrote it.
_STATE: dict[str, tuple[type, ...]] = {
    "config": (dict,), "shapes": (dict,), "optimizer": (dict,), "lrs": (list,), "best": (dict, type(None)), "chunk": (int, type(None)),
    "tuner": (dict, type(None)), "metrics_size": (int,),
}  # fmt: skip


def _check_state(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint that is intact but was not written by a run."""
    for name, kinds in _STATE.items():
        if name not in checkpoint.state or type(checkpoint.state[name]) not in kinds:
            raise UserError(
                f"{checkpoint.folder} is not a run's checkpoint: {name} in its state is {reprlib.repr(checkpoint.state.get(name))}. "
                "Resume from a folder that metanudge train wrote."
            )


def load_optimizer(optimizer: torch.optim.Optimizer, checkpoint: Checkpoint) -> None:
    """Put a checkpoint's state into an optimizer."""
    try:
        optimizer.load_state_dict(checkpoint.state["optimizer"])
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{checkpoint.folder} has no state for this optimizer ({error!r}). Resume from another checkpoint.") from error


def check_unchanged(plan: Plan, config: TrainConfig, source: Episodes) -> TrainConfig:
    """The configuration to go on with: as it was recorded, but for what may change; `UserError` where more has changed."""
    assert plan.saved is not None
    changed = dataclasses.replace(resolve(plan.saved, source), out=config.out).differences(config)
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
    return dataclasses.replace(plan.saved, out=config.out, **{name: getattr(config, name) for name in MAY_CHANGE})


def check_data(plan: Plan, source: Episodes, *, allow: bool, note: Callable[[str], None]) -> None:
    """Refuse to go on with other data than those the checkpoint was trained on, unless that is allowed."""
    was, now = plan.checkpoint.state.get("data_sha256") if plan.checkpoint is not None else None, fingerprint(source)
    if was is None or now is None or was == now:
        return
    assert plan.saved is not None
    if not allow:
        raise UserError(
            f"{plan.saved.data} has changed since {plan.folder} was trained on it (its sha256 was {was[:12]}…, now {now[:12]}…), and the "
            "result would be of neither. Put the data back, start a new run, or go on nevertheless with --allow-changed-data."
        )
    note(f"{plan.saved.data} has changed since this run was trained on it: from here on it is another run.")


def fingerprint(source: Episodes) -> str | None:
    """The sha256 of a source's data; None where they are made from numbers alone."""
    made: Callable[[], str | None] | None = getattr(source, "fingerprint", None)
    return made() if made is not None else None


def say_what_differs(plan: Plan, config: TrainConfig, now: Mapping[str, Any], note: Callable[[str], None]) -> None:
    """Where the resumed run will not give the bytes that it would have given in one go, say so and why."""
    if plan.checkpoint is None or plan.saved is None:
        return
    found = changes(plan.checkpoint.state.get("environment"), now)
    found += [
        f"{flag(n)} {getattr(plan.saved, n)} → {getattr(config, n)}"
        for n in ("engine", "chunk")
        if getattr(plan.saved, n) != getattr(config, n)
    ]
    if found:
        note(f"Not bit-equal to a run in one go from here on, since sums are rounded differently: {'; '.join(found)}.")


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


def claim(plan: Plan, config: TrainConfig, lock: RunLock) -> None:
    """Make the folder and write the configuration, which makes it a run."""
    folder = plan.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if plan.saved is None:
            lock.take(folder)
            _check_empty(folder)  # another process may have come first
        write_text(folder / CONFIG, config.to_json())
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written ({error.strerror}). Give a folder of yours on a disk with space left: --out FOLDER"
        ) from error
