"""Tables of numbers, with or without a label column."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from metanudge.tasks.read_csv import read_csv
from metanudge.training.errors import UserError

if TYPE_CHECKING:
    from metanudge.training.use.preprocessing import Preprocessing

TABLES = (".csv", ".tsv")


def is_table(path: Path) -> bool:
    """Whether the name says so; there may be no such file."""
    return path.suffix.lower() in TABLES


def header(path: Path, delimiter: str) -> list[str]:
    """The names of a table's columns."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            return next(csv.reader(lines, delimiter=delimiter), [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is not a readable CSV file in UTF-8 ({error}). Save it as one.") from error


def read_table(path: Path, how: Preprocessing, *, with_label: bool) -> tuple[Tensor, list[str]]:
    """The numbers `(rows, columns)` and the labels; without a label column every label is empty."""
    there = header(path, how.delimiter)
    if with_label:
        values, labels = read_csv(path, label=how.label, features=how.columns, delimiter=how.delimiter)
        return torch.from_numpy(values), labels
    columns = [c for c in there if c != how.label] if how.columns is None else list(how.columns)
    # The reader wants a label column; any column will do, since its cells are not looked at as labels.
    values, _ = read_csv(path, label=columns[0] if columns[0] in there else how.label, features=columns, delimiter=how.delimiter)
    return torch.from_numpy(values), [""] * len(values)
