"""Errors of the disk: explained, and harmless to the checkpoints that are there."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from checkpoints import (
    MortalDisk,
    UseDisk,
    check_next_save,
    check_survivors,
    is_sample,
    names,
    sample,
    saved,
)
from metanudge.training.checkpoint import CheckpointError, CheckpointStore, files


@pytest.mark.parametrize(
    ("code", "fix"),
    [
        (errno.ENOSPC, "Free some space"),
        (errno.EACCES, "permissions"),
        (errno.EROFS, "not read-only"),
        (errno.EIO, "Check the disk"),
    ],
)
def test_an_error_of_the_disk_at_any_call_is_explained_and_harmless(
    code: int, fix: str, tmp_path: Path, on_disk: UseDisk
) -> None:
    before = saved(tmp_path / "before").root
    raised = 0
    for number in range(1, 40):
        root = tmp_path / "run"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(before, root)
        disk = on_disk(MortalDisk(number, error=OSError(code, os.strerror(code))))
        store, caught = CheckpointStore(root), None
        try:
            store.save(9, **sample(9), best=True)
        except (CheckpointError, UserWarning) as error:  # warnings are errors in tests
            caught = error
        committed = any(name == "rename" for name, *_ in disk.trace)
        assert check_survivors(store) == ("new" if committed else "old")
        if isinstance(caught, CheckpointError):
            raised += 1
            assert os.strerror(code) in str(caught)
            assert fix in str(caught)
            assert root in [caught.file, *caught.file.parents]
            assert committed or sorted(path.name for path in root.iterdir()) == names(store), (
                "leftovers"
            )
        else:  # the new checkpoint is safe, only an old one could not be removed
            assert committed
            assert caught is None or "could not be removed" in str(caught)
        disk.close_all()
        on_disk(MortalDisk())
        check_next_save(store)
    assert raised > 25


@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write to read-only folders"
)
def test_a_read_only_folder_is_explained(tmp_path: Path) -> None:
    store = saved(tmp_path / "run")
    store.root.chmod(0o500)
    try:
        with pytest.raises(CheckpointError, match=r"Permission denied.*may write to"):
            store.save(9, **sample(9))
        assert check_survivors(store) == "old"
    finally:
        store.root.chmod(0o700)


def test_a_file_in_the_way_of_the_folder_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CheckpointError, match="could not be written"):
        CheckpointStore(tmp_path / "file").save(1, {}, {})
    with pytest.raises(CheckpointError, match="could not be written"):
        CheckpointStore(tmp_path / "file" / "checkpoints").save(1, {}, {})


def test_a_leftover_that_stays_is_a_warning_not_the_end_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stubborn(files.Disk):
        @staticmethod
        def rmdir(path: Any) -> None:  # type: ignore[override]
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    store = saved(tmp_path, steps="1 2")
    monkeypatch.setattr(files, "disk", Stubborn())
    with pytest.warns(
        UserWarning,
        match=r"\.old-save-000001-step-1-\w+ could not be removed \(Device or resource busy\)",
    ):
        store.save(3, **sample(3))
    monkeypatch.undo()
    assert is_sample(store.load(), 3)
    store.save(4, **sample(4))
    assert sorted(path.name for path in tmp_path.iterdir()) == names(store)
