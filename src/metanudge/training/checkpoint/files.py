"""The file system below the checkpoints: writes that are durable, reads and failures that explain
themselves.

Everything that changes the disk goes through `disk` in this file, so that tests can stop the
program at each call.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from metanudge.training.checkpoint.errors import CheckpointError, damaged
from metanudge.training.files import NEW, is_real_folder, read_bytes


class Disk:
    """Every call that changes the disk, one system call a name: tests replace `disk` to stop the
    program at each.
    """

    mkdir = staticmethod(os.mkdir)
    open = staticmethod(os.open)
    write = staticmethod(os.write)
    fsync = staticmethod(os.fsync)
    close = staticmethod(os.close)
    rename = staticmethod(os.rename)
    unlink = staticmethod(os.unlink)
    rmdir = staticmethod(os.rmdir)


disk = Disk()


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> dict[str, Any]:
    """Write a new file through to the disk; returns what the manifest says about it."""
    digest, size = hashlib.sha256(), 0
    try:
        descriptor = disk.open(path, NEW, 0o666)
        try:
            for chunk in chunks:
                digest.update(chunk)
                size += len(chunk)
                rest = memoryview(chunk)
                while rest:  # a system call may write less than it was given
                    rest = rest[disk.write(descriptor, rest) :]
            disk.fsync(descriptor)
        finally:
            disk.close(descriptor)
    except OSError as error:
        error.filename = str(path)  # write and fsync know a number only
        raise
    return {"bytes": size, "sha256": digest.hexdigest()}


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable: until then a power cut may undo a rename or bring a
    deleted file back.
    """
    if os.name == "nt":  # Windows cannot open folders; NTFS keeps its names in a journal
        return
    descriptor = disk.open(folder, os.O_RDONLY)
    try:
        disk.fsync(descriptor)
    except OSError as error:
        # network file systems that cannot sync a folder say so
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        disk.close(descriptor)


def create_folder(folder: Path) -> None:
    """Make a new folder; its name is durable once the folder it is in is synced."""
    disk.mkdir(folder)


def ensure_folder(folder: Path) -> None:
    """Make a folder and those it is in, durably, where they do not exist yet."""
    if not folder.is_dir():
        ensure_folder(folder.parent)
        create_folder(folder)
        sync_folder(folder.parent)


def rename(old: Path, new: Path) -> None:
    """Rename a file or folder in one instant; durable once the folder it is in is synced."""
    disk.rename(old, new)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder with all it holds, if it is there."""
    if path.is_dir() and not path.is_symlink():
        for child in path.iterdir():
            remove(child)
        disk.rmdir(path)
    elif path.exists() or path.is_symlink():
        disk.unlink(path)


def exists(folder: Path) -> bool:
    """Whether there is such a folder; a link to one is refused."""
    try:
        return is_real_folder(folder)
    except OSError as error:
        raise CheckpointError(
            folder, f"cannot be used ({error.strerror})", "Put the folder itself there."
        ) from error


def children(folder: Path) -> list[Path]:
    """What a folder holds; nothing if there is no such folder."""
    try:
        return list(folder.iterdir()) if exists(folder) else []
    except OSError as error:
        raise CheckpointError(
            folder, f"cannot be listed ({error.strerror})", "Change its permissions."
        ) from error


def read_file(path: Path) -> bytes:
    """The bytes of a file that a checkpoint must have."""
    try:
        return read_bytes(path)
    except FileNotFoundError as error:
        raise damaged(path, "is missing") from error
    except OSError as error:
        raise CheckpointError(
            path,
            f"cannot be read ({error.strerror})",
            "Check its permissions and the disk; nothing was loaded.",
        ) from error


_FIXES = {
    errno.ENOSPC: "Free some space, then save again.",
    errno.EDQUOT: "Free some of your quota, then save again.",
    errno.EACCES: "Choose a folder that you may write to, or change its permissions.",
    errno.EPERM: "Choose a folder that you may write to, or change its permissions.",
    errno.EROFS: "Choose a folder on a disk that is not read-only.",
    errno.EEXIST: "Choose another name, or remove what is there.",
}


@contextmanager
def os_errors_explained(folder: Path) -> Iterator[None]:
    """Turn what the system says about a write into a `CheckpointError` with a remedy."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            Path(error.filename or folder),
            f"could not be written ({error.strerror}); earlier checkpoints are untouched",
            _FIXES.get(error.errno or 0, "Check the disk and the path, then save again."),
        ) from error
