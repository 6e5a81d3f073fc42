"""The folder of a run that was trained.

RUN/config.json        the configuration; `train --config` repeats it, `--resume RUN` goes on
RUN/metrics.jsonl      one line per meta-step; the same run gives the same bytes
RUN/timing.jsonl       seconds and memory of the meta-steps: what differs from machine to machine
RUN/checkpoints/       see `metanudge.training.checkpoint`
RUN/summary.json       the result
RUN/curve.png          the learning curve
RUN/.lock              who writes to it, see `metanudge.training.files.RunLock`
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from metanudge.learner import MetaLearner
from metanudge.tasks import Episodes
from metanudge.training.checkpoint import Checkpoint, CheckpointError, CheckpointStore
from metanudge.training.config import MAY_CHANGE, Device, TrainConfig
from metanudge.training.data import DataShapes
from metanudge.training.device import computing_in
from metanudge.training.errors import ChangedError, UserError
from metanudge.training.loop import load_weights
from metanudge.training.sources import (
    build_learner,
    build_source,
    check_splits,
    resolve,
)
from metanudge.training.trust import check_trust
from metanudge.training.upgrade import upgrade

CONFIG, METRICS, TIMING, SUMMARY, CURVE, CHECKPOINTS = (
    "config.json", "metrics.jsonl", "timing.jsonl", "summary.json", "curve.png", "checkpoints",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A run that was trained: its configuration, the learner with the checkpoint's weights, and the
    checkpoint.

    Attributes:
        folder: of the run.
        config: as the run was started.
        learner: on its device, ready for `adapt` and `evaluate`.
        state: the checkpoint that was loaded (`state.step`, `state.tensors`, `state.state`).
        shapes: what the data look like.
    """

    folder: Path
    config: TrainConfig
    learner: MetaLearner
    state: Checkpoint
    shapes: DataShapes

    @cached_property
    def source(self) -> Episodes:
        """The episodes the run was trained on; read when first asked for."""
        device = next(self.learner.parameters()).device
        # in use, nothing is augmented
        config = dataclasses.replace(self.config, augment="none", augment_query=False)
        return build_source(config, device=device, remembered=self.shapes)

    def precision(self) -> Any:
        """A context in which the learner computes as it did in training."""
        return computing_in(self.config.precision, next(self.learner.parameters()).device)


def load(
    run: str | os.PathLike[str],
    *,
    checkpoint: str = "best",
    device: Device | None = None,
    trust: bool = False,
) -> Run:
    """A run from its folder, with the weights of a checkpoint: `"best"` (the last where there is
    none), `"last"`, or a name.

    Args:
        run: the folder that `metanudge train` wrote.
        checkpoint: which weights.
        device: "cpu", "cuda" or "auto"; the run's own when None.
        trust: import the code that the run's configuration names, where its model is not one of
            ours (module:attribute).

    Raises `UserError` where there is no such run, and `CheckpointError` where a checkpoint is
    damaged.
    """
    folder = Path(run)
    # nothing is sent where nothing is trained
    config = read_config(folder, trust=trust, but=("wandb",))
    if device is not None:
        config = dataclasses.replace(config, device=device)
    store = CheckpointStore(folder / CHECKPOINTS)
    entries = store.list()
    if not entries:
        raise UserError(
            f"{folder} holds no checkpoint yet. Continue it with: metanudge train --resume {folder}"
        )
    if checkpoint == "best" and not any(entry.best for entry in entries):
        checkpoint = "last"
    state = store.load(int(checkpoint) if re.fullmatch("[0-9]{1,18}", checkpoint) else checkpoint)
    check_config(folder, config, state)
    try:
        shapes = DataShapes.from_dict(state.state["shapes"])
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{state.folder} does not say what the data looked like ({error!r}). Give a folder that"
            " metanudge train wrote."
        ) from error
    learner = build_learner(config, shapes)
    load_weights(learner, state)
    return Run(folder, config, learner, state, shapes)


def read_config(folder: Path, *, trust: bool = False, but: Collection[str] = ()) -> TrainConfig:
    """The configuration of a run folder; without `trust`, settings that import code or send data
    away are refused (see `check_trust`).
    """
    file = folder / CONFIG
    if not folder.is_dir():
        raise UserError(f"There is no run {folder}. Give the folder that metanudge train wrote.")
    if not os.path.lexists(file):
        raise UserError(
            f"{folder} is not a run: it has no {CONFIG}. Give the folder that metanudge train"
            " wrote."
        )
    try:
        config = TrainConfig.read(file)
    except ChangedError as changed:
        with suppress(CheckpointError):
            check_config(
                folder, changed.config, CheckpointStore(folder / CHECKPOINTS).load(), may_change=()
            )
        raise
    if not trust:
        check_trust(config, file, but=but)
    return config


def check_config(
    folder: Path,
    config: TrainConfig,
    checkpoint: Checkpoint,
    *,
    may_change: Collection[str] = MAY_CHANGE,
) -> None:
    """Refuse a configuration that is not the one its checkpoint was made with, by the settings that
    differ.
    """
    copy, where = (
        checkpoint.state.get("config"),
        f"{checkpoint.folder}: the configuration in its state",
    )
    if not isinstance(copy, dict):
        return  # saved by a program that keeps its configuration elsewhere
    copied = TrainConfig.from_dict(
        upgrade(copy, checkpoint.state.get("version"), where=where), where=where
    )
    changed = {
        name: values
        for name, values in copied.differences(config).items()
        if name not in (*may_change, "out")
    }
    if changed:
        detail = "; ".join(
            f"{name} was {was!r}, now {now!r}" for name, (was, now) in changed.items()
        )
        raise UserError(
            f"{folder / CONFIG} was changed after the run wrote it ({detail}), so the run is not"
            " what it says. Put back what was there; for a run with other settings: metanudge"
            f" train --config {shlex.quote(str(folder / CONFIG))} with flags, and another --out."
        )


__all__ = [
    "CheckpointError",
    "DataShapes",
    "Run",
    "build_learner",
    "build_source",
    "check_splits",
    "load",
    "load_weights",
    "read_config",
    "resolve",
]
