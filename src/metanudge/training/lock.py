"""One writer a run: a lock of the operating system on RUN/.lock, which ends with its holder,
however that ends.
"""

from __future__ import annotations

import errno
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from metanudge.training.errors import UserError
from metanudge.training.files import open_to_append, parse_json, read_bytes

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}

_held: set[BinaryIO] = set()


def _let_go() -> None:
    # A lock lives as long as any copy of its descriptor: without this, a forked child would keep it
    # after its parent's death.
    for stream in _held:
        stream.close()
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)


class RunLock:
    """The lock of one run folder, held from `take` to the end of the `with` block.

    Args:
        note: is told where the file system has no locks; the run then goes on without.
        job: is written down beside process and host, see `job_of`.
    """

    def __init__(self, note: Callable[[str], None], *, job: str | None = None) -> None:
        self._note, self._job = note, job
        self._stream: BinaryIO | None = None

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def take(self, folder: Path) -> None:
        """Lock a run folder; `UserError` names the process that has it."""
        self._stream = stream = _locked(folder, self._note)
        _held.add(stream)
        stream.truncate(0)
        stream.write(
            json.dumps({"pid": os.getpid(), "host": platform.node(), "job": self._job}).encode()
            + b"\n"
        )
        stream.flush()

    def release(self) -> None:
        """Let others have it; what stands in the file stays there."""
        if self._stream in _held:  # a forked child has let go already
            _held.discard(self._stream)
            self._stream.close()
        self._stream = None


def check_free(folder: Path) -> None:
    """Raise `UserError` where a process holds the lock of a folder."""
    if os.path.lexists(folder / LOCK):
        _locked(folder, lambda text: None).close()


def job_of(folder: Path) -> str | None:
    """The torchrun job that last wrote to a run folder; None where there was none."""
    job = _holder(folder).get("job")
    return job if isinstance(job, str) else None


def _locked(folder: Path, note: Callable[[str], None]) -> BinaryIO:
    """The lock's file, open and locked."""
    try:
        stream = open_to_append(folder / LOCK)
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written ({error.strerror}). Give a folder of yours: --out FOLDER"
        ) from error
    try:
        if fcntl is None:
            raise OSError(errno.ENOSYS, "this system has none that metanudge knows")
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            stream.close()
            raise UserError(
                _in_use(folder)
                if isinstance(error, BlockingIOError)
                else f"{folder} cannot be locked ({error})."
            ) from error
        note(
            f"{folder} is on a file system without locks ({error.strerror}): see to it that no"
            " other process trains in it."
        )
    return stream


def _in_use(folder: Path) -> str:
    holder = _holder(folder)
    who = (
        f"process {holder['pid']} on {holder['host']}"
        if holder.keys() >= {"pid", "host"}
        else "another process"
    )
    return (
        f"{folder} is in use: {who} is training in it. Wait until it ends or stop it, or give"
        " another folder: --out FOLDER"
    )


def _holder(folder: Path) -> dict[str, Any]:
    try:
        found = parse_json(read_bytes(folder / LOCK, limit=10_000))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
