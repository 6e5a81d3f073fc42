"""One writer a run: the lock is the operating system's, names its holder, and dies with it."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from metanudge.training.errors import UserError
from metanudge.training.files import LOCK, RunLock, check_free, job_of


def silent(text: str) -> None:
    raise AssertionError(text)


def test_the_second_is_refused_with_the_name_of_the_first_until_that_lets_go(
    tmp_path: Path,
) -> None:
    check_free(tmp_path)
    with RunLock(silent) as first, RunLock(silent) as second:
        first.take(tmp_path)
        for attempt in (lambda: second.take(tmp_path), lambda: check_free(tmp_path)):
            with pytest.raises(
                UserError, match=rf"in use: process {os.getpid()} on {platform.node()}.*--out"
            ):
                attempt()
        first.release()
        check_free(tmp_path)
        second.take(tmp_path)
        with pytest.raises(UserError, match="in use"):
            first.take(tmp_path)


def test_a_killed_holder_holds_nothing(tmp_path: Path) -> None:
    code = "import sys, pathlib; from metanudge.training.files import RunLock\n"
    code += (
        "RunLock(print).take(pathlib.Path(sys.argv[1])); print('held', flush=True);"
        " sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"process {holder.pid} on"):
            check_free(tmp_path)
        holder.kill()
        holder.wait()
        check_free(tmp_path)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = RunLock(silent)
    lock.take(tmp_path)
    (child_reads, parent_writes), (parent_reads, child_writes) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(parent_writes)
        os.write(child_writes, b".")
        os.read(child_reads, 1)  # until the parent has seen that the lock is free
        lock.release()  # has nothing to let go any more
        os._exit(0)
    try:
        assert os.read(parent_reads, 1) == b"."
        with pytest.raises(UserError, match="in use"):
            check_free(tmp_path)
        lock.release()
        check_free(tmp_path)
    finally:
        os.close(parent_writes)
        assert os.waitpid(child, 0)[1] == 0
        for descriptor in (child_reads, parent_reads, child_writes):
            os.close(descriptor)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, None])
def test_without_locks_the_run_goes_on_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int | None
) -> None:
    def no_locks(file: object, how: int) -> None:
        raise OSError(number, os.strerror(number or 0))

    (
        monkeypatch.setattr("metanudge.training.files.fcntl", None)
        if number is None
        else monkeypatch.setattr(fcntl, "flock", no_locks)
    )
    notes: list[str] = []
    with RunLock(notes.append, job="a job") as lock:
        lock.take(tmp_path)
    assert len(notes) == 1
    assert "without locks" in notes[0]
    assert str(tmp_path) in notes[0]
    assert job_of(tmp_path) == "a job"


def test_other_troubles_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(file: object, how: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(UserError, match=r"nowhere cannot be written"):
        RunLock(silent).take(tmp_path / "nowhere")
    monkeypatch.setattr(fcntl, "flock", broken)
    with pytest.raises(UserError, match=r"cannot be locked .*Input/output error"):
        RunLock(silent).take(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b"{", b'{"job": 3}', b"[" * 9999])
def test_a_spoilt_lock_file_names_nobody(tmp_path: Path, content: bytes) -> None:
    with RunLock(silent) as lock:
        lock.take(tmp_path)
        (tmp_path / LOCK).write_bytes(content)
        assert job_of(tmp_path) is None
        with pytest.raises(UserError, match="in use: another process is"):
            check_free(tmp_path)
