"""Reading one of Omniglot's two archives, zipped or unpacked, without trusting it."""

from __future__ import annotations

import io
import re
import stat
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from metanudge.tasks.images import image_tensor, opened
from metanudge.tasks.unpack import read_entry

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
