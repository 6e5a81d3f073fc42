"""One labelled example from a file: a picture, an array or a vector of numbers."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from metanudge.names import shown
from metanudge.tasks.images import FORMATS, as_seen, image_tensor, opened
from metanudge.tasks.unpack import read_arrays

ARRAYS = (".npy", ".npz", ".csv")
KINDS = (
    f"images ({', '.join(FORMATS)}), .npy, .npz with one array, and .csv with one vector of numbers"
)

_PICTURES = (
    ".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm",
)  # fmt: skip
_LARGEST = 1 << 30  # bytes that the array of one example may unpack to


def is_example(file: Path) -> bool:
    """Whether a file is meant as an example: its name says so, or it holds a picture. What is not
    may be passed over.
    """
    if file.suffix.lower() in (*ARRAYS, *_PICTURES):
        return True
    from PIL import UnidentifiedImageError

    try:
        with opened(file):
            return True
    except UnidentifiedImageError:
        return False
    except Exception:  # a picture that cannot be read; reading it says why
        return True


def read_file(file: Path, *, size: tuple[int, int] | None, grey: bool) -> Tensor:
    """One example: an image as uint8 `(channels, height, width)`, or the array of numbers that the
    file holds.

    Args:
        file: an image, .npy, .npz with one array, or .csv with one vector of numbers.
        size: (height, width) that an image is resized to; None leaves it as it is.
        grey: an image gets one channel instead of three.

    Raises:
        ValueError: the file is none of these; the message names it.
    """
    return parse(file, read_bytes(file), size=size, grey=grey)


def read_bytes(file: Path) -> bytes:
    """What a file holds; `ValueError` names what cannot be read, and pipes and devices, which might
    never end.
    """
    try:
        if not file.is_file():
            raise ValueError("a broken link, a FIFO or a device")
        return file.read_bytes()
    except (OSError, ValueError) as error:
        raise unreadable(file, error) from error


def parse(file: Path, data: bytes, *, size: tuple[int, int] | None, grey: bool) -> Tensor:
    """The example that the bytes of a file are; see `read_file`."""
    readers = {".npy": _array, ".npz": _only_array, ".csv": _numbers}
    try:
        if reader := readers.get(file.suffix.lower()):
            return _checked(reader(data))
        with opened(io.BytesIO(data)) as image:
            return image_tensor(as_seen(image), grey=grey, size=size)
    # Pillow and NumPy raise a dozen kinds for broken files; all mean the same to the user
    except Exception as error:
        raise unreadable(file, error) from error


def unreadable(file: Path, error: Exception) -> ValueError:
    """The error that names a file and what is wrong with it."""
    why = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return ValueError(
        f"{shown(file)} cannot be read as an example ({shown(why)}). Class folders may hold"
        f" {KINDS}; move other files away."
    )


def _array(data: bytes) -> np.ndarray:
    loaded = np.load(io.BytesIO(data), allow_pickle=False)
    if not isinstance(loaded, np.ndarray):
        raise ValueError("it holds an archive, not one array")
    return loaded


def _only_array(data: bytes) -> np.ndarray:
    arrays = read_arrays(io.BytesIO(data), limit=_LARGEST)
    if len(arrays) != 1:
        raise ValueError(f"it holds the arrays {list(arrays)}, expected exactly one")
    return next(iter(arrays.values()))


def _numbers(data: bytes) -> np.ndarray:
    text = data.decode("utf-8-sig").replace("\n", ",")
    return np.array([float(cell) for cell in text.split(",") if cell.strip()])


def _checked(array: np.ndarray) -> Tensor:
    if array.dtype.kind not in "biuf":
        raise ValueError(f"its values are of type {array.dtype}, not numbers")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ValueError("it holds NaN or infinity")
    return torch.from_numpy(
        np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")).reshape(array.shape)
    )
