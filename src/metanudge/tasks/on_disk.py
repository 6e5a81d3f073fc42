"""Examples that stay in a file: decoded once, mapped into memory, and read where an episode needs
them. Their pages belong to the file, so the system takes them back when memory is short.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metanudge.names import shown
from metanudge.tasks.cache import cache_folder, replacing
from metanudge.tasks.standardise import Standardisation

LARGE = 1 << 28
"""Bytes of examples that are kept in memory where nothing else is said."""
_PART = 1 << 22  # bytes that are looked at at once
_LONGEST = 1 << 20  # bytes of what stands behind the examples in a file


@dataclass(frozen=True)
class OnDisk:
    """Examples in a file, in the type they have there.

    Attributes:
        data: all of them, mapped from the file; never written to.
        standardisation: what rows are brought on a common scale with; None leaves them.

    Example:
        >>> held = OnDisk.of(np.arange(6, dtype=np.uint8).reshape(3, 2))
        >>> len(held), held.shape, held.rows(torch.tensor([2, 0])).tolist()
        (3, (3, 2), [[4, 5], [0, 1]])
    """

    data: Tensor
    standardisation: Standardisation | None = None

    @classmethod
    def of(cls, array: NDArray[Any]) -> Self:
        """Of an array that is mapped from a file; no copy is made."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # it may be read-only, and is only read
            data = torch.from_numpy(array)
        return cls(data[:, None] if data.ndim == 1 else data)

    def __len__(self) -> int:
        return len(self.data)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all examples."""
        return tuple(self.data.shape)

    def is_floating_point(self) -> bool:
        """Whether rows are of a floating type."""
        return self.data.is_floating_point() or self.data.dtype == torch.bool

    def rows(self, index: Tensor) -> Tensor:
        """Some of the examples, in memory: uint8 as it is, other integers as int64."""
        found = self.data.index_select(0, index)
        if self.standardisation is not None:
            return self.standardisation.apply(found)
        if found.dtype == torch.bool:
            return found.float()
        keep = found.dtype == torch.uint8 or found.is_floating_point()
        return found if keep else found.long()

    def parts(self) -> Iterator[Tensor]:
        """All examples in order, a few at a time, as `rows` gives them."""
        width = math.prod(self.data.shape[1:]) * self.data.element_size()
        for index in torch.arange(len(self)).split(max(1, _PART // max(1, width))):
            yield self.rows(index)


def wanted(on_disk: bool | None, first: Tensor, count: int) -> bool:
    """Whether this many examples like the first are to be kept on disk."""
    return first.nbytes * count > LARGE if on_disk is None else on_disk


def write_examples(
    file: Path, examples: Iterable[Tensor], count: int, about: Callable[[], dict[str, str]]
) -> None:
    """Write examples to a file that other processes see complete or not at all; `about` is asked
    for what is to be kept beside them when all are written.
    """
    with _explained(file.parent, count), replacing(file) as stream:
        footer = json.dumps({**_write(stream, file.parent, examples, count), **about()}).encode()
        stream.write(footer + len(footer).to_bytes(8, "little"))


def read_examples(file: Path) -> tuple[OnDisk, dict[str, str]] | None:
    """Examples that `write_examples` wrote, with what is kept beside them; None where the file is
    missing or damaged.
    """
    try:
        with file.open("rb") as stream:
            stream.seek(-8, os.SEEK_END)
            end = stream.tell()
            length = int.from_bytes(stream.read(8), "little")
            if not 0 < length < min(_LONGEST, end):
                return None
            stream.seek(end - length)
            found = json.loads(stream.read(length))
            dtype, shape = np.dtype(found["dtype"]), tuple(found["shape"])
            size = math.prod(shape) * dtype.itemsize
            if (
                dtype.kind not in "biuf"
                or size + length != end
                or _crc(stream, size) != found["crc"]
            ):
                return None
            mapped = np.memmap(file, dtype, "c", shape=shape)
            return OnDisk.of(mapped), {k: v for k, v in found.items() if isinstance(v, str)}
    # a damaged file fails in a dozen ways, and the answer to each is to make it anew
    except Exception:
        return None


def spooled(examples: Iterable[Tensor], count: int) -> OnDisk:
    """Examples in a file without a name in the cache folder, which is gone when nobody uses them
    any more.
    """
    folder = cache_folder() / "examples"
    with _explained(folder, count):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as stream:
            found = _write(stream, folder, examples, count)
            stream.flush()
            return OnDisk.of(np.memmap(stream, found["dtype"], "c", shape=tuple(found["shape"])))


@contextlib.contextmanager
def _explained(folder: Path, count: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"The {count:,} decoded examples cannot be kept in {shown(folder)}"
            f" ({error.strerror or error}). Set METANUDGE_CACHE to a folder on a disk with space,"
            " or keep them in memory with on_disk=false."
        ) from error


def _write(
    stream: IO[bytes], folder: Path, examples: Iterable[Tensor], count: int
) -> dict[str, Any]:
    """Write the examples one after the other; their shape and type, and a checksum."""
    first: Tensor | None = None
    crc = written = 0
    for example in examples:
        if first is None:
            first, needed = example, example.nbytes * count
            if (free := shutil.disk_usage(folder).free) < needed:
                raise OSError(28, f"they take {needed:,} bytes, and {free:,} are free")
        if example.dtype != first.dtype:
            raise ValueError(
                f"Example {written} is {example.dtype} and the first is {first.dtype}, but in a"
                " file all are of one type. Convert them, or read them into memory with"
                " on_disk=false."
            )
        data = example.contiguous().numpy().tobytes()
        crc = zlib.crc32(data, crc)
        stream.write(data)
        written += 1
    assert first is not None
    dtype = first.numpy().dtype.str
    return {"dtype": dtype, "shape": [written, *first.shape], "crc": crc}


def _crc(stream: IO[bytes], size: int) -> int:
    stream.seek(0)
    crc = 0
    while size:
        data = stream.read(min(_PART, size))
        if not data:
            break
        crc, size = zlib.crc32(data, crc), size - len(data)
    return crc
