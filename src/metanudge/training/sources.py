"""How a configuration becomes an episode source and a learner: which data it names, with which
options, and what a checkpoint remembers of them.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch

from metanudge.engines import StackingError
from metanudge.engines.randomness import mix
from metanudge.estimators.run import check_learnable
from metanudge.learner import MetaLearner
from metanudge.problem import UnmatchedPattern
from metanudge.rates import InnerRates, RatePer
from metanudge.tasks import SOURCES, Episodes, Given, Labelled
from metanudge.tasks.images import is_picture
from metanudge.tasks.omniglot_files import DownloadError
from metanudge.tasks.standardise import Standardisation
from metanudge.testing.curvature import curvature
from metanudge.training import specs
from metanudge.training.config import GIVEN, LearnLr, TrainConfig, flag
from metanudge.training.device import device_called
from metanudge.training.errors import UserError
from metanudge.training.spec_language import known, normal, show_options, split_options
from metanudge.training.specs import Shapes, convert, options_of

TABLES = (".csv", ".tsv")
_OWN_FLAGS = ("ways", "shots", "queries", "seed", "device", "dtype", *GIVEN)


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
    targets: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    target_scale: Standardisation | None = None

    @classmethod
    def of(cls, source: Shapes) -> DataShapes:
        """The shapes of a source, and how a table's columns were prepared."""
        shapes = source.kind, source.num_outputs, tuple(source.input_shape)
        if isinstance(source, (Given, DataShapes)):
            scales = source.columns, source.standardisation
            return cls(*shapes, *scales, source.targets, source.labels, source.target_scale)
        if isinstance(source, Labelled):
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
        if self.targets:
            values |= {"targets": list(self.targets), "labels": list(self.labels)}
        if self.target_scale is not None:
            values["target_mean"] = list(self.target_scale.mean)
            values["target_scale"] = list(self.target_scale.scale)
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DataShapes:
        """From `to_dict`'s result."""

        def scale(mean: str, scale: str) -> Standardisation | None:
            found = mean in values
            return Standardisation(tuple(values[mean]), tuple(values[scale])) if found else None

        return cls(
            values["kind"],
            values["num_outputs"],
            tuple(values["input_shape"]),
            tuple(values["columns"]) if "columns" in values else None,
            scale("mean", "scale"),
            tuple(values.get("targets", ())),
            tuple(values.get("labels", ())),
            scale("target_mean", "target_scale"),
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


class GivenTasks(Table):
    """A table with a task column, or a folder with one table a task."""

    def as_remembered(self, given: dict[str, Any], shapes: DataShapes) -> dict[str, Any]:
        """The same columns and targets on the same scales."""
        return super().as_remembered(given, shapes) | {"target_scale": shapes.target_scale}


def find_data(config: TrainConfig) -> Data:
    """The data set, folder or table that a configuration names."""
    text, default = config.data, TrainConfig()
    if not text:
        raise UserError(
            "What should be trained on? Name the data: metanudge train mnist1d (or omniglot,"
            " sinusoid, a folder with one sub-folder per class, a .csv file)."
        )
    given = {name: value for name in GIVEN if (value := getattr(config, name)) not in (None, "")}
    if any(given.get(name) not in (None, getattr(default, name)) for name in GIVEN):
        return _given(config, given)
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


def _given(config: TrainConfig, given: dict[str, Any]) -> Data:
    """Given tasks, as the flags lay them out."""
    path, said = Path(config.data).expanduser(), ", ".join(map(flag, given))
    if not path.is_dir() and not (path.is_file() and path.suffix.lower() in (*TABLES, ".parquet")):
        raise UserError(
            f"{said}: {config.data} is neither a .csv or .parquet file nor a folder with one for"
            " each task. Such flags are for given tasks."
        )
    targets = [name.strip() for name in config.target.split(",") if name.strip()]
    if not targets:
        raise UserError(f"{said}: which column is to be predicted? Name it with --target.")
    if config.task_column is None and not path.is_dir():
        raise UserError(
            f"{said}: which column names the task that a row belongs to? Name it with"
            " --task-column."
        )
    for name in ("ways", "shots", "queries"):
        if getattr(config, name) is not None:
            raise UserError(
                f"{flag(name)} {getattr(config, name)}: given tasks have the classes and rows that"
                " they have. --support says how many rows are adapted on."
            )
    for name in ("support", "time_column"):
        if config.split_column is not None and getattr(config, name) is not None:
            raise UserError(
                f"{flag(name)} and --split-column contradict each other: the column says which"
                " rows are adapted on. Leave one out."
            )
    given |= {"target": targets}
    make = functools.partial(Given.from_table, path, **given)
    return GivenTasks(str(path.resolve()), "given tasks", make)


def build_source(
    config: TrainConfig, *, device: torch.device | None = None, remembered: DataShapes | None = None
) -> Episodes:
    """The episodes that a configuration describes; with what a checkpoint remembers of the data,
    prepared as for it.
    """
    data = find_data(config)
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


def build_learner(config: TrainConfig, shapes: Shapes) -> MetaLearner:
    """The learner that a configuration describes, with its initial weights, on its device.

    `shapes` is an episode source, or anything else that says what the tasks look like.
    """
    device = device_called(config.device)
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
    data = find_data(config)
    if isinstance(source, Given):
        # a fraction is taken of what no column divides
        support = config.support or (None if config.split_column else 0.5)
        sizes: dict[str, Any] = {"support": support, "task_type": source.kind}
    else:
        ways = source.ways if source.kind == "classification" else None
        sizes = {"ways": ways, "shots": source.shots, "queries": source.queries}
    if normal(config.solver) == "auto" and isinstance(source, Given):
        config = dataclasses.replace(config, solver=_measured(config, source))
    return dataclasses.replace(
        config,
        data=data.name,
        **sizes,
        data_options=data.all_options(config.data_options, source),
        model=str(specs.parse_model(config.model, source)),
        solver=str(specs.parse_solver(config.solver, source.kind)),
        estimator=str(specs.parse_estimator(config.estimator)),
        optimizer=str(specs.parse_optimizer(config.optimizer)),
    )


def _measured(config: TrainConfig, source: Given) -> str:
    """Gradient descent with a step that suits the curvature of the first tasks: a tenth of what
    would solve the stiffest direction at once, since meta-training finds steeper places.
    """
    if source.kind == "classification":
        return config.solver
    try:
        curved = curvature(build_learner(config, source), source.batch(range(config.tasks)))
    except (RuntimeError, NotImplementedError, StackingError):  # no second derivatives side by side
        return config.solver
    # two digits, so that rounding elsewhere does not make another run of it
    return f"gradient_descent:lr={0.1 / (curved + config.lam):.2g},steps=10"
