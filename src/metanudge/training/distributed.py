"""The tasks of a meta-batch shared among the processes of `torchrun`, with one all-reduce per meta-step.

    torchrun --nproc-per-node=4 -m metanudge train omniglot

Every rank holds θ and the optimizer, takes a contiguous slice of the tasks, and gets the sum of all ranks' meta-gradients; so all
take the same step. Only rank 0 touches the run folder: what it reads, it sends to the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from metanudge.params import Params
from metanudge.training.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """The processes of a run; one that is alone needs no torch.distributed."""

    rank: int = 0
    world: int = 1
    restarted: bool = False
    elastic: bool = False

    @classmethod
    def from_environment(cls) -> Group:
        """The group that torchrun's variables describe, connected; a group of one where there are none."""
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return cls()
        if not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo")
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        return cls(dist.get_rank(), dist.get_world_size(), restarts > 0, "TORCHELASTIC_RUN_ID" in os.environ)

    @property
    def leads(self) -> bool:
        """Whether this process writes the files and talks to the user."""
        return self.rank == 0

    def share(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, on every rank; what it refuses (`UserError`), every rank refuses."""
        if self.world == 1:
            return make()
        message: list[Any] = [None]
        if self.leads:
            try:
                message = [("value", make())]
            except Exception as error:
                dist.broadcast_object_list([("error", str(error))])
                raise
        dist.broadcast_object_list(message)
        kind, value = message[0]
        if kind == "error":
            raise UserError(value)
        return value

    def one_after_the_other(self, make: Callable[[], T]) -> T:
        """Rank 0 makes it first (and fills caches), then the others."""
        made: list[T] = []
        self.share(lambda: made.append(make()))
        return made[0] if self.leads else make()

    def slice(self, count: int) -> range:
        """Which of `count` things are this rank's: a contiguous range, empty where there are more ranks than things.

        Example:
            >>> [list(Group(rank, 3).slice(4)) for rank in range(3)]
            [[0], [1], [2, 3]]
        """
        return range(count * self.rank // self.world, count * (self.rank + 1) // self.world)

    def reduce(self, gradient: Params, values: Mapping[str, float], weight: float) -> tuple[Params, dict[str, float]]:
        """The weighted sum of gradients and values over all ranks: one all-reduce of one float64 buffer."""
        if self.world == 1:
            return gradient, dict(values)
        parts = [leaf.detach().reshape(-1).double() * weight for leaf in gradient.values()]
        device = parts[0].device
        buffer = torch.cat([*parts, torch.tensor(list(values.values()), dtype=torch.float64, device=device)])
        dist.all_reduce(buffer)
        pieces = buffer.split([leaf.numel() for leaf in gradient.values()] + [len(values)])
        summed = {n: piece.view_as(leaf).to(leaf.dtype) for (n, leaf), piece in zip(gradient.items(), pieces, strict=False)}
        return summed, dict(zip(values, pieces[-1].tolist(), strict=True))

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of a CPU tensor over all ranks."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values

    def close(self) -> None:
        """Leave the group."""
        if self.world > 1 and dist.is_initialized():
            dist.destroy_process_group()
