"""Given tasks from a table with a task column, or from a folder with one table a task."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from metanudge.names import shown, some
from metanudge.tasks.read_csv import (
    Columns,
    as_cell,
    as_number,
    check_filled,
    check_header,
    read_columns,
)
from metanudge.tasks.read_folder import is_visible
from metanudge.tasks.task_rows import Kind, TaskRows, divide

TaskType = Literal["auto", "classification", "regression"]
CSV, PARQUET = (".csv", ".tsv"), ".parquet"
_FEW = 10  # so many different whole numbers are taken for classes, where each is frequent


@dataclass(frozen=True)
class Layout:
    """What the columns of a table are; see `Given.from_table`."""

    target: tuple[str, ...]
    task_column: str | None = None
    features: tuple[str, ...] | None = None
    split_column: str | None = None
    time_column: str | None = None
    task_type: TaskType = "auto"
    support: float = 0.5
    drop_small: bool = False
    delimiter: str | None = None

    def __post_init__(self) -> None:
        named = [*self.text, *(self.features or ())]
        for name in named:
            if named.count(name) > 1:
                raise ValueError(
                    f"The column {name!r} is named twice among task column, target, split column,"
                    f" time column and features ({some(named)}). A target that is an input too is"
                    " known before it is asked for; name each column once."
                )
        if not self.target:
            raise ValueError("Which column is to be predicted? Name the target.")

    @property
    def text(self) -> list[str]:
        """The columns that are no inputs."""
        return [*filter(None, [self.task_column, *self.target, self.split_column,
                               self.time_column])]  # fmt: skip


def read_tasks(table: Any, layout: Layout) -> TaskRows:
    """From one table, a path or a DataFrame, or from a folder of tables."""
    if isinstance(table, (str, os.PathLike)) and Path(table).is_dir():
        return _read_folder(Path(table), layout)
    if layout.task_column is None:
        raise ValueError("Which column names the task that a row belongs to? Give task_column.")
    read = _columns(table, layout, layout.features)
    check_filled(read, layout.task_column, "the task", "Name the row's task")
    names, task = np.unique(np.array(read.text[layout.task_column]), return_inverse=True)
    return _tasks(read, task.astype(np.int64), [str(name) for name in names.tolist()], layout)


def _read_folder(root: Path, layout: Layout) -> TaskRows:
    """From a folder with one table a task, which has the file's name."""
    if layout.task_column is not None:
        raise ValueError(
            f"{shown(root)} is a folder, in which each file is a task, and a task column"
            f" {layout.task_column!r} was named too. Leave it out, or give one file."
        )
    files = sorted(file for file in root.iterdir() if is_visible(file.name))
    for file in files:
        if file.suffix.lower() not in (*CSV, PARQUET) or not file.is_file():
            raise ValueError(
                f"{shown(file)} is no table. A folder of given tasks holds one .csv, .tsv or"
                " .parquet file for each task and nothing else; move this one away."
            )
    names = [file.stem for file in files]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{shown(root)} has two files for the task {twice!r}. Rename one.")
    if not files:
        raise ValueError(f"{shown(root)} holds no tables. Put one .csv file a task into it.")
    first = _columns(files[0], layout, layout.features)
    parts = [first, *(_columns(file, layout, first.names) for file in files[1:])]
    digest = hashlib.sha256("\n".join(map("{} {}".format, names, (p.fingerprint for p in parts)))
                            .encode(errors="surrogateescape"))  # fmt: skip
    whole = Columns(
        first.names,
        np.concatenate([part.values for part in parts]),
        {name: [cell for part in parts for cell in part.text[name]] for name in first.text},
        [row for part in parts for row in part.rows],
        digest.hexdigest(),
    )
    task = np.repeat(np.arange(len(parts)), [len(part.values) for part in parts])
    return _tasks(whole, task, names, layout)


def _columns(table: Any, layout: Layout, numbers: Sequence[str] | None) -> Columns:
    if not isinstance(table, (str, os.PathLike)):
        return _from_frame(table, "The table", layout.text, numbers)
    path = Path(table)
    if path.suffix.lower() != PARQUET:
        return read_columns(path, layout.text, numbers, delimiter=layout.delimiter)
    try:
        import pandas

        frame = pandas.read_parquet(path)
    except ImportError as error:
        raise ValueError(
            f"{shown(path)} needs pandas with pyarrow to be read. Install them, or save it as .csv."
        ) from error
    return _from_frame(frame, shown(path), layout.text, numbers)


def _from_frame(frame: Any, where: str, text: list[str], numbers: Sequence[str] | None) -> Columns:
    """From anything with `columns` and columns by name, such as a pandas DataFrame."""
    if not hasattr(frame, "columns"):
        raise TypeError(
            f"{where} is a {type(frame).__name__}. Give the path of a .csv or .parquet file, or a"
            " DataFrame."
        )
    columns = [str(name) for name in frame.columns]
    check_header(where, columns, [*text, *(numbers or ())])
    wanted = [name for name in columns if name not in text] if numbers is None else list(numbers)
    cells = {name: [as_cell(value) for value in frame[name]] for name in [*text, *wanted]}
    rows = [f"{where}, row {number}" for number in range(len(frame))]
    if not rows or not wanted:
        raise ValueError(f"{where} has no {'rows' if wanted else 'inputs'}.")
    values = [
        [as_number(cell, f"{row}, column {name!r}") for row, cell in
         zip(rows, cells[name], strict=True)] for name in wanted
    ]  # fmt: skip
    found = {name: cells[name] for name in text}
    digest = hashlib.sha256(repr((wanted, values, found)).encode()).hexdigest()
    return Columns(tuple(wanted), np.array(values).T.copy(), found, rows, digest)


def _tasks(read: Columns, task: NDArray[np.int64], names: list[str], layout: Layout) -> TaskRows:
    for name in layout.target:
        check_filled(read, name, "the target", "Give it")
    kind, note = _kind(read, layout)
    classes: NDArray[np.int64] | None = None
    labels: tuple[str, ...] = ()
    if kind == "classification":
        classes, labels = _classes(read, layout.target)
    role = _roles(read, layout.split_column) if layout.split_column else None
    time = _times(read, layout.time_column) if layout.time_column else None
    kept, parts = divide(
        task,
        names,
        support=layout.support,
        role=role,
        time=time,
        classes=classes,
        labels=labels,
        drop_small=layout.drop_small,
    )
    return TaskRows(
        kind,
        torch.from_numpy(read.values.copy()),
        torch.from_numpy(_numbers(read, layout.target) if classes is None else classes),
        kept,
        parts,
        layout.target,
        labels,
        read.names,
        read.fingerprint or None,
        note,
    )


# --- The target


def _kind(read: Columns, layout: Layout) -> tuple[Kind, str]:
    """What the tasks are, and what is to be said of that choice."""
    if layout.task_type != "auto":
        return layout.task_type, ""
    if len(layout.target) > 1:
        return "regression", ""
    (name,) = layout.target
    cells = read.text[name]
    numbers = [number for number in map(_maybe_number, cells) if number is not None]
    if 2 * len(numbers) <= len(cells):
        return "classification", ""
    distinct = set(numbers)
    whole = len(numbers) == len(cells) and all(number.is_integer() for number in distinct)
    if whole and 1 < len(distinct) <= _FEW and len(distinct) * _FEW <= len(cells):
        return "classification", (
            f"{name} has {len(distinct)} different whole numbers and is taken for classes;"
            " task type regression takes it for a quantity"
        )
    return "regression", ""


def _maybe_number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


def _classes(read: Columns, target: tuple[str, ...]) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    if len(target) > 1:
        raise ValueError(f"Classification has one target, and {some(target)} were given.")
    cells = [cell.strip() for cell in read.text[target[0]]]
    numbers = [_maybe_number(cell) for cell in cells]
    if all(number is not None for number in numbers):
        for row, number in zip(read.rows, numbers, strict=True):
            if not float(number or 0).is_integer():
                raise ValueError(
                    f"{row}: the target {target[0]!r} is {number}, a quantity, where classes were"
                    " expected. Use task type regression, or give it whole numbers or names."
                )
        cells = [str(int(number or 0)) for number in numbers]
        labels = tuple(map(str, sorted({int(cell) for cell in cells})))
    else:
        labels = tuple(sorted(set(cells)))
    if len(labels) == 1:
        raise ValueError(
            f"The target {target[0]!r} is {labels[0]!r} in every row: there is nothing to tell"
            " apart."
        )
    place = {label: number for number, label in enumerate(labels)}
    return np.array([place[cell] for cell in cells], dtype=np.int64), labels


def _numbers(read: Columns, target: tuple[str, ...]) -> NDArray[np.float64]:
    y = np.empty((len(read.rows), len(target)))
    for column, name in enumerate(target):
        for number, (row, cell) in enumerate(zip(read.rows, read.text[name], strict=True)):
            try:
                y[number, column] = as_number(cell, f"{row}, target {name!r}")
            except ValueError as error:
                raise ValueError(
                    f"{error} Where the target is a class, use task type classification."
                ) from error
        if np.ptp(y[:, column]) == 0:
            raise ValueError(
                f"The target {name!r} is {y[0, column]:g} in every row: there is nothing to learn."
            )
    return y


# --- The division


def _roles(read: Columns, name: str) -> NDArray[np.bool_]:
    words = [cell.strip().lower() for cell in read.text[name]]
    for row, word in zip(read.rows, words, strict=True):
        if word not in ("support", "query"):
            raise ValueError(
                f"{row}, column {name!r}: {shown(word)!r} is neither support nor query. This"
                " column divides each task into examples to adapt on and examples to be judged on;"
                " which tasks are for training is said with splits=."
            )
    return np.array([word == "support" for word in words])


def _times(read: Columns, name: str) -> NDArray[np.float64]:
    numbers = [_maybe_number(cell) for cell in read.text[name]]
    dates = all(number is None for number in numbers)
    found = []
    for row, cell, number in zip(read.rows, read.text[name], numbers, strict=True):
        if dates:
            try:
                date = datetime.fromisoformat(cell.strip())
                # as UTC, so that the order is the same in every time zone
                number = (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
            except ValueError:
                number = None
        if number is None or not math.isfinite(number):
            raise ValueError(
                f"{row}, column {name!r}: {shown(cell)!r} cannot be put in order with the others."
                " Give numbers, or dates such as 2024-03-31 or 2024-03-31T12:00."
            )
        found.append(number)
    return np.array(found)
