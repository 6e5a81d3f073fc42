"""Labelled examples from a folder with one sub-folder per class."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from metanudge.names import shown, some
from metanudge.tasks.images import is_grey, opened, upright_size
from metanudge.tasks.read_file import ARRAYS, KINDS, is_example, parse, read_bytes, unreadable

ImageSize = int | tuple[int, int] | Literal["auto"] | None
# the longest side of pictures whose size was left to us; what the few-shot literature takes for
# photographs
LARGEST = 84


@dataclass(frozen=True)
class Folder:
    """What a folder of classes holds.

    Attributes:
        examples: all of them, in the order of the sorted names.
        labels: the sub-folder that each is from.
        fingerprint: hex sha256 of the names and contents of their files.
        note: what was decided about the size of pictures; empty where there was nothing to decide.
    """

    examples: Tensor
    labels: list[str]
    fingerprint: str
    note: str


def read_folder(
    path: str | os.PathLike[str], *, image_size: ImageSize = "auto", grey: bool | None = None
) -> Folder:
    """All examples of a folder; see `Labelled.from_folder` for what the files may be."""
    root = Path(path)
    files = _example_files(root)
    pictures = [file for file in files if file.suffix.lower() not in ARRAYS]
    sizes, all_grey = _look(pictures) if image_size == "auto" or grey is None else (set(), True)
    note = ""
    if image_size == "auto":
        size, note = _common_size(sizes)
    else:
        size = (image_size, image_size) if isinstance(image_size, int) else image_size
    grey = all_grey if grey is None else grey
    digest = hashlib.sha256()
    examples: list[Tensor] = []
    for file in files:
        data = read_bytes(file)
        name = os.fsencode(file.relative_to(root).as_posix())
        digest.update(b"%d %d\n" % (len(name), len(data)) + name + hashlib.sha256(data).digest())
        example = parse(file, data, size=size, grey=grey)
        if examples and example.shape != examples[0].shape:
            raise ValueError(
                f"{shown(file)} has shape {tuple(example.shape)}, but {shown(files[0])} has"
                f" {tuple(examples[0].shape)}. All examples must have the same shape; images are"
                " made so with image_size=."
            )
        examples.append(example)
    labels = [file.parent.name for file in files]
    return Folder(torch.stack(examples), labels, digest.hexdigest(), note)


def is_visible(name: str) -> bool:
    """Whether a file or folder is the user's own: not hidden, and not what macOS adds to
    archives.
    """
    return not name.startswith(".") and name != "__MACOSX"


def examples_among(files: Sequence[Path], root: Path) -> list[Path]:
    """The files that are examples; a warning names those that are not."""
    kept = [file for file in files if is_example(file)]
    if len(kept) < len(files):
        others = [file.relative_to(root).as_posix() for file in sorted(set(files) - set(kept))]
        warnings.warn(
            f"{shown(root)}: passed over what is no example: {some(others, 3)}. Examples are"
            f" {KINDS}.",
            stacklevel=2,
        )
    return kept


def _example_files(root: Path) -> list[Path]:
    if not root.is_dir():
        raise FileNotFoundError(
            f"{shown(root)} is not a folder. Give the folder that holds one sub-folder per class."
        )
    folders = sorted(p for p in root.iterdir() if is_visible(p.name) and p.is_dir())
    if not folders:
        raise ValueError(
            f"{shown(root)} holds no sub-folders. Put the examples of each class into a sub-folder"
            " of its own."
        )
    found: list[Path] = []
    for folder in folders:
        if shown(folder.name) != folder.name:
            raise ValueError(
                f"The class folder {shown(folder)} has a name that cannot be shown. Rename it: the"
                " name is the class's."
            )
        files = sorted(p for p in folder.iterdir() if is_visible(p.name))
        if not files:
            raise ValueError(
                f"The class folder {folder} is empty. Put examples into it or remove it."
            )
        for file in files:
            if file.is_dir():
                raise ValueError(
                    f"{shown(file)} is a folder inside a class folder. Give a folder with exactly"
                    " one level of classes."
                )
            if not file.is_file():
                raise ValueError(
                    f"{shown(file)} is a broken link, a FIFO or a device. Move it away."
                )
        found += files
    kept = examples_among(found, root)
    if without := sorted({file.parent for file in found} - {file.parent for file in kept}):
        raise ValueError(
            f"The class folder {without[0]} holds no examples. Examples are {KINDS}; convert its"
            " files or remove it."
        )
    return kept


def _look(pictures: Sequence[Path]) -> tuple[set[tuple[int, int]], bool]:
    """The sizes of pictures, and whether all are grey; their pixels are not read."""
    sizes, grey = set(), True
    for file in pictures:
        try:
            with opened(file) as image:
                sizes.add(upright_size(image))
                grey &= is_grey(image)
        except Exception as error:  # as in reading
            raise unreadable(file, error) from error
    return sizes, grey


def _common_size(sizes: set[tuple[int, int]]) -> tuple[tuple[int, int] | None, str]:
    """The pictures' own size where they agree, else a square, the longest side at most `LARGEST`;
    and what to say about it.
    """
    if not sizes:
        return None, ""
    longest = max(max(size) for size in sizes)
    if len(sizes) > 1:
        side = min(longest, LARGEST)
        how = f"made square from {len(sizes)} different sizes of up to {longest} pixels"
        return (side, side), f"{how}; image_size= sets another size"
    ((height, width),) = sizes
    if longest <= LARGEST:
        return (height, width), ""
    small = max(1, round(height * LARGEST / longest)), max(1, round(width * LARGEST / longest))
    return small, f"shrunk from {height}×{width}; image_size= sets another size"
