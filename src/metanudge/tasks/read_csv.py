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
class Table:
    """What a CSV file holds.

    Attributes:
        columns: the names of the columns with numbers.
        values: `(rows, columns)`.
        labels: the label of every row; empty strings where the file has no labels and need not have
            any.
        fingerprint: hex sha256 of the file's bytes and of what was read out of them: label,
            columns, delimiter.
    """

    columns: tuple[str, ...]
    values: NDArray[np.float64]
    labels: list[str]
    fingerprint: str


def read_csv(
    path: str | os.PathLike[str],
    *,
    label: str = "label",
    features: Sequence[str] | None = None,
    delimiter: str | None = None,
    labelled: bool = True,
) -> Table:
    """The numbers and the label of every row; the time is linear in the size of the file.

    Args:
        path: a file in UTF-8 (or UTF-16 with its mark) whose first line names the columns.
        label: the column with the class.
        features: the columns with numbers; None takes all but the label.
        delimiter: what separates the cells; None finds it in the first line.
        labelled: whether every row must have a label.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"There is no file {shown(file)}.")
    data = file.read_bytes()
    try:
        return _parse(file, data, label, features, delimiter, labelled)
    except (UnicodeError, csv.Error) as error:
        raise ValueError(
            f"{shown(file)} is not a readable CSV file in UTF-8 ({error}). Save it as one, and"
            " close every quote that is opened."
        ) from error


def read_header(
    path: str | os.PathLike[str], *, label: str = "label", delimiter: str | None = None
) -> list[str]:
    """The names of a file's columns."""
    data = Path(path).read_bytes()
    return next(_records(data, delimiter or _delimiter(data, [label])), [])


def _parse(
    file: Path,
    data: bytes,
    label: str,
    features: Sequence[str] | None,
    delimiter: str | None,
    labelled: bool,
) -> Table:
    named = [label, *(features or ())]
    delimiter = _SPELLED.get(delimiter, delimiter) if delimiter else _delimiter(data, named)
    records = _records(data, delimiter)
    columns: list[str] = next(records, [])
    place = {name: number for number, name in enumerate(columns)}
    _check_header(file, columns, named if labelled else named[1:])
    wanted = [name for name in columns if name != label] if features is None else list(features)
    if not wanted:
        raise ValueError(
            f"{shown(file)} has no column besides the label {label!r}. The other columns are the"
            " inputs."
        )
    places, label_place = [place[name] for name in wanted], place.get(label)
    values, labels = array("d"), []
    for row in records:
        where = f"{shown(file)}, line {records.line_num}"
        if not row:
            continue
        if len(row) != len(columns):
            raise ValueError(
                f"{where}: {len(row)} cells, but the header names {len(columns)} columns. "
                f"Check the quotes and the delimiter {delimiter!r}."
            )
        values.extend(_numbers(row, places, columns, where))
        labels.append("" if label_place is None else row[label_place])
        if labelled and not labels[-1].strip():
            raise ValueError(
                f"{where}: the label (column {label!r}) is empty. Name the row's class, or leave"
                " the row out."
            )
    if not labels:
        raise ValueError(f"{shown(file)} holds a header and no rows. Each row is one example.")
    digest = hashlib.sha256(json.dumps([label, wanted, delimiter]).encode() + b"\n")
    digest.update(data)
    numbers = np.frombuffer(values).reshape(len(labels), len(wanted))
    return Table(tuple(wanted), numbers, labels, digest.hexdigest())


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


def _check_header(file: Path, columns: Sequence[str], needed: Sequence[str]) -> None:
    there = set(columns)
    if len(there) < len(columns):
        twice = next(name for name, count in Counter(columns).items() if count > 1)
        raise ValueError(
            f"{shown(file)} has two columns named {twice!r}. Name each column differently."
        )
    for name in needed:
        if name not in there:
            raise ValueError(
                f"{shown(file)} has no column {name!r}.{near(name, columns)} Its columns are:"
                f" {some(columns, 20) or 'none'}. Name them with label= and features=[...]."
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
    return [_number(row[place], f"{where}, column {columns[place]!r}") for place in places]


def _number(cell: str, where: str) -> float:
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
