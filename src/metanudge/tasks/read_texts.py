"""Texts with labels from a CSV, TSV or JSONL file, or from a table with columns."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metanudge.names import shown
from metanudge.tasks.read_csv import Columns, as_cell, check_filled, check_header, read_columns

JSONL = (".jsonl", ".ndjson")
TEXT_FILES = (".csv", ".tsv", *JSONL)


@dataclass(frozen=True)
class Texts:
    """What was read.

    Attributes:
        texts: one for each row.
        labels: the same; empty strings where there are none and none are needed.
        fingerprint: hex sha256 of the file's bytes and of the columns' names; of the cells where
            there is no file.
    """

    texts: list[str]
    labels: list[str]
    fingerprint: str


def read_texts(
    table: str | os.PathLike[str] | Any,
    *,
    text: str = "text",
    label: str = "label",
    delimiter: str | None = None,
    labelled: bool = True,
) -> Texts:
    """The text and the label of every row.

    Args:
        table: a .csv, .tsv or .jsonl file in UTF-8; or a DataFrame, a `datasets` table, a mapping
            of columns or a list of dicts.
        text, label: names of the columns.
        delimiter: of a .csv file; None finds it in the first line.
        labelled: whether every row must have a label.
    """
    if text == label:
        raise ValueError(f"The column {text!r} cannot be both text and label. Name two.")
    needed = [text, label] if labelled else [text]
    if not isinstance(table, (str, os.PathLike)):
        read = _from_columns(*_as_columns(table), "The table", [text, label], needed)
    elif (file := Path(table)).suffix.lower() in JSONL:
        read = _from_lines(file, [text, label], needed)
    else:
        read = read_columns(file, [text, label], [], delimiter=delimiter, needed=needed)
    check_filled(read, text, "the text", "Write it")
    if labelled:
        check_filled(read, label, "the label", "Name the row's class")
    return Texts(read.text[text], read.text[label], read.fingerprint)


def _from_lines(file: Path, names: Sequence[str], needed: Sequence[str]) -> Columns:
    if not file.is_file():
        raise FileNotFoundError(f"There is no file {shown(file)}.")
    data = file.read_bytes()
    found: list[dict[str, Any]] = []
    rows: list[str] = []
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{shown(file)}, line {number}"
        try:
            values = json.loads(line.decode("utf-8-sig"))
        except ValueError as error:  # also what is no UTF-8
            raise ValueError(
                f"{where} is not JSON ({error}). Each line is an object such as"
                f' {{"{names[0]}": "…", "{names[1]}": "…"}}.'
            ) from error
        if not isinstance(values, dict):
            raise ValueError(
                f"{where} is a JSON {type(values).__name__}, not an object. Each line is an object"
                f' such as {{"{names[0]}": "…", "{names[1]}": "…"}}.'
            )
        check_header(where, list(values), needed)
        found.append(values)
        rows.append(where)
    if not found:
        raise ValueError(f"{shown(file)} has no lines. Each line is one example.")
    cells = {name: [as_cell(one.get(name)) for one in found] for name in names}
    digest = hashlib.sha256(json.dumps(names).encode() + b"\n" + data)
    return Columns((), _none(len(rows)), cells, rows, digest.hexdigest())


def _as_columns(table: Any) -> tuple[list[str], Any]:
    """Names of the columns, and what gives a column by its name."""
    for names in ("columns", "column_names"):  # of pandas and polars, of datasets
        if hasattr(table, names):
            return [str(name) for name in getattr(table, names)], table
    if isinstance(table, dict):
        return list(table), table
    rows = list(table) if hasattr(table, "__iter__") else []
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise TypeError(
            f"The table is a {type(table).__name__}. Give the path of a .csv, .tsv or .jsonl file,"
            " a DataFrame, a table of datasets, or a list of dicts."
        )
    names_of_all = list(dict.fromkeys(name for row in rows for name in row))
    return names_of_all, {name: [row.get(name) for row in rows] for name in names_of_all}


def _from_columns(
    columns: list[str], table: Any, where: str, names: Sequence[str], needed: Sequence[str]
) -> Columns:
    check_header(where, columns, needed)
    cells = {name: [as_cell(value) for value in table[name]] for name in names if name in columns}
    count = len(cells[names[0]])
    cells |= {name: [""] * count for name in names if name not in columns}
    if not count:
        raise ValueError(f"{where} has no rows. Each row is one example.")
    digest = hashlib.sha256(json.dumps([names, cells]).encode()).hexdigest()
    return Columns((), _none(count), cells, [f"{where}, row {i}" for i in range(count)], digest)


def _none(rows: int) -> NDArray[np.float64]:
    """No numbers."""
    return np.empty((rows, 0))
