"""Trunks: leading `Conv → BatchNorm → ReLU → MaxPool(2)` blocks of a chain as one operation with a
hand-written derivative.

These blocks are nearly all the work of the usual few-shot networks, and together they allow what
layer by layer is impossible: a bias before BatchNorm cancels, pooling may go before normalisation,
the first layer's statistics follow from moments of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from metanudge.accel.toolchain import triton_works
from metanudge.accel.trunk.cpu import CPUTrunk
from metanudge.accel.trunk.interface import BlockPlaces, BlockWeights, Trunk
from metanudge.accel.trunk.match import Block, Match, match

Tail = Callable[[Tensor, Tensor | None, Tensor | None, float], Tensor]
"""Outputs of a convolution `(examples, channels, height, width)`, scale and shift of the
normalisation, its ε → pooled outputs.
"""


def trunk_for(device: torch.device, dtype: torch.dtype, blocks: Sequence[Block]) -> Trunk | None:
    """What runs these blocks on a device, or None where the layers run one by one."""
    if device.type == "cuda" and dtype == torch.float32 and triton_works():
        from metanudge.accel.trunk.cuda import CUDATrunk

        if not torch.is_autocast_enabled("cuda"):
            return CUDATrunk(
                blocks, precision="tf32" if torch.backends.cudnn.allow_tf32 else "full"
            )
        return (
            CUDATrunk(blocks, precision="bf16")
            if torch.get_autocast_dtype("cuda") == torch.bfloat16
            else None
        )
    if torch.is_autocast_enabled(device.type):
        return None
    if device.type == "cpu" and dtype in (torch.float32, torch.float64) and CPUTrunk.suits(blocks):
        return CPUTrunk(blocks)
    return None


def tail_for(trunk: Trunk | None, blocks: Sequence[Block]) -> Tail | None:
    """What runs BatchNorm, ReLU and pooling as one operation where second derivatives are wanted,
    or None where nothing does.
    """
    if (
        trunk is None
        or isinstance(trunk, CPUTrunk)
        or not all(isinstance(block.conv, nn.Conv2d) for block in blocks)
    ):
        return None
    from metanudge.accel.trunk.tail import normalise_and_pool

    return normalise_and_pool


def order_for(device: torch.device, block: Block) -> tuple[int, ...] | None:
    """The order in memory of a block's weights that suits what runs it, the slowest axis first;
    None for their own.
    """
    if device.type != "cuda" or not triton_works():
        return None
    from metanudge.accel.trunk.cuda import CUDATrunk

    return CUDATrunk.order(block)


def rows_at_once(trunk: Trunk, inputs: Tensor) -> int | None:
    """For how many rows on inputs `(tasks, examples, channels, *spatial)` activations should be
    held at once; None for all.
    """
    return trunk.rows_at_once(inputs) if isinstance(trunk, CPUTrunk) else None


def join(trunk: Trunk, sets: Sequence[Any]) -> Any | None:
    """Prepared sets of examples of the same tasks as one, each normalised by itself; None where one
    by one is better.

    On a CPU small networks take most of their time to start operations, and these are half as many.
    """
    return trunk.join(sets) if isinstance(trunk, CPUTrunk) else None


__all__ = [
    "Block",
    "BlockPlaces",
    "BlockWeights",
    "Match",
    "Tail",
    "Trunk",
    "join",
    "match",
    "order_for",
    "rows_at_once",
    "tail_for",
    "trunk_for",
]
