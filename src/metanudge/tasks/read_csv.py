"""Labelled vectors from a CSV file with a header."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from metanudge.tasks.episodes import near


def read_csv(
    path: str | os.PathLike[str], *, label: str, features: Sequence[str] | None, delimiter: str
) -> tuple[NDArray[np.float64], list[str]]:
    """The numbers and the label of every row.

    Args:
        path: a UTF-8 file whose first line names the columns.
        label: the column with the class.
        features: the columns with numbers; None takes all but the label.
        delimiter: what separates the cells.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"There is no file {file}.")
    try:
        with file.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.reader(lines, delimiter=delimiter)
            columns = next(reader, [])
            rows = [(reader.line_num, row) for row in reader if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{file} is not a readable CSV file in UTF-8 ({error}). Save it as one.") from error
    if len(set(columns)) < len(columns):
        twice = next(c for c in columns if columns.count(c) > 1)
        raise ValueError(f"{file} has two columns named {twice!r}. Name each column differently.")
    for column in (label, *(features or ())):
        if column not in columns:
            raise ValueError(f"{file} has no column {column!r}.{near(column, columns)} Its columns are: {', '.join(columns) or 'none'}.")
    if not rows:
        raise ValueError(f"{file} holds a header and no rows. Each row is one example.")
    wanted = [c for c in columns if c != label] if features is None else list(features)
    if not wanted:
        raise ValueError(f"{file} has no column besides the label {label!r}. The other columns are the inputs.")
    places, label_place = [columns.index(c) for c in wanted], columns.index(label)
    values = np.empty((len(rows), len(wanted)))
    for i, (line, row) in enumerate(rows):
        if len(row) != len(columns):
            raise ValueError(
                f"{file}, line {line}: {len(row)} cells, but the header names {len(columns)} columns. "
                f"Check the quotes and the delimiter {delimiter!r}."
            )
        values[i] = [_number(row[place], file, line, columns[place]) for place in places]
    return values, [row[label_place] for _, row in rows]


def _number(cell: str, file: Path, line: int, column: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ValueError(
            f"{file}, line {line}, column {column!r}: {cell!r} is not a finite number. Inputs must be numeric: correct "
            "the cell, leave the row out, or choose the columns with features=[...]."
        )
    return value
