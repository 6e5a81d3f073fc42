"""Where generated and downloaded data are kept, and how they get there without half-written
files.
"""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray


def cache_folder() -> Path:
    """The folder for data files: $METANUDGE_CACHE, else $XDG_CACHE_HOME/metanudge, else
    ~/.cache/metanudge.

    It is not created here.
    """
    if own := os.environ.get("METANUDGE_CACHE"):
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification tells programs to ignore relative paths.
    base = Path(shared) if shared and Path(shared).is_absolute() else Path.home() / ".cache"
    return base / "metanudge"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes its place when the block ends well.

    It is written under a temporary name in the same folder, then renamed, so a killed run leaves no
    broken file and two runs that write at once both succeed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem + ".", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(handle)
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def save_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write an .npz file that other processes see complete or not at all. A cache that cannot be
    written costs time, not correctness: this warns.
    """
    try:
        with replacing(path) as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]  # numpy's stub reads the names as allow_pickle
    except OSError as error:
        warnings.warn(
            f"Could not write {path} ({error}), so this data set will be prepared again next time. "
            "Set METANUDGE_CACHE to a folder that can be written.",
            stacklevel=2,
        )


def load_arrays(
    path: Path, expected: Mapping[str, tuple[int | None, ...]], *, limit: int = 1 << 32
) -> dict[str, NDArray[Any]] | None:
    """The arrays of a cached .npz file, or None when it is missing, damaged, of another layout or
    too large.

    Args:
        path: the file.
        expected: name → shape of each array that must be there; None stands for any length.
        limit: bytes that the file may unpack to.
    """
    try:
        with path.open("rb") as file:
            read = read_arrays(file, limit=limit)
        arrays = {name: read[name] for name in expected}
    # a damaged file fails in a dozen ways, and the answer to each is to make it anew
    except Exception:
        return None
    fit = all(_fits(arrays[name].shape, shape) for name, shape in expected.items())
    return arrays if fit else None


def _fits(shape: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    return len(shape) == len(expected) and all(
        e in (None, s) for s, e in zip(shape, expected, strict=True)
    )


# --- Zip archives, by what they unpack to, whatever they declare


def read_entry(archive: zipfile.ZipFile, name: str, *, limit: int) -> bytes:
    """The bytes of an entry; `ValueError` where there are more than `limit`."""
    info = archive.getinfo(name)
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        # The others are unpacked whole before they are counted.
        raise ValueError(f"{name!r} is packed with a method other than deflate")
    with archive.open(info) as entry:
        data = entry.read(limit + 1)
    if len(data) > limit:
        raise ValueError(f"{name!r} unpacks to more than {limit:,} bytes")
    return data


def read_arrays(file: IO[bytes], *, limit: int) -> dict[str, NDArray[Any]]:
    """The arrays of an .npz file; `ValueError` where they unpack to more than `limit` bytes in
    all.
    """
    arrays: dict[str, NDArray[Any]] = {}
    with zipfile.ZipFile(file) as archive:
        for name in archive.namelist():
            data = read_entry(archive, name, limit=limit)
            limit -= len(data)
            arrays[name.removesuffix(".npy")] = np.load(io.BytesIO(data), allow_pickle=False)
    return arrays
