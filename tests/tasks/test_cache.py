from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from metanudge.tasks.cache import cache_folder, load_arrays, save_arrays


def test_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("METANUDGE_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
    monkeypatch.delenv("METANUDGE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "metanudge"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == Path.home() / ".cache" / "metanudge"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache" / "metanudge"


def test_saved_arrays_come_back_and_leave_nothing_else(tmp_path):
    path = tmp_path / "new" / "file.npz"
    save_arrays(path, {"a": np.arange(6).reshape(2, 3)})
    assert load_arrays(path, {"a": (None, 3)})["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert os.listdir(path.parent) == ["file.npz"]


def test_another_layout_is_not_loaded(tmp_path):
    path = tmp_path / "file.npz"
    save_arrays(path, {"a": np.zeros((2, 3))})
    for expected in ({"a": (3, 2)}, {"a": (2, 3, 1)}, {"b": (2, 3)}):
        assert load_arrays(path, expected) is None
    assert load_arrays(tmp_path / "missing.npz", {"a": (2, 3)}) is None


def test_no_damage_to_a_file_is_fatal(tmp_path):
    path = tmp_path / "file.npz"
    save_arrays(path, {"a": np.arange(20.0)})
    good = path.read_bytes()
    for cut in range(0, len(good), 7):
        path.write_bytes(good[:cut])
        assert load_arrays(path, {"a": (20,)}) is None
    rng = np.random.default_rng(0)
    for place in rng.integers(len(good), size=150):
        path.write_bytes(good[:place] + bytes([good[place] ^ 0xFF]) + good[place + 1 :])
        loaded = load_arrays(path, {"a": (20,)})
        assert loaded is None or np.array_equal(loaded["a"], np.arange(20.0))
    for content in (b"", b"not an archive", b"\x80\x04N."):
        path.write_bytes(content)
        assert load_arrays(path, {"a": (20,)}) is None


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file.npz"
    save_arrays(path, {"a": np.zeros(3)})

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.warns(UserWarning, match="No space left on device.*METANUDGE_CACHE"):
        save_arrays(path, {"a": np.ones(3)})
    assert os.listdir(tmp_path) == ["file.npz"]
    assert load_arrays(path, {"a": (3,)})["a"].tolist() == [0, 0, 0]


def test_a_folder_that_cannot_be_made_only_warns(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match="Could not write"):
        save_arrays(tmp_path / "file" / "a.npz", {"a": np.zeros(3)})
