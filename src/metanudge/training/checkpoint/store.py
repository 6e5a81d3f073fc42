"""Checkpoints as folders: one that appears complete or not at all, and many of which the last and
the best are kept.

A checkpoint is written under a hidden name, made durable, then renamed; reading verifies all of it
before any of it is used. Which one is the last and which the best stands in the folders' names, and
in them alone. A new folder gets its name by one rename, so both change at one instant, together
with the data: pointer files or symbolic links would need instants of their own, could point at what
is gone, and could be damaged (links also get lost in copies and archives).
"""

from __future__ import annotations

import errno
import json
import operator
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from metanudge.spread import is_spread
from metanudge.training.checkpoint import files
from metanudge.training.checkpoint.values import (
    check_tensor,
    check_text,
    decode_tensors,
    encode_tensors,
    pack,
    unpack,
)
from metanudge.training.errors import CheckpointError
from metanudge.training.files import temporary_name

Contents = Mapping[str, Iterable[bytes | memoryview]]


@dataclass(frozen=True)
class Checkpoint:
    """What `load` returns: tensors by group and name (on the CPU), and the state as it was given to
    `save`.
    """

    folder: Path
    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


def save(
    folder: str | os.PathLike[str],
    *,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
) -> None:
    """Write one checkpoint to a new folder, which appears complete or, whatever happens, not at
    all.

    Args:
        folder: must not exist yet.
        step: number of outer steps done.
        tensors: groups of named tensors; each becomes `<group>.safetensors`, with these names, for
            other programs too.
        state: everything else that a resumed run needs, whatever `pack` can hold: optimizer,
            scheduler, random states.

    Needs host memory for the largest tensor, not for the whole file.

    Example:
        >>> import tempfile, torch
        >>> runs = tempfile.TemporaryDirectory()
        >>> folder = Path(runs.name) / "final"
        >>> save(folder, step=7, tensors={"model": {"weight": torch.ones(2)}},
        ...     state={"best_loss": float("inf")})
        >>> sorted(path.name for path in folder.iterdir())
        ['manifest.json', 'model.safetensors', 'state.json']
        >>> load(folder).tensors["model"]["weight"], load(folder).state
        (tensor([1., 1.]), {'best_loss': inf})
        >>> runs.cleanup()
    """
    put(Path(folder), step, contents_of(tensors, state))


def contents_of(
    tensors: Mapping[str, Mapping[str, Tensor]], state: Mapping[str, Any], *, spread: bool = False
) -> Contents:
    """What the files of a checkpoint hold, by their names. Everything that can be refused is
    refused here, before the disk is touched.

    Args:
        spread: tensors may be spread over ranks (`DTensor`), all of which go through the contents.
    """
    groups = _check_groups(tensors)
    packed, document = pack(dict(state))
    if packed:
        groups["state"] = packed
    if not spread and any(is_spread(t) for named in groups.values() for t in named.values()):
        raise TypeError(
            "Tensors are spread over several ranks (DTensor), each of which has a part only. Use"
            " save_sharded of metanudge.training.checkpoint.sharded, on all of them."
        )
    files_of = {f"{group}.safetensors": encode_tensors(named) for group, named in groups.items()}
    return {**files_of, files.STATE: [json.dumps(document, allow_nan=False).encode()]}


def put(folder: Path, step: int, contents: Contents) -> None:
    """Write one checkpoint of these contents to a new folder."""
    new = temporary_name(folder)
    with files.os_errors_explained(folder):
        if folder.exists():
            raise FileExistsError(errno.EEXIST, "the folder exists already", str(folder))
        files.ensure_folder(folder.parent)
        try:
            files.disk.mkdir(new)
            written = {name: files.write_file(new / name, part) for name, part in contents.items()}
            files.put_in_place(new, folder, step=step, files=written)
        except OSError:
            with suppress(OSError):
                files.remove(new)
            raise


def load(folder: str | os.PathLike[str]) -> Checkpoint:
    """Read and verify one checkpoint: every size, every sha256, every header, before anything is
    returned.
    """
    folder = Path(folder)
    manifest = files.read_manifest(folder)
    files.check_names(folder, manifest["files"])
    groups: dict[str, dict[str, Tensor]] = {}
    document: Any = None
    for name, expected in manifest["files"].items():
        data = files.read_verified(folder / name, expected)
        try:
            if name == files.STATE:
                document = json.loads(data)
            else:
                groups[name.removesuffix(".safetensors")] = decode_tensors(data)
        except Exception as error:
            # The checksums are right, so somebody wrote it this way; whatever goes wrong, it is no
            # file of ours.
            raise files.damaged(folder / name, f"cannot be parsed ({error})") from error
    packed = groups.pop("state", {})
    try:
        state: dict[str, Any] = {**unpack(packed, document)}
    except Exception as error:
        problem = f"does not describe a state ({error!r})"
        raise files.damaged(folder / files.STATE, problem) from error
    return Checkpoint(folder, manifest["step"], groups, state)


def _check_groups(tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Mapping[str, Tensor]]:
    for group, named in tensors.items():
        if not re.fullmatch(r"[A-Za-z0-9_-]+", group) or group == "state":
            raise ValueError(
                f"The tensor group is called {group!r}; it names a file, so use letters, digits,"
                " '_' and '-' ('state' is taken)."
            )
        for name, tensor in named.items():
            where = f"tensors[{group!r}][{name!r}]"
            if not isinstance(name, str) or name == "__metadata__":
                raise TypeError(
                    f"{where}: a tensor's name must be text other than '__metadata__'. Rename it."
                )
            check_text(name, where)
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"{where} is a {type(tensor).__name__}, not a tensor. Put it into state"
                    " instead."
                )
            check_tensor(tensor, where)
    return dict(tensors)


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
        self.add(step, contents_of(tensors, state), best=best)

    def add(self, step: int, contents: Contents, *, best: bool = False) -> None:
        """The same of what `contents_of` gives."""
        # a step of 3.0 or True would give a name that is never found again
        step = operator.index(step)
        if step < 0:
            raise ValueError(
                f"Checkpoints count the outer steps done, got step={step}. Give a number ≥ 0."
            )
        self._remove_leftovers()
        number = max((entry.number for entry in self.list()), default=0) + 1
        name = f"save-{number:06d}-step-{step}" + ("-best" if best else "")
        put(self.root / name, step, contents)
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
                    problem = f"holds step {checkpoint.step}: it was renamed"
                    raise files.damaged(entry.folder, problem)
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
        for folder in files.children(self.root):
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
                files.disk.rename(entry.folder, temporary_name(entry.folder, "old"))
            if unwanted:
                files.sync_folder(self.root)
        except OSError as error:
            _warn_left_behind(self.root, error)
            return
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        """Remove what crashed saves began to write and what earlier saves began to remove."""
        for path in files.children(self.root):
            if _LEFTOVER.fullmatch(path.name):
                try:
                    files.remove(path)
                except OSError as error:
                    _warn_left_behind(path, error)


def _warn_left_behind(path: Path, error: OSError) -> None:
    # No reason to stop a run: the checkpoint itself is safe, and the next save tries again.
    warnings.warn(
        f"{path} could not be removed ({error.strerror}) and takes up space until the next save"
        " tries again.",
        stacklevel=2,
    )
