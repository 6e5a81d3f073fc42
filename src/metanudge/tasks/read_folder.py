"""Labelled examples from files: a folder with one sub-folder per class, or one picture, array or
vector of numbers.
"""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from metanudge.names import shown, some
from metanudge.tasks.cache import cache_folder, read_arrays
from metanudge.tasks.images import FORMATS, as_seen, image_tensor, is_grey, opened, upright_size
from metanudge.tasks.on_disk import OnDisk, read_examples, wanted, write_examples

ImageSize = int | tuple[int, int] | Literal["auto", "small"] | None
# the longest side of pictures whose size was left to us; what the few-shot literature takes for
# photographs, and for a CPU
LARGEST = {"auto": 84, "small": 32}
ARRAYS = (".npy", ".npz", ".csv")
KINDS = (
    f"images ({', '.join(FORMATS)}), .npy, .npz with one array, and .csv with one vector of numbers"
)

PICTURES = (
    ".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm",
)  # fmt: skip
_MOST_BYTES = 1 << 30  # bytes that the array of one example may unpack to


@dataclass(frozen=True)
class Folder:
    """What a folder of classes holds.

    Attributes:
        examples: all of them, in the order of the sorted names.
        labels: the sub-folder that each is from.
        fingerprint: hex sha256 of the names and contents of their files.
        note: what was decided about the size of pictures, and where they are kept; empty where
            there was nothing to decide.
    """

    examples: Tensor | OnDisk
    labels: list[str]
    fingerprint: str
    note: str


def read_folder(
    path: str | os.PathLike[str],
    *,
    image_size: ImageSize = "auto",
    grey: bool | None = None,
    on_disk: bool | None = False,
) -> Folder:
    """All examples of a folder; see `Labelled.from_folder` for what the files may be."""
    root = Path(path)
    files = _example_files(root)
    pictures = [file for file in files if file.suffix.lower() not in ARRAYS]
    sizes, all_grey = (
        _look(pictures) if isinstance(image_size, str) or grey is None else (set(), True)
    )
    note = ""
    if isinstance(image_size, str):
        size, note = _common_size(sizes, LARGEST[image_size])
    else:
        size = (image_size, image_size) if isinstance(image_size, int) else image_size
    reading = _Reading(root, files, size, all_grey if grey is None else grey)
    labels = [file.parent.name for file in files]
    first = parse(files[0], read_bytes(files[0]), size=size, grey=reading.grey)
    if not wanted(on_disk, first, len(files)):
        return Folder(torch.stack(list(reading)), labels, reading.digest.hexdigest(), note)
    kept = reading.cache_file()
    found = read_examples(kept)
    if found is None:
        write_examples(kept, reading, len(files), reading.about)
        for other in kept.parent.glob(f"{kept.name.partition('-')[0]}-*.bin"):
            if other != kept:  # of the same folder, before it was changed
                other.unlink(missing_ok=True)
        found = read_examples(kept)
    if found is None or len(found[0]) != len(files):
        raise ValueError(f"{kept} cannot be read back. Look at the disk it is on.")
    held, about = found
    where = f"kept decoded in {shown(kept)} ({held.data.nbytes / 2**20:,.0f} MiB), not in memory"
    return Folder(held, labels, about["fingerprint"], "; ".join(filter(None, [note, where])))


@dataclass
class _Reading:
    """The examples of a folder, one after the other; their digest grows as they are read."""

    root: Path
    files: Sequence[Path]
    size: tuple[int, int] | None
    grey: bool
    digest: Any = field(default_factory=hashlib.sha256)

    def __iter__(self) -> Iterator[Tensor]:
        first: Tensor | None = None
        for file in self.files:
            data = read_bytes(file)
            name = os.fsencode(file.relative_to(self.root).as_posix())
            self.digest.update(b"%d %d\n" % (len(name), len(data)) + name)
            self.digest.update(hashlib.sha256(data).digest())
            example = parse(file, data, size=self.size, grey=self.grey)
            first = example if first is None else first
            if example.shape != first.shape:
                raise ValueError(
                    f"{shown(file)} has shape {tuple(example.shape)}, but {shown(self.files[0])}"
                    f" has {tuple(first.shape)}. All examples must have the same shape; images are"
                    " made so with image_size=."
                )
            yield example

    def about(self) -> dict[str, str]:
        """What is kept beside the decoded examples."""
        return {"fingerprint": self.digest.hexdigest()}

    def cache_file(self) -> Path:
        """Where they are kept: a name for the folder and what is made of it, and one for its
        listing with sizes and times.
        """
        whole = f"1\n{self.root.resolve()}\n{self.size}\n{self.grey}\n"
        place = hashlib.sha256(os.fsencode(whole)).hexdigest()
        listing = hashlib.sha256()
        for file in self.files:
            facts = file.stat()
            name = os.fsencode(file.relative_to(self.root).as_posix())
            listing.update(b"%d %d %d\n" % (len(name), facts.st_size, facts.st_mtime_ns) + name)
        return cache_folder() / "examples" / f"{place[:16]}-{listing.hexdigest()[:32]}.bin"


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


def _common_size(sizes: set[tuple[int, int]], largest: int) -> tuple[tuple[int, int] | None, str]:
    """The pictures' own size where they agree, else a square, the longest side at most `largest`;
    and what to say about it.
    """
    if not sizes:
        return None, ""
    longest = max(max(size) for size in sizes)
    if len(sizes) > 1:
        side = min(longest, largest)
        how = f"made square from {len(sizes)} different sizes of up to {longest} pixels"
        return (side, side), f"{how}; image_size= sets another size"
    ((height, width),) = sizes
    if longest <= largest:
        return (height, width), ""
    small = max(1, round(height * largest / longest)), max(1, round(width * largest / longest))
    return small, f"shrunk from {height}×{width}; image_size= sets another size"


# --- One file


def is_example(file: Path) -> bool:
    """Whether a file is meant as an example: its name says so, or it holds a picture. What is not
    may be passed over.
    """
    if file.suffix.lower() in (*ARRAYS, *PICTURES):
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
    arrays = read_arrays(io.BytesIO(data), limit=_MOST_BYTES)
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
