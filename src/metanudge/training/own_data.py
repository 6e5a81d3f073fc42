"""Data of the user's own: folders, tables, given tasks."""

from __future__ import annotations

import functools
import inspect
import os
from pathlib import Path
from typing import Any

from metanudge.tasks import Episodes, Given, Labelled
from metanudge.tasks.images import is_picture
from metanudge.tasks.read_folder import PICTURES
from metanudge.training.config import TrainConfig, flag
from metanudge.training.data import Data, DataShapes
from metanudge.training.errors import UserError
from metanudge.training.spec_language import make
from metanudge.training.specs import function, named

TABLES = (".csv", ".tsv")


class Folder(Data):
    """A folder with one sub-folder per class."""

    def has_pictures(self) -> bool:
        """Whether its examples are pictures, as far as names tell."""
        return any(file.suffix.lower() in PICTURES for file in Path(self.name).glob("*/*"))

    def decided(self, given: dict[str, Any], source: Episodes) -> dict[str, Any]:
        """The size and channels of pictures."""
        if not is_picture(source.input_shape):
            return {}
        channels, height, width = source.input_shape
        found: dict[str, Any] = {}
        if isinstance(given.get("image_size", "auto"), str):
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
