"""One checkpoint: a folder that appears complete or not at all.

It is written under a hidden name, made durable, then renamed; reading verifies all of it before any
of it is used.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from metanudge.training.checkpoint.errors import damaged
from metanudge.training.checkpoint.files import (
    create_folder,
    ensure_folder,
    os_errors_explained,
    remove,
    rename,
    sync_folder,
    write_file,
)
from metanudge.training.checkpoint.manifest import (
    MANIFEST,
    VERSION,
    check_names,
    read_manifest,
    read_verified,
    seal,
)
from metanudge.training.checkpoint.tensor_file import check_tensor, decode_tensors, encode_tensors
from metanudge.training.checkpoint.values import check_text, pack, unpack
from metanudge.training.files import temporary_name

STATE = "state.json"


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
    folder = Path(folder)
    # Everything that can be refused is refused before the disk is touched.
    groups = _check_groups(tensors)
    packed, document = pack(dict(state))
    if packed:
        groups["state"] = packed
    contents: dict[str, Iterable[bytes | memoryview]] = {
        f"{group}.safetensors": encode_tensors(groups[group]) for group in groups
    }
    contents[STATE] = [json.dumps(document, allow_nan=False).encode()]
    new = temporary_name(folder)
    with os_errors_explained(folder):
        if folder.exists():
            raise FileExistsError(errno.EEXIST, "the folder exists already", str(folder))
        ensure_folder(folder.parent)
        try:
            create_folder(new)
            files = {name: write_file(new / name, chunks) for name, chunks in contents.items()}
            write_file(
                new / MANIFEST, [seal({"version": VERSION, "step": int(step), "files": files})]
            )
            sync_folder(new)
            rename(new, folder)
        except OSError:
            with suppress(OSError):
                remove(new)
            raise
        sync_folder(folder.parent)


def load(folder: str | os.PathLike[str]) -> Checkpoint:
    """Read and verify one checkpoint: every size, every sha256, every header, before anything is
    returned.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    check_names(folder, manifest["files"])
    groups: dict[str, dict[str, Tensor]] = {}
    document: Any = None
    for name, expected in manifest["files"].items():
        data = read_verified(folder / name, expected)
        try:
            if name == STATE:
                document = json.loads(data)
            else:
                groups[name.removesuffix(".safetensors")] = decode_tensors(data)
        except Exception as error:
            # The checksums are right, so somebody wrote it this way; whatever goes wrong, it is no
            # file of ours.
            raise damaged(folder / name, f"cannot be parsed ({error})") from error
    packed = groups.pop("state", {})
    try:
        state: dict[str, Any] = {**unpack(packed, document)}
    except Exception as error:
        raise damaged(folder / STATE, f"does not describe a state ({error!r})") from error
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
