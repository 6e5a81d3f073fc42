"""Files and folders that get their name once they are complete, and never take another's place
unasked.
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from metanudge.training.errors import UserError
from metanudge.training.files import replacing

DESCRIPTION = "model.json"  # every exported model has it; a folder without is not one


@contextmanager
def new_file(path: Path, *, overwrite: bool, flag: str) -> Iterator[IO[str]]:
    """A text file that gets its name when the block ends well, and leaves no trace when it does
    not.
    """
    check_new_file(path, overwrite=overwrite, flag=flag)
    with _explained(f"{flag} {path}"), replacing(path) as stream:
        # A file name that is not valid Unicode is written back byte by byte as it is.
        file = io.TextIOWrapper(stream, encoding="utf-8", errors="surrogateescape", newline="")
        yield file
        file.detach()


def check_new_file(path: Path, *, overwrite: bool, flag: str) -> None:
    """Raise `UserError` where `new_file` would, as far as can be told beforehand."""
    if path.is_dir():
        raise UserError(
            f"{flag} {path} is a folder. Name a file, such as {path / 'predictions.csv'}."
        )
    if path.exists() and not overwrite:
        raise UserError(
            f"{flag} {path} exists already. Choose another name, or replace it with --overwrite."
        )
    _check_place(path, flag)


@contextmanager
def new_folder(path: Path, *, overwrite: bool, mark: str) -> Iterator[Path]:
    """A folder that gets its name when the block ends well; one that is replaced must hold `mark`,
    the sign that we made it.
    """
    check_new_folder(path, overwrite=overwrite, mark=mark)
    with _explained(f"--export {path}"):
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp"))
        try:
            yield temporary
            os.chmod(temporary, 0o777 & ~umask())
            if path.exists():
                shutil.rmtree(path)
            os.replace(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def check_new_folder(path: Path, *, overwrite: bool, mark: str = DESCRIPTION) -> None:
    """Raise `UserError` where `new_folder` would."""
    if path.exists() and not (overwrite and (path / mark).is_file()):
        how = "it is not an exported model, so it is not replaced"
        if (path / mark).is_file():
            how = "or replace it with --overwrite"
        raise UserError(f"--export {path} exists already. Choose another name; {how}.")
    _check_place(path, "--export")


def _check_place(path: Path, flag: str) -> None:
    if not path.parent.is_dir():
        raise UserError(
            f"{flag} {path}: there is no folder {path.parent}. Create it first, or choose another"
            " place."
        )


@contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{what} cannot be written ({error.strerror}). Free some space or choose another place."
        ) from error


def umask() -> int:
    """The permissions that new files of this process do not get."""
    current = os.umask(0o077)
    os.umask(current)
    return current
