"""Finding Omniglot: a local copy, the cache folder or the original archives on the network; all
become one array.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from metanudge.tasks.cache import cache_folder, load_arrays, save_arrays
from metanudge.tasks.omniglot_archive import DRAWERS, SIZE, OmniglotArrays, read_part

CHARACTERS: Mapping[str, int] = {"images_background": 964, "images_evaluation": 659}

# A commit, not a branch: what it names cannot change.
_COMMIT = "ceffff1ba059df9c19f12021b738dd1e0d8dd650"
_URL = f"https://raw.githubusercontent.com/brendenlake/omniglot/{_COMMIT}/python/"
_SHA256 = {
    "images_background": "ad41ab679c8b5d90b271ef46be6987cc81211774a695c29dcc5367b2b26ee640",
    "images_evaluation": "1f61a8f3366785b057fc117d9228e78a16e3d976c8953b2a10fcc74cf0609cee",
}
_PROCESSED = "omniglot_28.npz"


class DownloadError(RuntimeError):
    """The archives could not be fetched; the message says from where, why, and how to do
    without.
    """


def load_omniglot(
    root: str | os.PathLike[str] | None = None, *, download: bool = True
) -> OmniglotArrays:
    """The images, from the first of these places: `root`; $METANUDGE_DATA; the cache folder; the
    network.

    Each is a folder that holds `omniglot_28.npz`, or the two archives `images_background` and
    `images_evaluation` as .zip or unpacked, directly or in a sub-folder `omniglot`; `root` may also
    be the .npz file itself. A `root` that is given is the only place looked at. Background
    characters come first, then evaluation, each in name order.
    """
    home = cache_folder() / "omniglot"
    data = os.environ.get("METANUDGE_DATA")
    if root is not None:
        if Path(root).is_file():
            return _from_processed(Path(root))
        folders = [Path(root), Path(root) / "omniglot"]
    else:
        folders = [*([Path(data), Path(data) / "omniglot"] if data else []), home]
    for folder in folders:
        if (folder / _PROCESSED).is_file():
            return _from_processed(folder / _PROCESSED)
        if parts := _find_parts(folder):
            return _from_parts(parts)
    if root is not None or not download:
        looked = ", ".join(str(folder) for folder in folders)
        raise FileNotFoundError(
            f"Omniglot was not found in {looked}. A folder must hold {_PROCESSED}, or"
            " images_background and images_evaluation as .zip files or unpacked folders. "
            + (
                "Give another root, or root=None to download it."
                if root is not None
                else "Allow download=True."
            )
        )
    return _from_parts({part: _download(part, home) for part in CHARACTERS})


def _find_parts(folder: Path) -> dict[str, Path] | None:
    found: dict[str, Path] = {}
    for part in CHARACTERS:
        for path in (folder / part, folder / f"{part}.zip"):
            if path.is_dir() or path.is_file():  # no FIFO, which would be waited for
                found.setdefault(part, path)
    if found and len(found) < len(CHARACTERS) and folder != cache_folder() / "omniglot":
        (missing,) = set(CHARACTERS) - set(found)
        raise FileNotFoundError(
            f"{folder} holds {next(iter(found))} but not {missing}. Omniglot has both parts; put"
            f" {missing}.zip, or the unpacked folder {missing}, next to it."
        )
    return found if len(found) == len(CHARACTERS) else None


def _load(path: Path) -> dict[str, NDArray[Any]] | None:
    total = sum(CHARACTERS.values())
    return load_arrays(
        path, {"images": (total, DRAWERS, SIZE, SIZE), "class_names": (total,)}, limit=1 << 27
    )


def _from_processed(path: Path) -> OmniglotArrays:
    arrays = _load(path)
    if arrays is None or arrays["images"].dtype != np.uint8:
        total = sum(CHARACTERS.values())
        raise ValueError(
            f"{path} is damaged or is not the processed Omniglot set: it needs `images`, uint8 of"
            f" shape ({total}, {DRAWERS}, {SIZE}, {SIZE}), and `class_names`, {total} strings."
            " Delete it or replace it."
        )
    return OmniglotArrays(arrays["images"], tuple(str(name) for name in arrays["class_names"]))


def _from_parts(parts: Mapping[str, Path]) -> OmniglotArrays:
    # The name holds a fingerprint of the source, so another copy never meets the cached result of
    # this one.
    digest = hashlib.sha256(
        "".join(_fingerprint(path) for path in parts.values()).encode()
    ).hexdigest()
    cached = cache_folder() / "omniglot" / f"omniglot_28-{digest[:16]}.npz"
    arrays = _load(cached)
    if arrays is None:
        read = [read_part(path, CHARACTERS[part]) for part, path in parts.items()]
        images, names = (
            np.concatenate([r.images for r in read]),
            [name for r in read for name in r.names],
        )
        arrays = {"images": images, "class_names": np.array(names)}
        save_arrays(cached, arrays)
    return OmniglotArrays(arrays["images"], tuple(str(name) for name in arrays["class_names"]))


def _fingerprint(path: Path) -> str:
    """A digest of an archive's bytes, or of the names, sizes and times of a folder's files."""
    if path.is_file():
        with path.open("rb") as archive:
            return hashlib.file_digest(archive, "sha256").hexdigest()
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*.png")):
        status = file.stat()
        digest.update(
            f"{file.relative_to(path).as_posix()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode()
        )
    return digest.hexdigest()


def _download(part: str, folder: Path) -> Path:
    import pooch  # type: ignore[import-untyped]

    url = f"{_URL}{part}.zip"
    try:
        path = pooch.retrieve(
            url, known_hash=f"sha256:{_SHA256[part]}", fname=f"{part}.zip", path=folder
        )
    # requests, sockets, TLS, checksums: pooch passes on whatever went wrong
    except Exception as error:
        raise DownloadError(
            f"Could not download {url} to {folder} ({error}). Without a network, put"
            " images_background.zip and images_evaluation.zip into a folder and give it as root,"
            " or set METANUDGE_DATA to it."
        ) from error
    return Path(path)
