"""Reading examples: a support set with its labels, and the files that are to be labelled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from metanudge.tasks.read_csv import Columns, read_csv
from metanudge.tasks.read_folder import examples_among, is_visible, read_file, read_folder
from metanudge.tasks.read_texts import TEXT_FILES, Texts, read_texts
from metanudge.training.errors import UserError, refused
from metanudge.training.own_data import TABLES
from metanudge.training.use.preprocessing import Preprocessing


def read_support(path: Path, how: Preprocessing) -> tuple[Tensor, list[str], Preprocessing]:
    """Raw examples, their labels, and the preprocessing with the table's columns filled in."""
    if how.form is not None:
        texts = _texts(path, how, "--support", labelled=True)
        return how.form.raw(texts.texts), texts.labels, how
    if _is_table(path):
        table, values = _read_table(path, how)
        return values, table.text[how.label], replace(how, columns=table.names)
    if not path.is_dir():
        raise UserError(
            f"--support {path} is neither a folder nor a .csv table. Give a folder with one"
            " sub-folder per class."
        )
    read = read_folder(path, image_size=how.image_size, grey=how.grey)
    assert isinstance(read.examples, Tensor)
    how.check(read.examples, f"--support {path}")
    return read.examples, read.labels, how


def examples_to_label(
    path: Path, how: Preprocessing, classes: Sequence[str]
) -> Iterator[tuple[str, str | None, Tensor]]:
    """Name, true class if known, and raw tensor of every example."""
    if how.form is not None:
        texts = _texts(path, how, "--predict", labelled=False)
        yield from _numbered(path, how.form.raw(texts.texts), texts.labels, classes)
        return
    if _is_table(path):
        table, values = _read_table(path, how, labelled=False)
        yield from _numbered(path, values, table.text[how.label], classes)
        return
    if not path.exists():
        raise UserError(
            f"--predict {path} does not exist. Give a folder of files, one file, or a .csv table."
        )
    files = [path] if path.is_file() else examples_among(_visible_files(path), path)
    if not files:
        raise UserError(
            f"--predict {path} holds no files that are examples. Put the files to be labelled"
            " into it."
        )
    root = path.parent if path.is_file() else path
    for file in files:
        raw = read_file(file, size=how.image_size, grey=how.grey)
        how.check(raw[None], file)
        truth = file.parent.name if file.parent != root and file.parent.name in classes else None
        yield file.relative_to(root).as_posix(), truth, raw


def _texts(path: Path, how: Preprocessing, flag: str, *, labelled: bool) -> Texts:
    if path.suffix.lower() not in TEXT_FILES or not path.is_file():
        raise UserError(
            f"{flag} {path} is no table of texts. Give a {', '.join(TEXT_FILES)} file with the"
            f" column {how.text!r}."
        )
    return read_texts(
        path, text=how.text, label=how.label, delimiter=how.delimiter, labelled=labelled
    )


def _is_table(path: Path) -> bool:
    return path.suffix.lower() in TABLES and path.is_file()


def _read_table(path: Path, how: Preprocessing, *, labelled: bool = True) -> tuple[Columns, Tensor]:
    table = read_csv(
        path, label=how.label, features=how.columns, delimiter=how.delimiter, labelled=labelled
    )
    values = torch.from_numpy(table.values)
    how.check(values, path)
    return table, values


def _numbered(
    path: Path, rows: Tensor, labels: Sequence[str], classes: Sequence[str]
) -> Iterator[tuple[str, str | None, Tensor]]:
    for number, (row, label) in enumerate(zip(rows, labels, strict=True), start=1):
        yield f"{path.name}:{number}", label if label in classes else None, row


def _visible_files(folder: Path) -> list[Path]:
    found = (
        file
        for file in folder.rglob("*")
        if all(is_visible(part) for part in file.relative_to(folder).parts)
    )
    return sorted(file for file in found if file.is_file())


@contextmanager
def explained() -> Iterator[None]:
    """What the readers refuse becomes a `UserError`; their messages name the file and the fix
    already.
    """
    with refused(""):
        try:
            yield
        except OSError as error:
            said = error.errno is None
            why = str(error) if said else f"{error.filename} cannot be read ({error.strerror})."
            raise UserError(why) from error
