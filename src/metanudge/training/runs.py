"""The folder of a run, and how a configuration becomes a data source and a learner.

RUN/config.json        the configuration; `train --config` repeats it, `--resume RUN` goes on
RUN/metrics.jsonl      one line per meta-step; the same run gives the same bytes
RUN/timing.jsonl       seconds and memory of the meta-steps: what differs from machine to machine
RUN/checkpoints/       see `metanudge.training.checkpoint`
RUN/summary.json       the result
RUN/curve.png          the learning curve
RUN/.lock              who writes to it, see `metanudge.training.lock`
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
import shlex
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch

from metanudge import tasks
from metanudge.engines.randomness import mix
from metanudge.learner import MetaLearner
from metanudge.tasks import Episodes
from metanudge.tasks.images import is_picture
from metanudge.tasks.omniglot_files import DownloadError
from metanudge.tasks.standardise import Standardisation
from metanudge.training import specs
from metanudge.training.checkpoint import Checkpoint, CheckpointError, CheckpointStore
from metanudge.training.config import MAY_CHANGE, ChangedError, Device, TrainConfig, flag
from metanudge.training.device import device_called
from metanudge.training.errors import UserError
from metanudge.training.loop import load_weights
from metanudge.training.precision import computing_in
from metanudge.training.specs import Shapes, convert, known, normal, show, split_options
from metanudge.training.trust import check_trust
from metanudge.training.upgrade import upgrade

CONFIG, METRICS, TIMING, SUMMARY, CURVE, CHECKPOINTS = (
    "config.json", "metrics.jsonl", "timing.jsonl", "summary.json", "curve.png", "checkpoints",
)  # fmt: skip
_SOURCES: dict[str, type[Episodes]] = {
    "mnist1d": tasks.MNIST1D,
    "omniglot": tasks.Omniglot,
    "sinusoid": tasks.Sinusoid,
}
_OWN_FLAGS = ("ways", "shots", "queries", "seed", "device", "dtype")


@dataclass(frozen=True)
class DataShapes:
    """What a checkpoint remembers of the data, so that a model can be built without them and inputs
    be prepared as in training.
    """

    kind: Literal["classification", "regression"]
    num_outputs: int
    input_shape: tuple[int, ...]
    columns: tuple[str, ...] | None = None
    standardisation: Standardisation | None = None

    @classmethod
    def of(cls, source: Shapes) -> DataShapes:
        """The shapes of a source, and how a table's columns were prepared."""
        table = getattr(source, "columns", None), getattr(source, "standardisation", None)
        return cls(source.kind, source.num_outputs, tuple(source.input_shape), *table)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; what there is none of is left out."""
        values: dict[str, Any] = {
            "kind": self.kind,
            "num_outputs": self.num_outputs,
            "input_shape": list(self.input_shape),
        }
        if self.columns is not None:
            values["columns"] = list(self.columns)
        if self.standardisation is not None:
            values |= {
                "mean": list(self.standardisation.mean),
                "scale": list(self.standardisation.scale),
            }
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DataShapes:
        """From `to_dict`'s result."""
        columns = tuple(values["columns"]) if "columns" in values else None
        standardisation = (
            Standardisation(tuple(values["mean"]), tuple(values["scale"]))
            if "mean" in values
            else None
        )
        return cls(
            values["kind"],
            values["num_outputs"],
            tuple(values["input_shape"]),
            columns,
            standardisation,
        )


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
        return build_source(self.config, device=device, remembered=self.shapes)

    def precision(self) -> Any:
        """A context in which the learner computes as it did in training."""
        return precision(self.config, next(self.learner.parameters()).device)


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


# --- From a configuration to objects
# ---------------------------------------------------------------------------------


def choose_device(config: TrainConfig) -> torch.device:
    """The device of a run."""
    return device_called(config.device)


def build_source(
    config: TrainConfig, *, device: torch.device | None = None, remembered: DataShapes | None = None
) -> Episodes:
    """The episodes that a configuration describes; with what a checkpoint remembers of the data,
    prepared as for it.
    """
    place = device if device is not None else choose_device(config)
    dtype = getattr(torch, config.dtype)
    make, declared, what = _source_factory(config.data)
    raw = split_options(config.data_options, "--data-options")
    for key in raw:
        if key in _OWN_FLAGS:
            raise UserError(
                f"--data-options: {key} has a flag of its own. Use {flag(key)} {raw[key]}."
            )
    options = convert(raw, declared, "--data-options", f"of {what}")
    if remembered is not None:
        options = _as_remembered(options, declared, remembered)
    for name in ("ways", "shots", "queries"):
        value = getattr(config, name)
        if value is not None:
            if name == "ways" and what == "sinusoid":
                raise UserError(
                    f"--ways {value}: sinusoid tasks are regression and have no classes. Leave"
                    " --ways out."
                )
            options[name] = value
    try:
        source = make(**options, seed=config.seed, device=place, dtype=dtype)
    except (TypeError, ValueError) as error:
        raise UserError(f"{config.data}: {error}") from error
    except OSError as error:
        raise UserError(f"{config.data} cannot be read: {error}") from error
    except DownloadError as error:
        raise UserError(
            f"{config.data}: {error} On the command line, root is --data-options root=FOLDER. Where"
            f" there is a network, metanudge data fetch {normal(config.data)} gets the files and"
            " says where they are."
        ) from error
    return source


def check_splits(config: TrainConfig, source: Episodes) -> None:
    """Draw one task of every split that the run will use, so that a split without enough classes is
    refused at the start.
    """
    needed = [
        ("train", True, ""),
        ("val", config.eval_every > 0, "--eval-every 0"),
        ("test", config.test_tasks > 0, "--test-tasks 0"),
    ]
    for split, used, off in needed:
        if used:
            try:
                source.task(0, split)  # type: ignore[arg-type]
            except ValueError as error:
                without = f" Or do without this split: {off}." if off else ""
                raise UserError(f"{config.data}: {error}{without}") from error


def _source_factory(data: str) -> tuple[Callable[..., Episodes], Any, str]:
    """What makes the source, what declares its options, and its name."""
    if not data:
        raise UserError(
            "What should be trained on? Name the data: metanudge train mnist1d (or omniglot,"
            " sinusoid, a folder with one sub-folder per class, a .csv file)."
        )
    names = {normal(name): name for name in _SOURCES}
    if normal(data) in names:
        name = names[normal(data)]
        return _SOURCES[name], _SOURCES[name], name
    path = Path(data).expanduser()
    if path.is_dir():
        return lambda **o: tasks.Labelled.from_folder(path, **o), _folder_options, "a folder"
    if path.is_file():
        if path.suffix.lower() not in (".csv", ".tsv"):
            raise UserError(
                f"{path} is a file, but not a .csv. Give a folder with one sub-folder per class, or"
                " a .csv file."
            )
        return lambda **o: tasks.Labelled.from_csv(path, **o), _csv_options, "a .csv file"
    if os.sep in data or path.suffix:
        raise UserError(
            f"There is no file or folder {data}. Give a folder with one sub-folder per class, or a"
            " .csv file."
        )
    known(data, _SOURCES, "data", "data set or folder")
    raise AssertionError("unreachable")


def _folder_options(
    *,
    image_size: int | tuple[int, int] | Literal["auto"] | None = "auto",
    grey: bool | None = None,
    standardise: bool = False,
    splits: tuple[float, ...] | dict[str, list[str]] = (0.64, 0.16, 0.2),
    split_seed: int = 0,
    drop_small: bool = False,
) -> None:
    """The options of `Labelled.from_folder` that have no flag of their own; read, never called."""


def _csv_options(
    *,
    label: str = "label",
    features: tuple[str, ...] | None = None,
    delimiter: str | None = None,
    standardise: bool = True,
    splits: tuple[float, ...] | dict[str, list[str]] = (0.64, 0.16, 0.2),
    split_seed: int = 0,
    drop_small: bool = False,
) -> None:
    """The options of `Labelled.from_csv` that have no flag of their own; read, never called."""


def _as_remembered(options: dict[str, Any], declared: Any, shapes: DataShapes) -> dict[str, Any]:
    """The options of a folder or table such that its examples are prepared as those of a checkpoint
    were.
    """
    if declared not in (_csv_options, _folder_options):
        return options
    fixed: dict[str, Any] = {} if shapes.columns is None else {"features": shapes.columns}
    if declared is _folder_options and is_picture(shapes.input_shape):
        fixed = {"image_size": shapes.input_shape[1:], "grey": shapes.input_shape[0] == 1}
    return fixed | options | {"standardise": shapes.standardisation or False}


def build_learner(config: TrainConfig, shapes: Shapes) -> MetaLearner:
    """The learner that a configuration describes, with its initial weights, on its device.

    `shapes` is an episode source, or anything else that says what the tasks look like.
    """
    device = choose_device(config)
    solver, estimator = (
        specs.build_solver(config.solver, shapes.kind),
        specs.build_estimator(config.estimator),
    )
    # Weights are drawn on the CPU, so that they are the same wherever the run goes.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(mix(config.seed, 1))
        model = specs.build_model(config.model, shapes)
    model = model.to(device, getattr(torch, config.dtype)).train()
    loss = (
        torch.nn.functional.cross_entropy
        if shapes.kind == "classification"
        else torch.nn.functional.mse_loss
    )
    try:
        estimator.check(solver)
        learner = MetaLearner(
            model,
            loss,
            lam=config.lam,
            learn_lam=None if config.learn_lam == "none" else config.learn_lam,
            adapt=None if config.adapt == "*" else config.patterns,
            solver=solver,
            estimator=estimator,
            engine=config.engine,
            chunk=config.chunk,
            compile=config.compile,
            seed=config.seed,
        )
        estimator.check_problem(learner.problem())
    except (TypeError, ValueError) as error:
        raise UserError(_as_flags(str(error))) from error
    return learner


def _as_flags(message: str) -> str:
    """A message of the library in the words of the command line."""
    return re.sub(r"\b(learn_lam|adapt)=", lambda found: f"{flag(found[1])} ", message)


def resolve(config: TrainConfig, source: Episodes) -> TrainConfig:
    """The configuration with every choice written out in one fixed way: specs canonical, `auto`
    decided, paths absolute.
    """
    data = config.data
    data = normal(data) if normal(data) in _SOURCES else str(Path(data).expanduser().resolve())
    return dataclasses.replace(
        config,
        data=data,
        ways=source.ways if source.kind == "classification" else None,
        shots=source.shots,
        queries=source.queries,
        data_options=_all_options(
            dataclasses.replace(config, data_options=_with_image_size(config, source))
        ),
        model=str(specs.parse_model(config.model, source)),
        solver=str(specs.parse_solver(config.solver, source.kind)),
        estimator=str(specs.parse_estimator(config.estimator)),
        optimizer=str(specs.parse_optimizer(config.optimizer)),
    )


def _with_image_size(config: TrainConfig, source: Episodes) -> str:
    """The data's options with the size and channels that were decided for the pictures of a
    folder.
    """
    if (
        normal(config.data) in _SOURCES
        or not Path(config.data).expanduser().is_dir()
        or not is_picture(source.input_shape)
    ):
        return config.data_options
    given = split_options(config.data_options, "--data-options")
    channels, height, width = source.input_shape
    if given.get("image_size", "auto").lower() == "auto":
        given["image_size"] = show(height if height == width else (height, width))
    if given.get("grey", "none").lower() in ("none", "null"):
        given["grey"] = show(channels == 1)
    return ",".join(f"{key}={value}" for key, value in given.items())


def _all_options(config: TrainConfig) -> str:
    """Every data option that has a value: what a later version does by default changes no recorded
    run.
    """
    _, declared, what = _source_factory(config.data)
    given = convert(
        split_options(config.data_options, "--data-options"),
        declared,
        "--data-options",
        f"of {what}",
    )
    defaults = {
        n: p.default
        for n, p in inspect.signature(declared).parameters.items()
        if n not in _OWN_FLAGS
    }
    return ",".join(
        f"{name}={show(value)}"
        for name, value in (defaults | given).items()
        if value is not None or name in given
    )


def precision(config: TrainConfig, device: torch.device) -> AbstractContextManager[None]:
    """A context in which torch computes as a configuration asks for."""
    return computing_in(config.precision, device)


__all__ = [
    "CheckpointError",
    "Run",
    "build_learner",
    "build_source",
    "choose_device",
    "load",
    "load_weights",
    "precision",
    "read_config",
    "resolve",
]
