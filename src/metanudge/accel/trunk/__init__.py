"""Trunks: leading `Conv → BatchNorm → ReLU → MaxPool(2)` blocks of a chain as one operation with a
hand-written derivative.

These blocks are nearly all the work of the usual few-shot networks, and together they allow what
layer by layer is impossible: a bias before BatchNorm cancels, pooling may go before normalisation,
the first layer's statistics follow from moments of the data.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from metanudge.accel.toolchain import triton_works
from metanudge.accel.trunk.blocks import Block, Trunk
from metanudge.accel.trunk.cpu import CPUTrunk


def trunk_for(device: torch.device, dtype: torch.dtype, blocks: Sequence[Block]) -> Trunk | None:
    """What runs these blocks on a device, or None where the layers run one by one."""
    if device.type == "cuda" and dtype == torch.float32 and triton_works():
        from metanudge.accel.trunk.cuda import CUDATrunk

        if not torch.is_autocast_enabled("cuda"):
            full = not torch.backends.cudnn.allow_tf32
            return CUDATrunk(blocks, precision="full" if full else "tf32")
        half = torch.get_autocast_dtype("cuda") == torch.bfloat16
        return CUDATrunk(blocks, precision="bf16") if half else None
    if torch.is_autocast_enabled(device.type):
        return None
    if device.type == "cpu" and dtype in (torch.float32, torch.float64) and CPUTrunk.suits(blocks):
        return CPUTrunk(blocks)
    return None


def order_for(device: torch.device, block: Block) -> tuple[int, ...] | None:
    """The order in memory of a block's weights that suits what runs it, the slowest axis first;
    None for their own.
    """
    if device.type != "cuda" or not triton_works():
        return None
    from metanudge.accel.trunk.cuda import CUDATrunk

    return CUDATrunk.order(block)
