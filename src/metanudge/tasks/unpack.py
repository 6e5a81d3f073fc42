"""Reading zip archives by what they unpack to, whatever they declare."""

from __future__ import annotations

import io
import zipfile
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray


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
