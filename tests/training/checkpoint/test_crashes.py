"""Crashes: a death at every system call of a save, and the order in which things become durable."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import metanudge
from checkpoints import (
    Killed,
    MortalDisk,
    UseDisk,
    check_next_save,
    check_survivors,
    is_sample,
    names,
    sample,
    saved,
)
from metanudge.training.checkpoint import CheckpointStore, files, save


def deaths(before: Path | None, root: Path, on_disk: UseDisk, *, half: bool) -> Iterator[int]:
    """Yields after each death of a save of step 9, at its first, second, ... call, until one save
    lives.
    """
    for number in range(1, 1000):
        shutil.rmtree(root, ignore_errors=True)
        if before is not None:
            shutil.copytree(before, root)
        disk = on_disk(MortalDisk(number, half=half))
        try:
            CheckpointStore(root).save(9, **sample(9), best=True)
        except Killed:
            disk.close_all()
            on_disk(MortalDisk())
            yield number
        else:
            assert number > 30
            return
    raise AssertionError("the save never completed")


@pytest.mark.parametrize("half", [False, True], ids=["before each call", "half-way through writes"])
def test_a_crash_at_any_call_leaves_the_old_or_the_new_checkpoints(
    half: bool, tmp_path: Path, on_disk: UseDisk
) -> None:
    before = saved(tmp_path / "before").root
    seen = []
    for _ in deaths(before, tmp_path / "run", on_disk, half=half):
        store = CheckpointStore(tmp_path / "run")
        seen.append(check_survivors(store))
        check_next_save(store)
    assert seen == sorted(seen, reverse=True)  # old until one instant, new from there on
    assert {"old", "new"} == set(seen)


def test_a_crash_in_the_first_save_leaves_nothing_or_all(tmp_path: Path, on_disk: UseDisk) -> None:
    for _ in deaths(None, tmp_path / "run", on_disk, half=True):
        store = CheckpointStore(tmp_path / "run")
        assert not names(store) or is_sample(store.load(), 9)
        check_next_save(store)


def test_a_second_crash_while_tidying_up_does_no_harm(tmp_path: Path, on_disk: UseDisk) -> None:
    before, crashed = saved(tmp_path / "before").root, tmp_path / "crashed"
    for first in deaths(before, crashed, on_disk, half=False):
        if first % 9:
            continue
        for second in range(1, 12):
            root = tmp_path / f"run-{first}-{second}"
            shutil.copytree(crashed, root)
            disk = on_disk(MortalDisk(second))
            with pytest.raises(Killed):
                CheckpointStore(root).save(11, **sample(11))
            disk.close_all()
            on_disk(MortalDisk())
            check_survivors(CheckpointStore(root))
            check_next_save(CheckpointStore(root))


def test_leftovers_go_before_the_next_save_needs_their_space(
    tmp_path: Path, on_disk: UseDisk
) -> None:
    store = saved(tmp_path)
    on_disk(MortalDisk(15))
    with pytest.raises(Killed):
        store.save(9, **sample(9))
    assert len(list(tmp_path.glob(".new-save-000004-step-9-*"))) == 1
    disk = on_disk(MortalDisk())
    store.save(11, **sample(11))
    calls = [name for name, *_ in disk.trace]
    assert calls.index("rmdir") < calls.index("mkdir")


def test_writes_that_take_less_than_they_are_given_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Short(files.Disk):
        @staticmethod
        def write(descriptor: int, data: Any) -> int:  # type: ignore[override]
            return os.write(descriptor, data[:7])

    monkeypatch.setattr(files, "disk", Short())
    assert is_sample(saved(tmp_path).load(), 3)


def test_everything_is_synced_before_something_relies_on_it(
    tmp_path: Path, on_disk: UseDisk
) -> None:
    """What a power cut needs and no killed process shows: each name and each byte is durable before
    the next stage.
    """
    root = saved(tmp_path / "run").root
    disk = on_disk(MortalDisk())
    CheckpointStore(root).save(9, **sample(9), best=True)
    paths: dict[int, Path] = {}
    unsynced: set[Path] = set()  # files with bytes, folders with names, that a power cut would take
    renamed = removed = 0
    for name, args, result in disk.trace:
        if name == "open":
            paths[result] = Path(args[0])
            if args[1] & os.O_CREAT:
                unsynced |= {Path(args[0]), Path(args[0]).parent}
        elif name == "write":
            unsynced.add(paths[args[0]])
        elif name == "fsync":
            unsynced.discard(paths[args[0]])
        elif name == "mkdir":
            unsynced.add(Path(args[0]).parent)
        elif name == "rename" and Path(args[0]).name.startswith(".new-"):
            assert unsynced == {root}, (
                "the new folder and its files are durable before it gets its name"
            )
            renamed += 1
        elif name == "rename":
            assert renamed == 1
            assert removed or root not in unsynced, "the new name is durable before an old one goes"
            removed += 1
            unsynced.add(root)
        elif name in ("unlink", "rmdir"):
            assert root not in unsynced, "an old name is gone for good before its files go"
    assert (renamed, removed) == (1, 2)


SIGKILL_SCRIPT = """
import os, shutil, signal, sys
from metanudge.training.checkpoint import CheckpointStore, files, load

class Disk:
    def __init__(self, die_at):
        self.left = die_at
    def __getattr__(self, name):
        def call(*args):
            self.left -= 1
            if self.left == 0:
                if name == "write":
                    os.write(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return getattr(os, name)(*args)
        return call

before, root = sys.argv[1:]
new = load(before + "/../sample")
for number in range(1, 1000):
    shutil.copytree(before, f"{root}/{number}")
    child = os.fork()
    if child == 0:
        files.disk = Disk(number)
        CheckpointStore(f"{root}/{number}").save(9, new.tensors, new.state, best=True)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if not os.WIFSIGNALED(status):
        sys.exit(os.WEXITSTATUS(status))
    assert os.WTERMSIG(status) == signal.SIGKILL
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes")
def test_a_process_killed_at_any_call_leaves_the_old_or_the_new_checkpoints(tmp_path: Path) -> None:
    before = saved(tmp_path / "before").root
    save(tmp_path / "sample", step=9, **sample(9))
    source = str(Path(metanudge.__file__).parents[1])
    subprocess.run(
        [sys.executable, "-c", SIGKILL_SCRIPT, str(before), str(tmp_path / "run")],
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": source},
    )
    roots = sorted((tmp_path / "run").iterdir(), key=lambda path: int(path.name))
    seen = [check_survivors(CheckpointStore(root)) for root in roots]
    assert len(seen) > 30
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] == "new"
    for root in roots[::5]:
        check_next_save(CheckpointStore(root))
