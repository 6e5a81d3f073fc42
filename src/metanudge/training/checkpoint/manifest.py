"""The manifest: `manifest.json` vouches with size and sha256 for each file of a checkpoint, and
with a seal for itself.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metanudge.training import sealed
from metanudge.training.checkpoint.errors import CheckpointError, damaged
from metanudge.training.checkpoint.files import children, exists, read_file

VERSION = 1
MANIFEST = "manifest.json"


def seal(document: dict[str, Any]) -> bytes:
    """The bytes of a manifest: it vouches for all files, so it must vouch for itself too."""
    return sealed.seal(document, indent=1).encode()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint without its seal, which is verified, as is the format
    version.
    """
    path = folder / MANIFEST
    if not exists(folder):
        raise CheckpointError(folder, "does not exist", "Check the path.")
    data = read_file(path)
    try:
        manifest: dict[str, Any] = sealed.parse_json(data)
        del manifest[sealed.SEAL]
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
