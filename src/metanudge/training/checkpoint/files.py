"""The files of a checkpoint: written durably, read with every size and sha256 verified, and errors
that explain themselves.

`manifest.json` vouches for each file of a checkpoint, and with a seal for itself. Everything that
changes the disk goes through `disk`, so that tests can stop the program at each call.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from metanudge.training.errors import CheckpointError
from metanudge.training.files import NEW, SEAL, is_real_folder, parse_json, read_bytes
from metanudge.training.files import seal as sealed

VERSION = 1
MANIFEST, STATE = "manifest.json", "state.json"


def damaged(file: Path, problem: str) -> CheckpointError:
    """The error to raise for a file that is not what was written."""
    return CheckpointError(file, problem, "The checkpoint is damaged; nothing of it was loaded.")


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


def ensure_folder(folder: Path) -> None:
    """Make a folder and those it is in, durably, where they do not exist yet."""
    if not folder.is_dir():
        ensure_folder(folder.parent)
        disk.mkdir(folder)
        sync_folder(folder.parent)


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


# The manifest


def seal(document: dict[str, Any]) -> bytes:
    """The bytes of a manifest: it vouches for all files, so it must vouch for itself too."""
    return sealed(document, indent=1).encode()


def put_in_place(new: Path, folder: Path, *, step: int, files: Mapping[str, Any]) -> None:
    """Give a checkpoint whose files are written its manifest, and then, durably, its name."""
    write_file(new / MANIFEST, [seal({"version": VERSION, "step": int(step), "files": files})])
    sync_folder(new)
    disk.rename(new, folder)
    sync_folder(folder.parent)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint without its seal, which is verified, as is the format
    version.
    """
    path = folder / MANIFEST
    if not exists(folder):
        raise CheckpointError(folder, "does not exist", "Check the path.")
    data = read_file(path)
    try:
        manifest: dict[str, Any] = parse_json(data)
        del manifest[SEAL]
        # Written again it must give the same bytes: this compares the checksum and everything it
        # does not cover.
        intact = seal(manifest) == data
    except (ValueError, KeyError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise damaged(path, "does not match its own sha256")
    if manifest.get("version") != VERSION:
        raise CheckpointError(
            path,
            f"has format version {manifest.get('version')}, and this metanudge reads version"
            f" {VERSION}",
            "Load it with the metanudge that wrote it, or a newer one.",
        )
    if not _describes(manifest.get("files")) or not _is_count(manifest.get("step")):
        raise damaged(path, "does not say which step and files it is of, as a manifest must")
    return manifest


def _describes(files: Any) -> bool:
    """Whether each file has a size and a sha256."""
    return isinstance(files, dict) and all(
        isinstance(file, dict)
        and _is_count(file.get("bytes"))
        and isinstance(file.get("sha256"), str)
        for file in files.values()
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def check_names(folder: Path, files: Mapping[str, Any]) -> None:
    """Refuse a folder that lacks a file of the manifest or has one that is not in it."""
    # Hidden files are file managers' and network file systems' own and do no harm.
    found = {path.name for path in children(folder) if not path.name.startswith(".")} - {MANIFEST}
    for name in sorted(files.keys() - found):
        raise damaged(folder / name, "is missing")
    for name in sorted(found - files.keys()):
        raise CheckpointError(
            folder / name,
            "is not in the manifest: it does not belong to this checkpoint",
            "Move it out of the folder.",
        )


def read_verified(path: Path, expected: Mapping[str, Any]) -> bytes:
    """The bytes of a file, if they have the size and sha256 that the manifest says."""
    data = read_file(path)
    if len(data) != expected["bytes"]:
        raise damaged(path, f"has {len(data)} bytes where the manifest says {expected['bytes']}")
    digest = hashlib.sha256(data).hexdigest()
    if digest != expected["sha256"]:
        raise damaged(
            path,
            f"has sha256 {digest[:12]}... where the manifest says {expected['sha256'][:12]}...",
        )
    return data
