"""Archives are read by what they unpack to."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest

from metanudge.tasks.cache import load_arrays, read_arrays, read_entry


def archive(content: bytes, *, method: int = zipfile.ZIP_DEFLATED) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", method) as file:
        file.writestr("x", content)
    return packed.getvalue()


def test_an_entry_of_the_largest_size_and_one_byte_more() -> None:
    with zipfile.ZipFile(io.BytesIO(archive(b"a" * 1000))) as file:
        assert read_entry(file, "x", limit=1000) == b"a" * 1000
        with pytest.raises(ValueError, match="unpacks to more than 999 bytes"):
            read_entry(file, "x", limit=999)


def test_a_size_that_is_declared_smaller_helps_nobody() -> None:
    data = archive(b"\0" * 10_000_000)
    for size in (10, 0):
        lie = data.replace(struct.pack("<L", 10_000_000), struct.pack("<L", size))
        assert lie != data
        with (
            zipfile.ZipFile(io.BytesIO(lie)) as file,
            pytest.raises((ValueError, zipfile.BadZipFile)),
        ):
            assert len(read_entry(file, "x", limit=1000)) > 1000


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_methods_that_unpack_before_they_count_are_refused(method: int) -> None:
    with (
        zipfile.ZipFile(io.BytesIO(archive(b"a", method=method))) as file,
        pytest.raises(ValueError, match="other than deflate"),
    ):
        read_entry(file, "x", limit=1000)


def test_the_arrays_of_a_file_are_counted_together(tmp_path: Path) -> None:
    packed = io.BytesIO()
    np.savez_compressed(packed, a=np.zeros(1000, np.uint8), b=np.zeros(1000, np.uint8))
    assert list(read_arrays(packed, limit=3000)) == ["a", "b"]
    with pytest.raises(ValueError, match=r"'b.npy' unpacks to more than"):
        read_arrays(packed, limit=2000)
    (tmp_path / "x.npz").write_bytes(packed.getvalue())
    assert load_arrays(tmp_path / "x.npz", {"a": (1000,)}) is not None
    assert load_arrays(tmp_path / "x.npz", {"a": (1000,)}, limit=2000) is None


def test_pickles_are_not_run() -> None:
    packed = io.BytesIO()
    np.savez(packed, a=np.array([{}], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle"):
        read_arrays(packed, limit=10_000)
