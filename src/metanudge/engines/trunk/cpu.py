"""Trunks on a CPU: channels last, one matrix product or native convolution a block, few passes over memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from metanudge.engines.trunk import block as later_block
from metanudge.engines.trunk import patches as first_block
from metanudge.engines.trunk.block import LaterBlock
from metanudge.engines.trunk.convolution import Columns, Convolution, Native
from metanudge.engines.trunk.interface import BlockWeights
from metanudge.engines.trunk.match import Block
from metanudge.engines.trunk.patches import FirstBlock, Patches

HELD = 1 << 25  # bytes of activations kept between a forward and a backward pass


class CPUTrunk:
    """All blocks as one operation."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = tuple(blocks)
        self._first = FirstBlock(blocks[0])

    def rows_at_once(self, inputs: Tensor) -> int:
        """So many that what they keep takes a few dozen megabytes."""
        _, examples, _, *spatial = inputs.shape
        numbers = 0
        for block in self._blocks:
            convolved, spatial = block.convolved(spatial), list(block.pooled(spatial))
            kept = math.prod(spatial) if block is self._blocks[0] else math.prod(convolved) + 2 * math.prod(spatial)
            numbers += block.conv.out_channels * kept
        return max(1, HELD // (numbers * examples * inputs.element_size()))

    def prepare(self, inputs: Tensor) -> Patches:
        """Windows of the data for the first block."""
        return self._first.prepare(inputs)

    def outputs(self, prepared: Patches, weights: Sequence[BlockWeights]) -> Tensor:
        """Outputs `(rows, examples, channels, *spatial)`."""
        later = []
        examples, *spatial = prepared.shape
        for block in self._blocks[1:]:
            windows = examples * math.prod(block.convolved(spatial))
            later.append(LaterBlock(_convolution(block, windows, prepared.windows.dtype), block.eps))
            spatial = list(block.pooled(spatial))
        out: Tensor = _Blocks.apply(self._first, later, prepared, *(leaf for block in weights for leaf in block))
        return out.movedim(-1, 2)


def _convolution(block: Block, windows: int, dtype: torch.dtype) -> Convolution:
    conv = block.conv
    large = windows >= 400 and min(conv.in_channels, conv.out_channels) >= 16
    return Native(block) if len(block.kernel) == 2 and dtype == torch.float32 and large else Columns(block)


@dataclass
class _Kept:
    first: first_block.Kept
    later: list[later_block.Kept]


class _Blocks(torch.autograd.Function):
    """The blocks one after the other, and back."""

    @staticmethod
    def forward(ctx: Any, first: FirstBlock, later: list[LaterBlock], patches: Patches, *tensors: Tensor | None) -> Tensor:
        weights = [BlockWeights(*tensors[i : i + 4]) for i in range(0, len(tensors), 4)]  # type: ignore[arg-type]
        borders = [block.border for block in later] + [(0,) * (len(patches.shape) - 1)]
        z, kept = first.forward(patches, weights[0], borders[0])
        gammas = [block.gamma for block in weights[1:] if block.gamma is not None]
        positive = not gammas or bool(torch.cat(gammas, 1).amin() > 0)
        ctx.first, ctx.later, ctx.patches, ctx.kept = first, later, patches, _Kept(kept, [])
        for block, own, border in zip(later, weights[1:], borders[1:], strict=True):
            z, here = block.forward(z, own, border, positive=positive)
            ctx.kept.later.append(here)
        ctx.save_for_backward(z.inside)
        return z.inside

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        (out,) = ctx.saved_tensors
        kept, ctx.kept = ctx.kept, None
        assert kept is not None, "a second backward pass, but the first has overwritten what was kept"
        g = g.contiguous()
        gradients: list[BlockWeights] = []
        for block, here in zip(reversed(ctx.later), reversed(kept.later), strict=True):
            g, gradient = block.backward(g, out, here)
            out = here.z.inside
            gradients.append(gradient)
        gradients.append(ctx.first.backward(g, out, ctx.patches, kept.first))
        leaves = [leaf for gradient in reversed(gradients) for leaf in gradient]
        return (None, None, None, *(leaf if needed else None for leaf, needed in zip(leaves, ctx.needs_input_grad[3:], strict=True)))
