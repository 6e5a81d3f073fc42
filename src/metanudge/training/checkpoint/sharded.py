"""Checkpoints of learners whose model is spread over ranks. On the disk they are like all others:
what was written on some ranks is read on any other number of them, or in one process, whole.

Rank 0 alone writes and reads, so only it must see the folder. Tensors are gathered and handed out
one at a time: what is written need not fit into any process, and what is read only into rank 0's
host memory.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from metanudge.learner import MetaLearner
from metanudge.spread import at_rest
from metanudge.training.checkpoint.store import Checkpoint, contents_of, load, put
from metanudge.training.checkpoint.values import differences
from metanudge.training.distributed import Group
from metanudge.training.errors import CheckpointError


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
        >>> learner = MetaLearner(torch.nn.Linear(2, 1), torch.nn.functional.mse_loss)
        >>> optimizer = torch.optim.Adam(learner.parameters())
        >>> save_sharded(Path(runs.name) / "one", learner, optimizer, step=7, state={"seed": 3})
        >>> load_sharded(Path(runs.name) / "one", learner, optimizer)
        (7, {'seed': 3})
        >>> runs.cleanup()
    """
    at_rest(learner.model)
    own = {"user": dict(state or {}), "optimizer": None}
    if optimizer is not None:
        own["optimizer"] = optimizer.state_dict()
    contents = contents_of({"learner": learner.state_dict()}, own, spread=True)
    _group().hand_in(contents, lambda: put(Path(folder), step, contents))


def load_sharded(
    folder: str | os.PathLike[str],
    learner: MetaLearner,
    optimizer: torch.optim.Optimizer | None = None,
) -> tuple[int, dict[str, Any]]:
    """Read what `save_sharded` wrote into a learner and an optimizer made as they were, on any
    number of ranks, each of which must call it; returns the step and the state.

    Nothing is changed where anything is missing or of another shape.
    """
    folder, group = Path(folder), _group()
    found = group.share(lambda: load(folder), hollow)
    saved, state = found.tensors.get("learner", {}), found.state
    at_rest(learner.model)
    shapes, was = (
        {name: t.shape for name, t in one.items()} for one in (learner.state_dict(), saved)
    )
    if detail := differences(shapes, was):
        raise CheckpointError(
            folder,
            f"is of another learner ({detail})",
            "Make model and learner as they were when it was saved.",
        )
    if optimizer is not None:
        try:
            optimizer.load_state_dict(handed_out(state["optimizer"], optimizer, group))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                folder,
                f"has no state for this optimizer ({error!r})",
                "Make the optimizer as it was, or load without one.",
            ) from error
    group.hand_to(learner, saved)
    return found.step, state["user"]


def handed_out(
    saved: dict[str, Any], optimizer: torch.optim.Optimizer, group: Group
) -> dict[str, Any]:
    """A checkpoint's state of an optimizer, for this one's `load_state_dict`."""
    parameters = [p for own in optimizer.param_groups for p in own["params"]]
    numbers = [number for was in saved["param_groups"] for number in was["params"]]
    like = dict(zip(numbers, parameters, strict=True))
    return _mapped(saved, lambda number, value: group.hand_out(value, like[number]))


def hollow(checkpoint: Checkpoint) -> Checkpoint:
    """What the other ranks get of a checkpoint that rank 0 has read: what is handed out tensor by
    tensor has no values, only shapes.
    """
    tensors = {
        name: {key: value.to("meta") for key, value in group.items()}
        for name, group in checkpoint.tensors.items()
    }
    state = dict(checkpoint.state)
    if state.get("optimizer") is not None:
        state["optimizer"] = _mapped(state["optimizer"], lambda _, value: value.to("meta"))
    return dataclasses.replace(checkpoint, tensors=tensors, state=state)


def _mapped(saved: dict[str, Any], change: Callable[[Any, Tensor], Tensor]) -> dict[str, Any]:
    """An optimizer's state with other tensors in the place of those that may be large."""
    state = {
        number: {
            key: change(number, value) if isinstance(value, Tensor) and value.ndim else value
            for key, value in kept.items()
        }
        for number, kept in saved.get("state", {}).items()
    }
    return {**saved, "state": state}


def _group() -> Group:
    if not (dist.is_available() and dist.is_initialized()):
        return Group()
    return Group(dist.get_rank(), dist.get_world_size())
