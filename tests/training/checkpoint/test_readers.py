"""Readers beside a writer: a checkpoint that is removed while it is read is not damage."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from checkpoints import is_sample, sample, saved
from metanudge.training.checkpoint import CheckpointError, CheckpointStore, store


def test_no_load_beside_a_writer_fails(tmp_path: Path) -> None:
    """With keep=1 the writer removes what a reader has just found as often as can be."""
    writer = saved(tmp_path, steps="1*", keep=1)
    done, failures = threading.Event(), []

    def write() -> None:
        step = 2
        while not done.is_set():
            writer.save(step, **sample(step), best=step % 2 == 0)
            step += 1

    thread = threading.Thread(target=write)
    thread.start()
    reader = CheckpointStore(tmp_path)
    try:
        for number in range(400):
            try:
                checkpoint = reader.load(("last", "best")[number % 2])
            except CheckpointError as error:
                failures.append(str(error))
            else:
                assert is_sample(checkpoint, checkpoint.step)
    finally:
        done.set()
        thread.join()
    assert failures == []


@pytest.mark.parametrize("call", range(1, 9))
def test_a_checkpoint_removed_at_any_moment_of_its_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """The writer removes the last checkpoint, having saved a newer one, just before the reader's
    n-th look at the disk.
    """
    from metanudge.training.checkpoint import files

    kept = saved(tmp_path, steps="1", keep=1)
    looks = 0

    def before_each_look(look):  # type: ignore[no-untyped-def]
        def looking(*args):  # type: ignore[no-untyped-def]
            nonlocal looks
            looks += 1
            if looks == call:
                kept.save(2, **sample(2))
            return look(*args)

        return looking

    monkeypatch.setattr(files, "read_file", before_each_look(files.read_file))
    monkeypatch.setattr(files, "children", before_each_look(files.children))
    monkeypatch.setattr(store, "load", before_each_look(store.load))
    found = CheckpointStore(tmp_path).load()
    assert is_sample(found, found.step)
    assert found.step == 2 or looks < call


def test_a_name_that_is_gone_for_good_is_still_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = saved(tmp_path, steps="1", keep=1)

    def removed_first(path: Path) -> object:
        kept.save(2, **sample(2))
        monkeypatch.undo()
        return store.load(path)

    monkeypatch.setattr(store, "load", removed_first)
    with pytest.raises(
        CheckpointError, match=r"has no checkpoint 'save-000001-step-1'.*It has: save-000002-step-2"
    ):
        kept.load("save-000001-step-1")
