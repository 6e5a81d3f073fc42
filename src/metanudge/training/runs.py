"""The folder of a run that was trained.

RUN/config.json        the configuration; `train --config` repeats it, `--resume RUN` goes on
RUN/metrics.jsonl      one line per meta-step; the same run gives the same bytes
RUN/timing.jsonl       seconds and memory of the meta-steps: what differs from machine to machine
RUN/checkpoints/       see `metanudge.training.checkpoint`
RUN/summary.json       the result
RUN/curve.png          the learning curve
RUN/eval-SPLIT.json    what `metanudge eval` found, and RUN/eval-SPLIT.png its plot
RUN/page.html          all of it to look at, by `metanudge page`
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
from typing import Any, Self

from metanudge.learner import MetaLearner
from metanudge.models import Prototypes
from metanudge.tasks import SOURCES, Episodes
from metanudge.training.checkpoint import Checkpoint, CheckpointError, CheckpointStore
from metanudge.training.config import MAY_CHANGE, Device, TrainConfig
from metanudge.training.data import DataShapes
from metanudge.training.device import computing_in
from metanudge.training.errors import ChangedError, UserError, count
from metanudge.training.loop import load_weights, weights_of
from metanudge.training.sources import build_learner, build_source, find_data
from metanudge.training.spec_language import normal, options_of, split_options
from metanudge.training.trust import check_trust
from metanudge.training.upgrade import upgrade

CONFIG, METRICS, TIMING, SUMMARY, CURVE, CHECKPOINTS, PAGE = (
    "config.json", "metrics.jsonl", "timing.jsonl", "summary.json", "curve.png", "checkpoints",
    "page.html",
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

    def for_ways(self, ways: int) -> Self:
        """The same learner for tasks of this number of classes; `UserError` where its last layer is
        fixed.
        """
        model = self.learner.model
        known = model.most if isinstance(model, Prototypes) else self.shapes.num_outputs
        if ways == known:
            return self
        if not isinstance(model, Prototypes):
            raise UserError(
                f"{self.folder} was trained for {known} ways, and its last layer has as many"
                f" outputs: it cannot tell {ways} classes apart. Use {known}, or train a run with"
                f" --ways {ways}, or one for any number of classes: --head prototypes."
            )
        if ways < 2:
            raise UserError(f"{ways} way leaves nothing to tell apart. Use 2 or more.")
        learner = build_learner(self.config, self.shapes, ways=ways)
        # rows of the head that training has not seen are as they begin: 0
        weights, own = weights_of(learner), weights_of(self.learner)
        for part, tensors in weights.items():
            for name, tensor in tensors.items():
                rows = ... if tensor.shape == own[part][name].shape else slice(min(ways, known))
                tensor[rows] = own[part][name][rows]
        return dataclasses.replace(self, learner=learner)

    def elsewhere(
        self,
        *,
        data: str | None = None,
        ways: int | str | None = None,
        shots: int | str | None = None,
        queries: int | None = None,
    ) -> Self:
        """The same learner with tasks of other sizes, or of other data of the same kind, all of
        whose classes (given tasks: all tasks) are in the test split; None: as in training.
        """
        sizes = {"ways": ways, "shots": shots, "queries": queries}
        given: dict[str, Any] = {n: value for n, value in sizes.items() if value is not None}
        config = dataclasses.replace(self.config, **given)
        config.check()
        run = self
        changing = self.shapes.kind == "classification" and not self.shapes.labels
        if changing and (most := count("--ways", ways)) is not None:
            run = self.for_ways(most if isinstance(most, int) else most[1])
        if data is not None:
            config = dataclasses.replace(config, data=data)
            config = dataclasses.replace(config, data_options=_as_test_data(self, config))
        run = dataclasses.replace(run, config=config)
        found = DataShapes.of(run.source)
        of_tokens = found.form is not None and not found.form.encoder
        for what in ("labels",) if of_tokens else ("input_shape", "labels"):
            was, now = getattr(self.shapes, what), getattr(found, what)
            if was != now:
                named = {"input_shape": "examples of shape", "labels": "the classes"}[what]
                raise UserError(
                    f"--data {data} has {named} {now}, but {self.folder} was trained on {was}. Give"
                    " data of the same kind."
                )
        return run

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


def _as_test_data(run: Run, config: TrainConfig) -> str:
    """The run's data options that the data of another configuration have, too, with all of their
    classes for testing.
    """
    if {run.config.data, normal(config.data)} & SOURCES.keys() and run.config.data != config.data:
        raise UserError(
            f"--data {config.data} is not of the kind that {run.folder} was trained on,"
            f" {run.config.data}. Give data of the same kind."
        )
    if config.data in SOURCES:
        return config.data_options
    declared = options_of(find_data(config).make)
    options = split_options(config.data_options, "--data-options")
    kept = {n: o for n, o in options.items() if n in declared and not n.startswith("split")}
    return ",".join(f"{name}={text}" for name, text in {**kept, "splits": "(0,0,1)"}.items())


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
