"""Files of a run folder, which may be a stranger's: plain files and real folders, never what a
link, FIFO or device leads to.

What is wrong is told as an `OSError` whose `strerror` says what was found there. The run folder
itself may be reached through a link. JSON is read strictly, and sealed with the sha256 of its own
content.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from metanudge.training.errors import UserError

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
        return read_bytes(file, limit=limit).decode("utf-8")
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}).") from error
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
