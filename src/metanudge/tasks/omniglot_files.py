"""Omniglot's files: a local copy, the cache folder or the original archives on the network; all
become one array, and no archive is trusted.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import stat
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from metanudge.tasks.cache import cache_folder, load_arrays, read_entry, save_arrays
from metanudge.tasks.images import image_tensor, opened

CHARACTERS: Mapping[str, int] = {"images_background": 964, "images_evaluation": 659}

# A commit, not a branch: what it names cannot change.
_COMMIT = "ceffff1ba059df9c19f12021b738dd1e0d8dd650"
_URL = f"https://raw.githubusercontent.com/brendenlake/omniglot/{_COMMIT}/python/"
_SHA256 = {
    "images_background": "ad41ab679c8b5d90b271ef46be6987cc81211774a695c29dcc5367b2b26ee640",
    "images_evaluation": "1f61a8f3366785b057fc117d9228e78a16e3d976c8953b2a10fcc74cf0609cee",
}
_PROCESSED = "omniglot_28.npz"
DRAWERS = 20
SIZE = 28

_ORIGINAL_SIZE = (105, 105)
# of one image and of all; the real ones have a few hundred each
_MAX_BYTES, _MAX_TOTAL = (1_000_000, 200_000_000)
_ENTRY = re.compile(r"(?:.*/)?(?P<character>[^/]+/character\d+)/[^/.][^/]*\.png")


class OmniglotArrays(NamedTuple):
    """Images, ink 255 on paper 0, and the characters they show."""

    images: NDArray[np.uint8]  # (num_characters, 20, 28, 28)
    names: tuple[str, ...]  # "Alphabet/characterNN"


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
    if root is not None and Path(root).is_file():
        return _from_processed(Path(root))
    folders = [Path(root), Path(root) / "omniglot"] if root is not None else _folders()
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
    return _from_parts({part: _download(part, _home()) for part in CHARACTERS})


def find_files() -> list[Path]:
    """Everything that `load_omniglot` would look at, and what it made of archives."""
    archives = [f"{part}.zip" for part in CHARACTERS]
    names = [_PROCESSED, *archives, *CHARACTERS]
    found = [folder / name for folder in _folders() for name in names if (folder / name).exists()]
    return found + sorted(_home().glob("omniglot_28-*.npz"))


def verify_file(path: Path) -> str:
    """What is in one of those that is complete; `ValueError` where it is not."""
    return _verify_arrays(path) if path.suffix == ".npz" else _verify_part(path)


def _verify_arrays(file: Path) -> str:
    arrays = _from_processed(file)
    if len(set(arrays.names)) != len(arrays.names):
        raise ValueError(f"{file} names a character twice. Replace it.")
    blank = np.argwhere(~arrays.images.any(axis=(2, 3)))
    if len(blank):
        character, drawer = blank[0]
        raise ValueError(
            f"{file}: drawing {drawer + 1} of {arrays.names[character]} is blank ({len(blank)}"
            " such). Replace it."
        )
    return (
        f"{len(arrays.names)} characters × {arrays.images.shape[1]} drawings, sha256"
        f" {_digest(file)[:16]}…"
    )


def _verify_part(path: Path) -> str:
    part, note = path.name.removesuffix(".zip"), ""
    if path.is_file():
        expected, found = _SHA256[part], _digest(path)
        if expected == found:
            note = ", the original archive"
        elif path.parent == _home():
            raise ValueError(
                f"{path} has the wrong checksum: sha256 {found}, expected {expected}. Delete it; it"
                " is downloaded again."
            )
        else:
            note = (
                f", not the original archive (sha256 {found[:8]}… instead of {expected[:8]}…) but"
                " complete and readable"
            )
    arrays = read_part(path, CHARACTERS[part])
    return f"{len(arrays.names)} characters × {DRAWERS} drawings{note}"


def _home() -> Path:
    return cache_folder() / "omniglot"


def _folders() -> list[Path]:
    """Where it is looked for when nobody says where it is."""
    data = os.environ.get("METANUDGE_DATA")
    return [*([Path(data), Path(data) / "omniglot"] if data else []), _home()]


def _find_parts(folder: Path) -> dict[str, Path] | None:
    found: dict[str, Path] = {}
    for part in CHARACTERS:
        for path in (folder / part, folder / f"{part}.zip"):
            if path.is_dir() or path.is_file():  # no FIFO, which would be waited for
                found.setdefault(part, path)
    if found and len(found) < len(CHARACTERS) and folder != _home():
        (missing,) = set(CHARACTERS) - set(found)
        raise FileNotFoundError(
            f"{folder} holds {next(iter(found))} but not {missing}. Omniglot has both parts; put"
            f" {missing}.zip, or the unpacked folder {missing}, next to it."
        )
    return found if len(found) == len(CHARACTERS) else None


def _load(path: Path) -> OmniglotArrays | None:
    total = sum(CHARACTERS.values())
    layout = {"images": (total, DRAWERS, SIZE, SIZE), "class_names": (total,)}
    arrays = load_arrays(path, layout, limit=1 << 27)
    if arrays is None:
        return None
    return OmniglotArrays(arrays["images"], tuple(str(name) for name in arrays["class_names"]))


def _from_processed(path: Path) -> OmniglotArrays:
    arrays = _load(path)
    if arrays is None or arrays.images.dtype != np.uint8:
        total = sum(CHARACTERS.values())
        raise ValueError(
            f"{path} is damaged or is not the processed Omniglot set: it needs `images`, uint8 of"
            f" shape ({total}, {DRAWERS}, {SIZE}, {SIZE}), and `class_names`, {total} strings."
            " Delete it or replace it."
        )
    return arrays


def _from_parts(parts: Mapping[str, Path]) -> OmniglotArrays:
    # The name holds a fingerprint of the source, so another copy never meets the cached result of
    # this one.
    prints = "".join(_fingerprint(path) for path in parts.values())
    digest = hashlib.sha256(prints.encode()).hexdigest()
    cached = _home() / f"omniglot_28-{digest[:16]}.npz"
    if (arrays := _load(cached)) is not None:
        return arrays
    read = [read_part(path, CHARACTERS[part]) for part, path in parts.items()]
    images = np.concatenate([part.images for part in read])
    names = tuple(name for part in read for name in part.names)
    save_arrays(cached, {"images": images, "class_names": np.array(names)})
    return OmniglotArrays(images, names)


def _fingerprint(path: Path) -> str:
    """A digest of an archive's bytes, or of the names, sizes and times of a folder's files."""
    if path.is_file():
        return _digest(path)
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*.png")):
        status = file.stat()
        digest.update(
            f"{file.relative_to(path).as_posix()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode()
        )
    return digest.hexdigest()


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


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


# --- One of the two archives, zipped or unpacked


def read_part(path: Path, characters: int) -> OmniglotArrays:
    """One of the two archives, checked for completeness and shrunk.

    Args:
        path: a .zip file, or the unpacked folder.
        characters: how many characters it must hold.
    """
    with _opened(path) as (entries, read):
        by_character: dict[str, list[str]] = {}
        for entry in sorted(entries):
            if match := _ENTRY.fullmatch(entry):
                by_character.setdefault(match["character"], []).append(entry)
        _check_complete(path, by_character, characters)
        names = sorted(by_character)
        images: list[NDArray[np.uint8]] = []
        total = 0
        for entry in (entry for name in names for entry in by_character[name]):
            data = read(entry)
            total += len(data)
            if total > _MAX_TOTAL:
                raise ValueError(
                    f"{path} was refused: it unpacks to more than {_MAX_TOTAL:,} bytes. Get the"
                    " original archive."
                )
            images.append(_shrunk(data, f"{path}: {entry}"))
    return OmniglotArrays(np.stack(images).reshape(len(names), DRAWERS, SIZE, SIZE), tuple(names))


def _check_complete(path: Path, by_character: Mapping[str, list[str]], characters: int) -> None:
    if len(by_character) != characters:
        raise ValueError(
            f"{path} holds {len(by_character)} characters, expected {characters} (folders"
            " Alphabet/characterNN with .png files). It is incomplete or something else; get the"
            " original one."
        )
    for name, entries in by_character.items():
        if len(entries) != DRAWERS:
            raise ValueError(
                f"{path} holds {len(entries)} images of {name}, expected {DRAWERS}, one per drawer."
                " It is incomplete; get the original archive again."
            )


@contextmanager
def _opened(path: Path) -> Iterator[tuple[list[str], Callable[[str], bytes]]]:
    """The entries of an archive or folder with a function that reads one."""
    if path.is_dir():
        files = [file for file in path.rglob("*.png") if file.is_file()]
        yield (
            [file.relative_to(path).as_posix() for file in files],
            lambda entry: _read_file(path / entry),
        )
        return
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError) as error:
        raise ValueError(
            f"{path} is not a readable zip archive ({error}). Delete it and get it again."
        ) from error
    with archive:
        for info in archive.infolist():
            _refuse_unsafe(info, path)
        yield (
            [info.filename for info in archive.infolist()],
            lambda entry: _read_entry(archive, entry, path),
        )


def _read_file(file: Path) -> bytes:
    with file.open("rb") as stream:
        data = stream.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ValueError(
            f"{file} is more than {_MAX_BYTES:,} bytes long, which no Omniglot image is. Get this"
            " file again."
        )
    return data


def _read_entry(archive: zipfile.ZipFile, entry: str, path: Path) -> bytes:
    try:
        return read_entry(archive, entry, limit=_MAX_BYTES)
    # wrong checksum, broken stream, unknown method, password: each its own exception
    except Exception as error:
        raise ValueError(
            f"{path}: {entry} cannot be read ({error}). Delete the archive and get it again."
        ) from error


def _refuse_unsafe(info: zipfile.ZipInfo, path: Path) -> None:
    # Nothing is unpacked here, but such an archive is not Omniglot, and someone may unpack it next.
    name = info.orig_filename.replace("\\", "/")
    reason = None
    if name.startswith("/") or re.match(r"[A-Za-z]:", name):
        reason = "an absolute path"
    elif ".." in name.split("/"):
        reason = "a path that leaves its folder"
    elif stat.S_ISLNK(info.external_attr >> 16):
        reason = "a symbolic link"
    elif info.file_size > _MAX_BYTES:
        reason = f"{info.file_size:,} bytes long, which no Omniglot image is"
    if reason:
        raise ValueError(
            f"{path} was refused: its entry {info.orig_filename!r} is {reason}. Get the original"
            " archive."
        )


def _shrunk(data: bytes, where: str) -> NDArray[np.uint8]:
    """One image as 28×28, ink 255."""
    try:
        with opened(io.BytesIO(data)) as image:
            if image.size != _ORIGINAL_SIZE:
                raise ValueError(f"it has {image.width}×{image.height} pixels, not 105×105")
            small = image_tensor(image, grey=True, size=(SIZE, SIZE))
    except Exception as error:  # a damaged image fails in many ways inside Pillow
        raise ValueError(
            f"{where} is not a readable Omniglot image ({error}). Get this file again."
        ) from error
    ink: NDArray[np.uint8] = 255 - small[0].numpy()
    return ink
