"""Data that a configuration names: their options, and what a checkpoint remembers of them; those of
the user's own: folders, tables, given tasks, code.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from metanudge.tasks import EncodedText, Episodes, Given, Labelled, Text
from metanudge.tasks.images import is_picture
from metanudge.tasks.standardise import Standardisation
from metanudge.tasks.text import TextForm
from metanudge.training.config import GIVEN, TrainConfig, flag
from metanudge.training.errors import UserError
from metanudge.training.spec_language import (
    convert,
    make,
    options_of,
    show_options,
    split_options,
)
from metanudge.training.specs import Shapes, function, named

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
    form: TextForm | None = None

    @classmethod
    def of(cls, source: Shapes) -> DataShapes:
        """The shapes of a source, and how a table's columns were prepared."""
        shapes = source.kind, source.num_outputs, tuple(source.input_shape)
        if isinstance(source, (Given, DataShapes)):
            scales = source.columns, source.standardisation
            named = source.targets, source.labels
            form = source.form if isinstance(source, DataShapes) else None
            return cls(*shapes, *scales, *named, source.target_scale, form)
        if isinstance(source, Labelled):
            form = source.form if isinstance(source, EncodedText) else None
            return cls(*shapes, source.columns, source.standardisation, form=form)
        return cls(*shapes, form=source.form if isinstance(source, Text) else None)

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
        if self.form is not None:
            values["form"] = self.form.to_dict()
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
            TextForm(**values["form"]) if "form" in values else None,
        )


@dataclass(frozen=True)
class Data:
    """Data that a configuration names.

    Attributes:
        name: as a finished configuration writes it.
        what: as messages call it.
        make: makes the source; its signature declares the data's options.
        has_classes: whether a task has ways.
        own_flags: its options that are flags of their own.
    """

    name: str
    what: str
    make: Callable[..., Episodes]
    has_classes: bool = True
    own_flags: tuple[str, ...] = ()

    @property
    def _flags(self) -> tuple[str, ...]:
        return _OWN_FLAGS + self.own_flags

    def build(self, **options: Any) -> Episodes:
        """The source, with its options, sizes and stream."""
        return self.make(**options)

    def options(self, text: str) -> dict[str, Any]:
        """What `--data-options` says, as the types that are declared."""
        raw = split_options(text, "--data-options")
        for key in raw:
            if key in self._flags:
                raise UserError(
                    f"--data-options: {key} has a flag of its own. Use {flag(key)} {raw[key]}."
                )
        return convert(raw, self.make, "--data-options", f"of {self.what}", but=self._flags)

    def all_options(self, text: str, source: Episodes) -> str:
        """Every option that has a value, as text, with what the source decided by itself: what a
        later version does by default changes no recorded run.
        """
        given = self.options(text)
        given |= self.decided(given, source)
        declared = options_of(self.make).items()
        values = {name: option.default for name, option in declared if name not in self._flags}
        values |= given
        return show_options({n: v for n, v in values.items() if v is not None or n in given})

    def decided(self, given: dict[str, Any], source: Episodes) -> dict[str, Any]:
        """The options that were left to the source, as it decided them."""
        return {}

    def as_remembered(self, given: dict[str, Any], shapes: DataShapes) -> dict[str, Any]:
        """The options with which examples are prepared as those of a checkpoint were."""
        return given


# --- The user's own


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


class OwnSource(Data):
    """A source of tasks that code of the user's own makes, or a data set for `Labelled`."""

    def build(self, **options: Any) -> Episodes:
        """The source; what the code does not take is left to the data set's own."""
        takes = inspect.signature(self.make).parameters
        if not any(kind.kind is inspect.Parameter.VAR_KEYWORD for kind in takes.values()):
            left = {name: options.pop(name) for name in list(options) if name not in takes}
        else:
            left = {}
        made = make("DATA", self.name, self.make, **options)
        if not isinstance(made, Episodes):
            if not (hasattr(made, "__getitem__") or hasattr(made, "__iter__")):
                raise UserError(
                    f"{self.name} made a {type(made).__name__}. Name a source of tasks"
                    " (metanudge.tasks.Episodes), a data set of (input, label) items, or what makes"
                    " one."
                )
            return Labelled.from_dataset(made, **left)
        for name in ("ways", "shots", "queries"):
            if name in left:
                raise UserError(
                    f"{flag(name)} {left[name]}: {self.name} takes no {name} and decides them"
                    " itself. Leave the flag out."
                )
        return made.to(left.get("device", made.device))


def own_source(text: str) -> Data:
    """The source of tasks, or what makes one, that module:attribute names."""
    name, options, found = named(text, "DATA", makes="source of tasks")
    if options:
        raise UserError(f"{text}: options of data are --data-options. Write {name}.")
    if isinstance(found, type) or inspect.isroutine(found) or isinstance(found, functools.partial):
        function(text, "DATA", makes="source of tasks")
        return OwnSource(name, "own tasks", found)
    return OwnSource(name, "own tasks", lambda: found)


def own_data(text: str) -> Data | None:
    """The folder or table at a path; None where the text looks like none."""
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
    return None


def given_tasks(config: TrainConfig, given: dict[str, Any]) -> Data:
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
