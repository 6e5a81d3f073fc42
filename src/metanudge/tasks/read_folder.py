"""Labelled examples from a folder with one sub-folder per class."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from metanudge.tasks.images import image_tensor


def read_folder(path: str | os.PathLike[str], *, image_size: int | tuple[int, int] | None, grey: bool) -> tuple[Tensor, list[str]]:
    """All examples, and the sub-folder each is from; both in the order of the sorted names.

    See `Labelled.from_folder` for what the files may be.
    """
    root = Path(path)
    if not root.is_dir():
        raise FileNotFoundError(f"{root} is not a folder. Give the folder that holds one sub-folder per class.")
    folders = sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not folders:
        raise ValueError(f"{root} holds no sub-folders. Put the examples of each class into a sub-folder of its own.")
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    examples: list[Tensor] = []
    labels: list[str] = []
    first: Path | None = None
    for folder in folders:
        files = sorted(p for p in folder.iterdir() if not p.name.startswith("."))
        if not files:
            raise ValueError(f"The class folder {folder} is empty. Put examples into it or remove it.")
        for file in files:
            example = read_file(file, size=size, grey=grey)
            first = first or file
            if examples and example.shape != examples[0].shape:
                raise ValueError(
                    f"{file} has shape {tuple(example.shape)}, but {first} has {tuple(examples[0].shape)}. All "
                    "examples must have the same shape; images are made so with image_size=."
                )
            examples.append(example)
            labels.append(folder.name)
    return torch.stack(examples), labels


def read_file(file: Path, *, size: tuple[int, int] | None, grey: bool) -> Tensor:
    """One example: an image as uint8 `(channels, height, width)`, or the array of numbers that the file holds.

    Args:
        file: an image, .npy, .npz with one array, or .csv with one vector of numbers.
        size: (height, width) that an image is resized to; None leaves it as it is.
        grey: an image gets one channel instead of three.

    Raises:
        ValueError: the file is a folder, or none of these; the message names it.
    """
    if file.is_dir():
        raise ValueError(f"{file} is a folder inside a class folder. Give a folder with exactly one level of classes.")
    if not file.is_file():  # a FIFO would be waited for, a device read for ever
        raise ValueError(f"{file} is no file (a FIFO, a device, or a link to nothing). Move it away.")
    readers = {".npy": _read_array, ".npz": _read_array, ".csv": _read_numbers}
    try:
        if reader := readers.get(file.suffix.lower()):
            return reader(file)
        from PIL import Image

        with Image.open(file) as image:
            return image_tensor(image, grey=grey, size=size)
    except Exception as error:  # Pillow and NumPy raise a dozen kinds for broken files; all mean the same to the user
        raise ValueError(
            f"{file} cannot be read as an example ({error}). Class folders may hold images, .npy, .npz with one array, "
            "and .csv with one vector of numbers; move other files away."
        ) from error


def _read_array(file: Path) -> Tensor:
    with file.open("rb") as opened:  # np.load leaves a damaged file open
        loaded = np.load(opened, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return torch.from_numpy(loaded)
        names = list(loaded)
        if len(names) != 1:
            raise ValueError(f"it holds the arrays {names}, expected exactly one")
        return torch.from_numpy(np.asarray(loaded[names[0]]))


def _read_numbers(file: Path) -> Tensor:
    text = file.read_text(encoding="utf-8-sig").replace("\n", ",")
    return torch.tensor([float(cell) for cell in text.split(",") if cell.strip()], dtype=torch.float64)
