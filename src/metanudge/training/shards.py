"""`--shard N`: one model divided among N processes (FSDP2), and the tasks among the groups of them.

torchrun --nproc-per-node=8 -m metanudge train photos/ --model … --shard 4
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from metanudge.spread import sharded_modules
from metanudge.training.config import TrainConfig
from metanudge.training.device import device_called
from metanudge.training.distributed import Group
from metanudge.training.errors import UserError
from metanudge.training.specs import build_optimizer


def sharded(group: Group, config: TrainConfig) -> Group:
    """The group with the mesh of tasks × shards that a run wants; `UserError` where it cannot have
    it.
    """
    if (shards := config.shard) == 1:
        return group
    if config.engine == "stacked":
        raise UserError(
            f"--engine stacked and --shard {shards} contradict each other: parts of a model cannot"
            " be stacked. Leave one of them out."
        )
    world = group.world
    if world % shards:
        counts = [str(n) for n in range(1, world + 1) if world % n == 0]
        raise UserError(
            f"--shard {shards} divides a model among {shards} processes, and there"
            + (f" are {world}." if world > 1 else " is one.")
            + f" Start so many (or a multiple): torchrun --nproc-per-node={shards} -m metanudge"
            f" train …, or give --shard {' or '.join(counts)}."
        )
    from torch.distributed.device_mesh import init_device_mesh

    device = device_called(config.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    sizes, names = (world // shards, shards), ("tasks", "shards")
    return dataclasses.replace(
        group, mesh=init_device_mesh(device.type, sizes, mesh_dim_names=names)
    )


def divided(model: nn.Module, mesh: Any) -> nn.Module:
    """The model, divided over the shards of a mesh: blocks that it repeats one by one, so that no
    more than one of them is gathered at a time, then the rest. Every rank keeps all scalars.
    """
    from torch.distributed.fsdp import fully_shard  # takes a second to load

    if sharded_modules(model):  # the user's own, which a rate was measured with before
        return model
    scalars = {p for p in model.parameters() if p.ndim == 0}
    for p in scalars:
        p.data = p.data.to(mesh.device_type)
    for block in [*blocks(model), model]:
        fully_shard(block, mesh=mesh["shards"], ignored_params=scalars)
    return model


def check_sharded(config: TrainConfig, group: Group) -> None:
    """Refuse fewer tasks than groups of ranks, and an outer optimizer that cannot work on
    parameters of which each rank has a part; found out by steps on such a one.
    """
    from torch.distributed.tensor import Shard, distribute_tensor

    if (groups := group.world // group.shards) > config.tasks:
        raise UserError(
            f"--tasks {config.tasks} cannot be split over {groups} groups of {group.shards}"
            f" processes. Use --tasks {groups} or more, or a larger --shard."
        )
    ones = torch.ones(2 * group.shards, 2)
    parameter = nn.Parameter(distribute_tensor(ones, group.mesh["shards"], [Shard(0)]))
    parameter.grad = parameter.detach().clone()
    made = build_optimizer(config.optimizer, [parameter])
    try:
        for _ in range(2):
            made.step()
    except (RuntimeError, NotImplementedError, TypeError, AssertionError) as error:
        reason, _, _ = str(error).partition(". ")
        raise UserError(
            f"--optimizer {config.optimizer} cannot step where processes hold parts of the"
            f" parameters ({type(error).__name__}: {reason}). Use one that works entry by entry,"
            " such as adam, adamw or sgd, or leave --shard out."
        ) from error


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The parts of lists and sequences that have parts themselves, and others of their kind beside
    them; the innermost first.

    Example:
        >>> layers = [nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(3)]
        >>> len(list(blocks(nn.Sequential(*layers, nn.Linear(2, 1)))))
        3
    """
    for holder in reversed(list(model.modules())):
        if isinstance(holder, (nn.ModuleList, nn.Sequential)):
            kinds = Counter(map(type, holder))
            for part in dict.fromkeys(holder):
                composed = any(True for _ in part.children())
                if kinds[type(part)] > 1 and composed and any(True for _ in part.parameters()):
                    yield part
