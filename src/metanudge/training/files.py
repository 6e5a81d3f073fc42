"""Files of a run folder, which may be a stranger's: plain files and real folders, never what a
link, FIFO or device leads to.

What is wrong is told as an `OSError` whose `strerror` says what was found there. The run folder
itself may be reached through a link. JSON is read strictly, and sealed with the sha256 of its own
content. One process a time writes to a run: it holds a lock of the operating system on RUN/.lock,
which ends with its holder, however that ends.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import platform
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from metanudge.training.errors import UserError, readable

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}

_held: set[BinaryIO] = set()
SEAL = "sha256"
# Without O_NONBLOCK a FIFO would be waited for; flags that a system does not have (Windows) are
# made up for by looking first.
_PLAIN = (
    getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_BINARY", 0)
)
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _PLAIN  # a file that must not be there yet


def read_bytes(file: Path, *, limit: int | None = None) -> bytes:
    """The bytes of a plain file; an `OSError` (EFBIG) where there are more than `limit`."""
    with os.fdopen(_open(file, os.O_RDONLY), "rb") as stream:
        data = stream.read(-1 if limit is None else limit + 1)
    if limit is not None and len(data) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit} bytes", str(file))
    return data


def open_to_append(file: Path) -> BinaryIO:
    """A plain file to add to, new or there already, that has no second name elsewhere."""
    descriptor = _open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    if os.fstat(descriptor).st_nlink > 1:
        os.close(descriptor)
        raise OSError(
            errno.EMLINK,
            "it has a second name (a hard link), whose content would change too; put a copy there",
            str(file),
        )
    return os.fdopen(descriptor, "ab")


@contextmanager
def replacing(file: Path) -> Iterator[BinaryIO]:
    """A file that takes its place, durable and complete, when the block ends well; a link that is
    there is replaced, not followed.
    """
    temporary = temporary_name(file)
    descriptor = os.open(temporary, NEW, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(descriptor)
        os.replace(temporary, file)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def write_bytes(file: Path, data: bytes) -> None:
    """Write a file that is there complete or not at all."""
    with replacing(file) as stream:
        stream.write(data)


def read_text(file: Path, *, limit: int | None = None) -> str:
    """A plain text file; `UserError` where it cannot be read."""
    try:
        with readable(file):
            return read_bytes(file, limit=limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{file} cannot be read ({error}).") from error


def write_text(file: Path, text: str) -> None:
    """Write a text file that is there complete or not at all."""
    write_bytes(file, text.encode("utf-8"))


def temporary_name(path: Path, mark: str = "new") -> Path:
    """A name beside `path` that nobody can have guessed; it begins with `.new-`, so that what a
    crash leaves is recognised.
    """
    return path.with_name(f".{mark}-{path.name}-{secrets.token_hex(8)}")


def is_real_folder(folder: Path) -> bool:
    """Whether there is a folder; an `OSError` where a link is in its place."""
    if folder.is_symlink():
        raise OSError(errno.ELOOP, f"it is {_kind(stat.S_IFLNK)}", str(folder))
    return folder.is_dir()


def _open(file: Path, flags: int) -> int:
    with suppress(FileNotFoundError):
        _check(file, os.lstat(file))  # merely opening a device may set something off
    descriptor = os.open(file, flags | _PLAIN, 0o666)
    try:
        _check(file, os.fstat(descriptor))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _check(file: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, f"it is {_kind(status.st_mode)}, not a plain file", str(file))


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFLNK: "a link (links in a run folder are not followed)",
        stat.S_IFDIR: "a folder",
        stat.S_IFREG: "a file",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
    }
    return kinds.get(stat.S_IFMT(mode), "a device")


# JSON that vouches for itself


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text in UTF-8; `ValueError` for anything doubtful: NaN, a key given
    twice, nesting without end.

    Example:
        >>> parse_json('{"lam": 2, "lam": 3}')
        Traceback (most recent call last):
        ValueError: 'lam' is given twice
    """
    try:
        return json.loads(
            text if isinstance(text, str) else text.decode(),
            parse_constant=_no_number,
            object_pairs_hook=_unique,
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def without_nan(value: Any) -> Any:
    """The value with None in the place of numbers that JSON does not know; tuples become lists.

    Example:
        >>> without_nan({"loss": float("nan"), "steps": (1, 2.5)})
        {'loss': None, 'steps': [1, 2.5]}
    """
    if isinstance(value, Mapping):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def seal(document: Mapping[str, Any], *, indent: int) -> str:
    """A JSON text of the document that ends with its sha256."""
    return json.dumps({**document, SEAL: _digest(document, indent)}, indent=indent) + "\n"


def is_intact(document: Mapping[str, Any], *, indent: int) -> bool:
    """Whether a sealed document, read from its file, still holds what was sealed."""
    return document.get(SEAL) == _digest(
        {key: value for key, value in document.items() if key != SEAL}, indent
    )


def _digest(document: Mapping[str, Any], indent: int) -> str:
    return hashlib.sha256(json.dumps(document, indent=indent).encode()).hexdigest()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} is given twice")
        found[key] = value
    return found


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is not a number that JSON knows")


# One writer a run


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

    def __exit__(self, *_: object) -> None:
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
