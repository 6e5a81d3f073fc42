"""Many checkpoints: the last, the best, and no more than wanted.

Which checkpoint is the last and which the best stands in the folders' names, and in them alone. A
new folder gets its name by one rename, so both change at one instant, together with the data:
pointer files or symbolic links would need instants of their own, could point at what is gone, and
could be damaged (links also get lost in copies and archives).
"""

from __future__ import annotations

import operator
import os
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from metanudge.training.checkpoint.errors import CheckpointError, damaged
from metanudge.training.checkpoint.files import children, remove, rename, sync_folder
from metanudge.training.checkpoint.folder import Checkpoint, load, save
from metanudge.training.files import temporary_name


@dataclass(frozen=True)
class Entry:
    """One checkpoint of a store, as its folder's name tells it."""

    folder: Path
    number: int  # saves are counted from 1; the highest is the last
    step: int
    best: bool  # whether it was the best so far when it was saved

    @property
    def name(self) -> str:
        """The folder's name, which `CheckpointStore.load` accepts."""
        return self.folder.name


# Counting the saves keeps the names unique when a run goes back to an earlier step and comes by the
# same one again.
_NAME = re.compile(r"save-(?P<number>\d+)-step-(?P<step>\d+)(?P<best>-best)?")
# version 0.1 had no random end
_LEFTOVER = re.compile(rf"\.(new|old)-{_NAME.pattern}(-[0-9a-f]+)?")


class CheckpointStore:
    """The checkpoints of one run in one folder: `last`, `best`, and the newest few.

    A crash, a kill or a power cut at any instant leaves the checkpoints of before or those of after
    a save, never less; what it leaves behind is removed by the next save. One process may write to
    a store at a time, others may read.

    Args:
        root: the folder; made by the first save.
        keep: how many of the newest checkpoints to keep, besides the best. With 2 or more, one that
            turns out to be damaged has an earlier one to fall back on.

    Example:
        >>> import tempfile, torch
        >>> runs = tempfile.TemporaryDirectory()
        >>> store = CheckpointStore(runs.name, keep=2)
        >>> for step, improved in [(100, True), (200, False), (300, False)]:
        ...     store.save(step, {"model": {"weight": torch.full((2,), step)}}, {"loss": 1 / step},
        ...         best=improved)
        >>> [entry.name for entry in store.list()]
        ['save-000001-step-100-best', 'save-000002-step-200', 'save-000003-step-300']
        >>> store.load().step, store.load("best").step, store.load(200).tensors["model"]["weight"]
        (300, 100, tensor([200, 200]))
        >>> runs.cleanup()
    """

    def __init__(self, root: str | os.PathLike[str], *, keep: int = 2) -> None:
        if keep < 1:
            raise ValueError(
                f"CheckpointStore got keep={keep}, but must keep at least the last checkpoint."
                " Try 2."
            )
        self.root = Path(root)
        self.keep = keep

    def save(
        self,
        step: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, Any],
        *,
        best: bool = False,
    ) -> None:
        """Add a checkpoint (see `metanudge.training.checkpoint.save`), then remove those that are
        no longer wanted.

        Raises `CheckpointError` if it cannot be written; the earlier ones are then untouched.
        """
        # a step of 3.0 or True would give a name that is never found again
        step = operator.index(step)
        if step < 0:
            raise ValueError(
                f"Checkpoints count the outer steps done, got step={step}. Give a number ≥ 0."
            )
        self._remove_leftovers()
        number = max((entry.number for entry in self.list()), default=0) + 1
        name = f"save-{number:06d}-step-{step}" + ("-best" if best else "")
        save(self.root / name, step=step, tensors=tensors, state=state)
        self._prune()

    def load(self, name: str | int = "last") -> Checkpoint:
        """The checkpoint called `"last"`, `"best"`, by its folder's name, or by its step (the
        newest save of it).

        Raises `CheckpointError` if any file of it is damaged, with an intact one to load instead as
        `.alternative`.
        """
        while True:
            entry = self._find(name)
            try:
                checkpoint = load(entry.folder)
                if checkpoint.step != entry.step:
                    raise damaged(entry.folder, f"holds step {checkpoint.step}: it was renamed")
                return checkpoint
            except CheckpointError as error:
                if not os.path.lexists(entry.folder):
                    # a writer has removed it meanwhile, for which it is renamed first; there is a
                    # newer one
                    continue
                error.alternative = self._intact(besides=entry)
                raise

    def list(self) -> tuple[Entry, ...]:
        """All checkpoints, oldest save first; names only, nothing is read or verified."""
        entries = []
        for folder in children(self.root):
            if match := _NAME.fullmatch(folder.name):
                entries.append(
                    Entry(
                        folder, int(match["number"]), int(match["step"]), match["best"] is not None
                    )
                )
        return tuple(sorted(entries, key=lambda entry: entry.number))

    def _find(self, name: str | int) -> Entry:
        entries = self.list()
        for entry in reversed(entries):
            if (
                name == "last"
                or (name == "best" and entry.best)
                or name in (entry.name, entry.step)
            ):
                return entry
        found = ", ".join(entry.name for entry in entries) or "none yet"
        raise CheckpointError(
            self.root,
            f"has no checkpoint {name!r}",
            f"It has: {found}.",
            alternative=self._intact(besides=None),
        )

    def _intact(self, *, besides: Entry | None) -> str | None:
        """The newest checkpoint that loads and is earlier than the given one, else the newest that
        loads.
        """
        others = [entry for entry in reversed(self.list()) if entry != besides]
        if besides is not None:
            others.sort(key=lambda entry: entry.number > besides.number)
        for entry in others:
            with suppress(CheckpointError):
                load(entry.folder)
                return entry.name
        return None

    def _prune(self) -> None:
        entries = self.list()
        wanted = {*entries[-self.keep :], *[entry for entry in entries if entry.best][-1:]}
        unwanted = [entry for entry in entries if entry not in wanted]
        try:
            for entry in unwanted:
                # Renamed first, and for good: a folder that is being emptied must not look like a
                # checkpoint.
                rename(entry.folder, temporary_name(entry.folder, "old"))
            if unwanted:
                sync_folder(self.root)
        except OSError as error:
            _warn_left_behind(self.root, error)
            return
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        """Remove what crashed saves began to write and what earlier saves began to remove."""
        for path in children(self.root):
            if _LEFTOVER.fullmatch(path.name):
                try:
                    remove(path)
                except OSError as error:
                    _warn_left_behind(path, error)


def _warn_left_behind(path: Path, error: OSError) -> None:
    # No reason to stop a run: the checkpoint itself is safe, and the next save tries again.
    warnings.warn(
        f"{path} could not be removed ({error.strerror}) and takes up space until the next save"
        " tries again.",
        stacklevel=2,
    )
