"""A run that goes on: it must be the run it was, on the data it had; and what cannot be repeated to
the last bit is said.
"""

from __future__ import annotations

import dataclasses
import reprlib
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metanudge.tasks import Episodes
from metanudge.training.checkpoint import Checkpoint, CheckpointError, CheckpointStore
from metanudge.training.checkpoint.sharded import hollow
from metanudge.training.config import MAY_CHANGE, TrainConfig, flag
from metanudge.training.device import changes
from metanudge.training.errors import UserError
from metanudge.training.files import RunLock
from metanudge.training.metrics import check_metrics
from metanudge.training.runs import CHECKPOINTS, CONFIG, METRICS, check_config, read_config
from metanudge.training.sources import resolve


@dataclass(frozen=True)
class Plan:
    """Where a run lives and where it begins; made by rank 0 without writing anything."""

    folder: Path
    saved: TrainConfig | None = None  # the configuration in the folder, for a run that goes on
    checkpoint: Checkpoint | None = None
    named: bool = (
        True  # the user chose the folder; where not, `claim` adds a number to a name that is taken
    )

    def hollow(self) -> Plan:
        """What the other ranks get of it, see `checkpoint.sharded.hollow`."""
        found = self.checkpoint and hollow(self.checkpoint)
        return dataclasses.replace(self, checkpoint=found)


def read_run(folder: Path, chosen: str, lock: RunLock) -> tuple[TrainConfig, Checkpoint | None]:
    """The configuration and the checkpoint of a run that goes on, locked and all of it verified."""
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
    return saved, checkpoint


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


def check_unchanged(plan: Plan, config: TrainConfig, source: Episodes) -> TrainConfig:
    """The configuration to go on with: as it was recorded, but for what may change; `UserError`
    where more has changed.
    """
    assert plan.saved is not None
    sizes = ("ways", "shots", "queries")  # the source has those that are asked for now
    kept: dict[str, Any] = {n: size for n in sizes if (size := getattr(plan.saved, n)) is not None}
    saved = dataclasses.replace(resolve(plan.saved, source), out=config.out, **kept)
    changed = saved.differences(config)
    fixed = [
        name
        for name in changed
        if name not in MAY_CHANGE or (name == "iterations" and config.schedule == "cosine")
    ]
    if fixed:
        detail = "; ".join(
            f"{flag(name)} was {changed[name][0]!r}, now {changed[name][1]!r}" for name in fixed
        )
        raise UserError(
            f"{plan.folder} was started with another configuration ({detail}), and would not be the"
            " same run any more. Leave these flags out to continue it, or start a new run with"
            f" another --out. A resumed run may change {', '.join(map(flag, MAY_CHANGE))}."
        )
    done = plan.checkpoint.step if plan.checkpoint is not None else 0
    if config.iterations < done:
        raise UserError(
            f"--iterations {config.iterations}: {plan.folder} has already done {done} meta-steps."
            f" Give {done} or more."
        )
    return dataclasses.replace(
        plan.saved, out=config.out, **{name: getattr(config, name) for name in MAY_CHANGE}
    )


def check_data(plan: Plan, source: Episodes, *, allow: bool, note: Callable[[str], None]) -> None:
    """Refuse to go on with other data than those the checkpoint was trained on, unless that is
    allowed.
    """
    was, now = (
        plan.checkpoint.state.get("data_sha256") if plan.checkpoint is not None else None,
        source.fingerprint(),
    )
    if was is None or now is None or was == now:
        return
    assert plan.saved is not None
    if not allow:
        raise UserError(
            f"{plan.saved.data} has changed since {plan.folder} was trained on it (its sha256 was"
            f" {was[:12]}…, now {now[:12]}…), and the result would be of neither. Put the data"
            " back, start a new run, or go on nevertheless with --allow-changed-data."
        )
    note(
        f"{plan.saved.data} has changed since this run was trained on it: from here on it is"
        " another run."
    )


def say_what_differs(
    plan: Plan, config: TrainConfig, now: Mapping[str, Any], note: Callable[[str], None]
) -> None:
    """Where the resumed run will not give the bytes that it would have given in one go, say so and
    why.
    """
    if plan.checkpoint is None or plan.saved is None:
        return
    found = changes(plan.checkpoint.state.get("environment"), now)
    found += [
        f"{flag(n)} {getattr(plan.saved, n)} → {getattr(config, n)}"
        for n in ("engine", "chunk", "shard")
        if getattr(plan.saved, n) != getattr(config, n)
    ]
    if found:
        note(
            "Not bit-equal to a run in one go from here on, since sums are rounded differently:"
            f" {'; '.join(found)}."
        )
