"""Checkpoints of learners whose model is spread over ranks: every rank writes and reads its own
part, by `torch.distributed.checkpoint`.

What was written on some ranks can be read on any other number of them, or in one process, into a
model that is sharded otherwise or not at all. All ranks must see one file system. Unlike the other
checkpoints these hold a pickle, torch's index of the tensors: read none that a stranger wrote.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from metanudge.learner import MetaLearner
from metanudge.spread import at_rest
from metanudge.training.checkpoint import files
from metanudge.training.checkpoint.values import differences, pack, unpack
from metanudge.training.errors import CheckpointError
from metanudge.training.files import temporary_name

EXTRA = "_extra_state"  # as torch names what a module has beside tensors


def save_sharded(
    folder: str | os.PathLike[str],
    learner: MetaLearner,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int = 0,
    state: Mapping[str, Any] | None = None,
) -> None:
    """Write a learner, its outer optimizer and whatever else a resumed run needs (as in `save`) to
    a new folder, which appears complete or not at all. Every rank must call it.

    Example:
        >>> import tempfile
        >>> runs = tempfile.TemporaryDirectory()
        >>> learner = MetaLearner(nn.Linear(2, 1), nn.functional.mse_loss)
        >>> optimizer = torch.optim.Adam(learner.parameters())
        >>> save_sharded(Path(runs.name) / "one", learner, optimizer, step=7, state={"seed": 3})
        >>> load_sharded(Path(runs.name) / "one", learner, optimizer)
        (7, {'seed': 3})
        >>> runs.cleanup()
    """
    folder = Path(folder)
    tensors, document = _taken_apart(learner, optimizer, dict(state or {}))
    new, leads = _begun(folder)
    with files.os_errors_explained(folder):
        try:
            with _alone_or_together() as how:
                state_dict_saver.save(tensors, checkpoint_id=new, **how)
            if leads:
                text = json.dumps(document, allow_nan=False).encode()
                written = files.write_file(new / files.STATE, [text])
                files.put_in_place(new, folder, step=step, files={files.STATE: written})
        except BaseException:
            if leads:
                files.remove(new)
            raise
    if _several():
        dist.barrier()


def _begun(folder: Path) -> tuple[Path, bool]:
    """A new folder for what will be `folder`, made by rank 0 before any rank writes to it; and
    whether this is rank 0. Where it cannot be made, all ranks raise.
    """
    leads = not _several() or dist.get_rank() == 0
    begun: list[Any] = [temporary_name(folder), None]  # rank 0's, in every process
    if leads:
        try:
            if folder.exists():
                raise CheckpointError(folder, "exists already", "Give the name of a new folder.")
            with files.os_errors_explained(folder):
                files.ensure_folder(folder.parent)
                files.disk.mkdir(begun[0])
        except CheckpointError as error:
            begun[1] = error
    if _several():
        dist.broadcast_object_list(begun)
    if begun[1] is not None:
        raise begun[1]
    return begun[0], leads


def load_sharded(
    folder: str | os.PathLike[str],
    learner: MetaLearner,
    optimizer: torch.optim.Optimizer | None = None,
) -> tuple[int, dict[str, Any]]:
    """Read what `save_sharded` wrote into a learner and an optimizer made as they were, on any
    number of ranks, each of which must call it; returns the step and the state.

    Nothing is changed where anything is missing or of another shape.
    """
    folder = Path(folder)
    manifest = files.read_manifest(folder)
    if files.STATE not in manifest["files"] or not files.exists(folder):
        raise files.damaged(folder, "is no checkpoint of save_sharded")
    document = json.loads(files.read_verified(folder / files.STATE, manifest["files"][files.STATE]))
    try:
        known: Mapping[str, Any] = FileSystemReader(folder).read_metadata().state_dict_metadata
    except Exception as error:
        raise files.damaged(folder, f"has no index that can be read ({error!r})") from error
    parameters = _parameters(learner)
    targets = {f"learner/{n}": torch.empty_like(t) for n, t in _tensors(learner).items()}
    saved = {key: about.size for key, about in known.items() if key.startswith("learner/")}
    if detail := differences({key: t.shape for key, t in targets.items()}, saved):
        raise CheckpointError(
            folder,
            f"is of another learner ({detail})",
            "Make model and learner as they were when it was saved.",
        )
    for key, about in known.items():
        assert isinstance(about, TensorStorageMetadata)
        if key.startswith("state/") or (optimizer is not None and key.startswith("optimizer/")):
            like = parameters.get(key.partition("/")[2].rpartition("/")[0])
            dtype = about.properties.dtype
            if like is not None and like.shape == about.size:
                targets[key] = torch.empty_like(like, dtype=dtype, requires_grad=False)
            else:
                targets[key] = torch.empty(about.size, dtype=dtype)
    try:
        with _alone_or_together() as how:
            state_dict_loader.load(targets, checkpoint_id=folder, **how)
    except Exception as error:
        raise files.damaged(folder, f"cannot be read ({error})") from error
    packed = {n.removeprefix("state/"): t for n, t in targets.items() if n.startswith("state/")}
    own: dict[str, Any] = unpack(packed, document)
    if optimizer is not None:
        _put_back(folder, optimizer, own, targets, parameters)
    with torch.no_grad():
        for name, tensor in _tensors(learner).items():
            tensor.copy_(targets[f"learner/{name}"])
    learner.set_extra_state(targets[f"learner/{EXTRA}"])
    return manifest["step"], own["user"]


def _taken_apart(
    learner: MetaLearner, optimizer: torch.optim.Optimizer | None, state: dict[str, Any]
) -> tuple[dict[str, Tensor], Any]:
    """All tensors under their names, and a JSON document of the rest."""
    names: dict[Tensor, str] = {p: name for name, p in _parameters(learner).items()}
    tensors = {f"learner/{n}": t for n, t in _tensors(learner).items()}
    own: dict[str, Any] = {"user": state}
    if optimizer is not None:
        own["groups"] = [
            {**group, "params": [names[p] for p in group["params"]]}
            for group in optimizer.param_groups
        ]
        own["optimizer"] = {}
        for parameter, kept in optimizer.state.items():
            name = names[parameter]
            inside = {key: value for key, value in kept.items() if isinstance(value, Tensor)}
            tensors |= {f"optimizer/{name}/{key}": value for key, value in inside.items()}
            own["optimizer"][name] = {key: kept[key] for key in kept if key not in inside}
    packed, document = pack(own)
    return tensors | {f"state/{key}": value for key, value in packed.items()}, document


def _put_back(
    folder: Path,
    optimizer: torch.optim.Optimizer,
    own: dict[str, Any],
    tensors: dict[str, Tensor],
    parameters: Mapping[str, nn.Parameter],
) -> None:
    """The optimizer's groups and what it remembers of each parameter."""
    names = {p: name for name, p in parameters.items()}
    now = [[names[p] for p in group["params"]] for group in optimizer.param_groups]
    if (was := [group["params"] for group in own.get("groups", [])]) != now:
        raise CheckpointError(
            folder,
            f"was saved with an optimizer of {len(was)} groups of other parameters than this one's"
            f" {len(now)}",
            "Make the optimizer as it was, or load without one.",
        )
    optimizer.state.clear()
    for name, rest in own["optimizer"].items():
        optimizer.state[parameters[name]] = dict(rest)
    for key, value in tensors.items():
        if key.startswith("optimizer/"):
            name, _, entry = key.removeprefix("optimizer/").rpartition("/")
            optimizer.state[parameters[name]][entry] = value
    for group, saved in zip(optimizer.param_groups, own["groups"], strict=True):
        group.update({option: saved[option] for option in saved if option != "params"})


def _parameters(learner: MetaLearner) -> dict[str, nn.Parameter]:
    at_rest(learner.model)
    return dict(learner.named_parameters())


def _tensors(learner: MetaLearner) -> dict[str, Tensor]:
    """Parameters and buffers, in their own memory."""
    at_rest(learner.model)
    return {n: t for n, t in learner.state_dict().items() if isinstance(t, Tensor)}


@contextmanager
def _alone_or_together() -> Iterator[dict[str, Any]]:
    """What to tell torch; it need not warn that one process is alone."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield {"no_dist": not _several()}


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
