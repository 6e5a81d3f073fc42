"""Labelled vectors from a CSV file with a header."""

from __future__ import annotations

import codecs
import csv
import hashlib
import io
import json
import math
import os
import re
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metanudge.names import near, shown, some

DELIMITERS = (",", ";", "\t", "|")
_SPELLED = {"tab": "\t", r"\t": "\t"}


@dataclass(frozen=True)
class Columns:
    """The columns of a table: numbers, and text as it stands there.

    Attributes:
        names: of the columns with numbers.
        values: `(rows, names)`.
        text: name → one cell per row.
        rows: what messages call each row.
        fingerprint: hex sha256 of the file's bytes and of what was read out of them: columns,
            delimiter; empty where there is no file.
    """

    names: tuple[str, ...]
    values: NDArray[np.float64]
    text: dict[str, list[str]]
    rows: Sequence[str]
    fingerprint: str = ""


def read_csv(
    path: str | os.PathLike[str],
    *,
    label: str = "label",
    features: Sequence[str] | None = None,
    delimiter: str | None = None,
    labelled: bool = True,
) -> Columns:
    """The numbers and the label of every row; the time is linear in the size of the file.

    Args:
        path: a file in UTF-8 (or UTF-16 with its mark) whose first line names the columns.
        label: the column with the class.
        features: the columns with numbers; None takes all but the label.
        delimiter: what separates the cells; None finds it in the first line.
        labelled: whether every row must have a label.
    """
    read = read_columns(
        path, [label], features, delimiter=delimiter, needed=[label] if labelled else []
    )
    if labelled:
        check_filled(read, label, "the label", "Name the row's class")
    return read


def read_columns(
    path: str | os.PathLike[str],
    text: Sequence[str],
    numbers: Sequence[str] | None = None,
    *,
    delimiter: str | None = None,
    needed: Sequence[str] | None = None,
) -> Columns:
    """Some columns as text and some as numbers; the time is linear in the size of the file.

    Args:
        path: as in `read_csv`.
        text: the columns to be read as they are.
        numbers: the columns with numbers; None takes all others.
        delimiter: as in `read_csv`.
        needed: which of `text` must be there, all when None; the others are empty where they are
            not.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"There is no file {shown(file)}.")
    data = file.read_bytes()
    try:
        return _parse(file, data, text, numbers, delimiter, text if needed is None else needed)
    except (UnicodeError, csv.Error) as error:
        raise ValueError(
            f"{shown(file)} is not a readable CSV file in UTF-8 ({error}). Save it as one, and"
            " close every quote that is opened."
        ) from error


def check_filled(read: Columns, name: str, what: str, remedy: str) -> None:
    """Refuse an empty cell in a column of text."""
    for row, cell in zip(read.rows, read.text[name], strict=True):
        if not cell.strip():
            raise ValueError(
                f"{row}: {what} (column {name!r}) is empty. {remedy}, or leave the row out."
            )


def read_header(
    path: str | os.PathLike[str], *, label: str = "label", delimiter: str | None = None
) -> list[str]:
    """The names of a file's columns."""
    data = Path(path).read_bytes()
    return next(_records(data, delimiter or _delimiter(data, [label])), [])


def _parse(
    file: Path,
    data: bytes,
    text: Sequence[str],
    numbers: Sequence[str] | None,
    delimiter: str | None,
    needed: Sequence[str],
) -> Columns:
    named = [*text, *(numbers or ())]
    delimiter = _SPELLED.get(delimiter, delimiter) if delimiter else _delimiter(data, named)
    records = _records(data, delimiter)
    columns: list[str] = next(records, [])
    place = {name: number for number, name in enumerate(columns)}
    check_header(shown(file), columns, [*needed, *(numbers or ())])
    wanted = [name for name in columns if name not in text] if numbers is None else list(numbers)
    if not wanted and numbers is None:
        raise ValueError(
            f"{shown(file)} has no column besides {some(text)}. The other columns are the inputs."
        )
    places = [place[name] for name in wanted]
    values, lines = array("d"), array("q")
    cells: dict[str, list[str]] = {name: [] for name in text}
    for row in records:
        if not row:
            continue
        where = f"{shown(file)}, line {records.line_num}"
        if len(row) != len(columns):
            raise ValueError(
                f"{where}: {len(row)} cells, but the header names {len(columns)} columns. "
                f"Check the quotes and the delimiter {delimiter!r}."
            )
        values.extend(_numbers(row, places, columns, where))
        lines.append(records.line_num)
        for name, found in cells.items():
            found.append(row[place[name]] if name in place else "")
    if not lines:
        raise ValueError(f"{shown(file)} holds a header and no rows. Each row is one example.")
    digest = hashlib.sha256(json.dumps([*text, wanted, delimiter]).encode() + b"\n")
    digest.update(data)
    return Columns(
        tuple(wanted),
        np.frombuffer(values).reshape(len(lines), len(wanted)),
        cells,
        [f"{shown(file)}, line {line}" for line in lines],
        digest.hexdigest(),
    )


def _records(data: bytes, delimiter: str) -> Any:
    """A `csv.reader` over the bytes of a file."""
    wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    encoding = "utf-16" if wide else "utf-8-sig"
    text = io.TextIOWrapper(io.BytesIO(data), encoding=encoding, newline="")
    return csv.reader(text, delimiter=delimiter, strict=True)


def _delimiter(data: bytes, names: Sequence[str]) -> str:
    """The delimiter with which the first line holds the most of these columns, then the most
    columns.
    """

    def found(delimiter: str) -> tuple[int, int]:
        try:
            columns: list[str] = next(_records(data, delimiter), [])
        except csv.Error:
            return (0, 0)
        return len(set(names) & set(columns)), len(columns)

    return max(DELIMITERS, key=found)


def check_header(where: str, columns: Sequence[str], needed: Sequence[str]) -> None:
    """Refuse columns of one name, and a table without those that are needed."""
    there = set(columns)
    if len(there) < len(columns):
        twice = next(name for name, count in Counter(columns).items() if count > 1)
        raise ValueError(f"{where} has two columns named {twice!r}. Name each column differently.")
    for name in needed:
        if name not in there:
            raise ValueError(
                f"{where} has no column {name!r}.{near(name, columns)} Its columns are:"
                f" {some(columns, 20) or 'none'}. Name the one with the label or target,"
                " and with features=[...] the inputs; where they are texts, the columns text and"
                " label (--text, --label)."
            )


def _numbers(
    row: Sequence[str], places: Sequence[int], columns: Sequence[str], where: str
) -> list[float]:
    try:
        numbers = [float(row[place]) for place in places]
        if math.isfinite(sum(numbers)):
            return numbers
    except ValueError:
        pass
    return [as_number(row[place], f"{where}, column {columns[place]!r}") for place in places]


def as_number(cell: str, where: str) -> float:
    """The number in a cell; `ValueError` names the cell where there is none."""
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        comma = ""
        if re.fullmatch(r"\s*[-+]?[\d.]*,\d+\s*", cell):
            comma = " If its comma is a decimal point, write a point."
        raise ValueError(
            f"{where}: {cell[:40]!r} is not a finite number.{comma} Inputs must be numeric: correct"
            " the cell, leave the row out, or choose the columns with features=[...]."
        )
    return value


def as_cell(value: Any) -> str:
    """A value of a table as a CSV file would have it; nothing for a missing one."""
    missing = value is None or value != value or str(value) in ("<NA>", "NaT")
    return "" if missing else str(value)
