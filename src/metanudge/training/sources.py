"""How a configuration becomes an episode source and a learner: which data it names, with which
options, and what a checkpoint remembers of them.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch

from metanudge.engines.randomness import mix
from metanudge.estimators.run import check_learnable
from metanudge.learner import MetaLearner
from metanudge.problem import UnmatchedPattern
from metanudge.rates import InnerRates, RatePer
from metanudge.tasks import SOURCES, Episodes, Labelled
from metanudge.tasks.images import is_picture
from metanudge.tasks.omniglot_files import DownloadError
from metanudge.tasks.standardise import Standardisation
from metanudge.training import specs
from metanudge.training.config import LearnLr, TrainConfig, flag
from metanudge.training.device import computing_in, device_called
from metanudge.training.errors import UserError
from metanudge.training.spec_language import known, normal, show_options, split_options
from metanudge.training.specs import Shapes, convert, options_of

TABLES = (".csv", ".tsv")
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
        shapes = source.kind, source.num_outputs, tuple(source.input_shape)
        if isinstance(source, (Labelled, DataShapes)):
            return cls(*shapes, source.columns, source.standardisation)
        return cls(*shapes)

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
            values["mean"] = list(self.standardisation.mean)
            values["scale"] = list(self.standardisation.scale)
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DataShapes:
        """From `to_dict`'s result."""
        standardisation = None
        if "mean" in values:
            standardisation = Standardisation(tuple(values["mean"]), tuple(values["scale"]))
        return cls(
            values["kind"],
            values["num_outputs"],
            tuple(values["input_shape"]),
            tuple(values["columns"]) if "columns" in values else None,
            standardisation,
        )


@dataclass(frozen=True)
class Data:
    """Data that a configuration names.

    Attributes:
        name: as a finished configuration writes it.
        what: as messages call it.
        make: makes the source; its signature declares the data's options.
        has_classes: whether a task has ways.
    """

    name: str
    what: str
    make: Callable[..., Episodes]
    has_classes: bool = True

    def options(self, text: str) -> dict[str, Any]:
        """What `--data-options` says, as the types that are declared."""
        raw = split_options(text, "--data-options")
        for key in raw:
            if key in _OWN_FLAGS:
                raise UserError(
                    f"--data-options: {key} has a flag of its own. Use {flag(key)} {raw[key]}."
                )
        return convert(raw, self.make, "--data-options", f"of {self.what}", but=_OWN_FLAGS)

    def all_options(self, text: str, source: Episodes) -> str:
        """Every option that has a value, as text, with what the source decided by itself: what a
        later version does by default changes no recorded run.
        """
        given = self.options(text)
        given |= self.decided(given, source)
        declared = options_of(self.make).items()
        values = {name: option.default for name, option in declared if name not in _OWN_FLAGS}
        values |= given
        return show_options({n: v for n, v in values.items() if v is not None or n in given})

    def decided(self, given: dict[str, Any], source: Episodes) -> dict[str, Any]:
        """The options that were left to the source, as it decided them."""
        return {}

    def as_remembered(self, given: dict[str, Any], shapes: DataShapes) -> dict[str, Any]:
        """The options with which examples are prepared as those of a checkpoint were."""
        return given


class Folder(Data):
    """A folder with one sub-folder per class."""

    def decided(self, given: dict[str, Any], source: Episodes) -> dict[str, Any]:
        """The size and channels of pictures."""
        if not is_picture(source.input_shape):
            return {}
        channels, height, width = source.input_shape
        found: dict[str, Any] = {}
        if given.get("image_size", "auto") == "auto":
            found["image_size"] = height if height == width else (height, width)
        if given.get("grey") is None:
            found["grey"] = channels == 1
        return found

    def as_remembered(self, given: dict[str, Any], shapes: DataShapes) -> dict[str, Any]:
        """Pictures of the same size and channels, numbers on the same scale."""
        fixed: dict[str, Any] = {}
        if is_picture(shapes.input_shape):
            fixed = {"image_size": shapes.input_shape[1:], "grey": shapes.input_shape[0] == 1}
        return {**fixed, **given, "standardise": shapes.standardisation or False}


class Table(Data):
    """A .csv file."""

    def as_remembered(self, given: dict[str, Any], shapes: DataShapes) -> dict[str, Any]:
        """The same columns on the same scale."""
        fixed = {} if shapes.columns is None else {"features": shapes.columns}
        return {**fixed, **given, "standardise": shapes.standardisation or False}


def find_data(text: str) -> Data:
    """The data set, folder or table that a configuration names."""
    if not text:
        raise UserError(
            "What should be trained on? Name the data: metanudge train mnist1d (or omniglot,"
            " sinusoid, a folder with one sub-folder per class, a .csv file)."
        )
    if (name := normal(text)) in SOURCES:
        return Data(name, name, SOURCES[name], SOURCES[name].kind == "classification")
    path = Path(text).expanduser()
    whole = str(path.resolve())
    if path.is_dir():
        return Folder(whole, "a folder", functools.partial(Labelled.from_folder, path))
    if path.is_file():
        if path.suffix.lower() not in TABLES:
            raise UserError(
                f"{path} is a file, but not a .csv. Give a folder with one sub-folder per class, or"
                " a .csv file."
            )
        return Table(whole, "a .csv file", functools.partial(Labelled.from_csv, path))
    if os.sep in text or path.suffix:
        raise UserError(
            f"There is no file or folder {text}. Give a folder with one sub-folder per class, or a"
            " .csv file."
        )
    known(text, SOURCES, "data", "data set or folder")
    raise AssertionError("unreachable")


def build_source(
    config: TrainConfig, *, device: torch.device | None = None, remembered: DataShapes | None = None
) -> Episodes:
    """The episodes that a configuration describes; with what a checkpoint remembers of the data,
    prepared as for it.
    """
    data = find_data(config.data)
    options = data.options(config.data_options)
    if remembered is not None:
        options = data.as_remembered(options, remembered)
    if config.ways is not None and not data.has_classes:
        raise UserError(
            f"--ways {config.ways}: {data.what} tasks are regression and have no classes. Leave"
            " --ways out."
        )
    sizes = {"ways": config.ways, "shots": config.shots, "queries": config.queries}
    options |= {name: size for name, size in sizes.items() if size is not None}
    place = device if device is not None else device_called(config.device)
    dtype = getattr(torch, config.dtype)
    try:
        return data.make(**options, seed=config.seed, device=place, dtype=dtype)
    except (TypeError, ValueError) as error:
        raise UserError(f"{config.data}: {error}") from error
    except OSError as error:
        raise UserError(f"{config.data} cannot be read: {error}") from error
    except DownloadError as error:
        raise UserError(
            f"{config.data}: {error} On the command line, root is --data-options root=FOLDER. Where"
            f" there is a network, metanudge data fetch {data.name} gets the files and says where"
            " they are."
        ) from error


def check_splits(config: TrainConfig, source: Episodes) -> None:
    """Draw one task of every split that the run will use, so that a split without enough classes is
    refused at the start.
    """
    needed: list[tuple[Literal["train", "val", "test"], bool, str]] = [
        ("train", True, ""),
        ("val", config.eval_every > 0, "--eval-every 0"),
        ("test", config.test_tasks > 0, "--test-tasks 0"),
    ]
    for split, used, off in needed:
        if used:
            try:
                source.task(0, split)
            except ValueError as error:
                without = f" Or do without this split: {off}." if off else ""
                raise UserError(f"{config.data}: {error}{without}") from error


# The learner


def choose_device(config: TrainConfig) -> torch.device:
    """The device of a run."""
    return device_called(config.device)


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
            learn_lr=_inner_rates(config.learn_lr),
            adapt=None if config.adapt == "*" else config.patterns,
            solver=solver,
            estimator=estimator,
            engine=config.engine,
            chunk=config.chunk,
            compile=config.compile,
            seed=config.seed,
        )
        check_learnable(estimator, learner.problem())
    except UnmatchedPattern as error:
        raise UserError(f"--adapt {error.pattern!r} {error.problem}") from error
    except (TypeError, ValueError) as error:
        raise UserError(str(error)) from error
    return learner


def _inner_rates(word: LearnLr) -> InnerRates | None:
    if word == "none":
        return None
    per = cast(RatePer, word.removeprefix("signed-"))
    return InnerRates(per, positive=not word.startswith("signed-"))


def resolve(config: TrainConfig, source: Episodes) -> TrainConfig:
    """The configuration with every choice written out in one fixed way: specs canonical, `auto`
    decided, paths absolute.
    """
    data = find_data(config.data)
    return dataclasses.replace(
        config,
        data=data.name,
        ways=source.ways if source.kind == "classification" else None,
        shots=source.shots,
        queries=source.queries,
        data_options=data.all_options(config.data_options, source),
        model=str(specs.parse_model(config.model, source)),
        solver=str(specs.parse_solver(config.solver, source.kind)),
        estimator=str(specs.parse_estimator(config.estimator)),
        optimizer=str(specs.parse_optimizer(config.optimizer)),
    )


def precision(config: TrainConfig, device: torch.device) -> AbstractContextManager[None]:
    """A context in which torch computes as a configuration asks for."""
    return computing_in(config.precision, device)
