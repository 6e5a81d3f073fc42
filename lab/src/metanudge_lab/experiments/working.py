"""What a cell keeps while it is being measured, so that a crash does not cost it all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

from metanudge.training import files
from metanudge_lab.experiments.base import Row, json_safe

_folder: ContextVar[Path | None] = ContextVar("folder", default=None)


@contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Keep what is being measured in a folder, which is removed when all went well."""
    token = _folder.set(folder)
    try:
        yield
    finally:
        _folder.reset(token)
    forget(folder)


def working_folder() -> Path | None:
    """Where the cell that is being measured may keep something; None where it may not."""
    return _folder.get()


def forget(folder: Path) -> None:
    """Remove a cell's folder, and the one around it where it was the last."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.parent.rmdir()


class Diary:
    """What a training found on its way, beside its checkpoints: rows, and the seconds of its
    meta-steps.

    Args:
        rows: where rows are added.
        file: where it is kept; None keeps nothing.
        step: meta-steps done when training goes on; what was found up to there is added to the
            rows, what came later will be found again.
    """

    def __init__(self, rows: list[Row], file: Path | None, step: int) -> None:
        self.rows, self.seconds = rows, 0.0
        self._file = file
        found = json.loads(file.read_text("utf-8")) if file is not None and step else []
        self._entries = [entry for entry in found if entry["step"] <= step]
        for entry in self._entries:
            rows += entry["rows"]
            self.seconds = entry["seconds"]
        self._written = len(rows)

    def write(self, step: int) -> None:
        """Keep what there is after so many meta-steps."""
        new = json_safe(self.rows[self._written :])
        self._written = len(self.rows)
        self._entries.append({"step": step, "seconds": self.seconds, "rows": new})
        if self._file is not None:
            files.write_text(self._file, json.dumps(self._entries, ensure_ascii=False))
