"""Trunks on a CPU: channels last, one matrix product or native convolution a block, few passes over memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

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
        """So many that their activations take a few dozen megabytes."""
        _, examples, _, *spatial = inputs.shape
        numbers = 0
        for block in self._blocks:
            convolved, spatial = block.convolved(spatial), list(block.pooled(spatial))
            numbers += block.conv.out_channels * (math.prod(spatial) + (0 if block is self._blocks[0] else math.prod(convolved)))
        return max(1, HELD // (numbers * examples * inputs.element_size()))

    def prepare(self, inputs: Tensor) -> Patches:
        """Windows of the data for the first block."""
        return self._first.prepare(inputs)

    def outputs(self, prepared: Patches, weights: Sequence[BlockWeights]) -> Tensor:
        """Outputs `(rows, examples, channels, *spatial)`."""
        later = []
        examples, *spatial = prepared.shape
        for block in self._blocks[1:]:
            convolved = block.convolved(spatial)
            later.append(LaterBlock(_convolution(block, examples * math.prod(convolved), prepared.windows.dtype), block.eps))
            spatial = block.pooled(spatial)
        out: Tensor = _Blocks.apply(self._first, later, prepared, *(t for block in weights for t in block))
        return out.movedim(-1, 2)


def _convolution(block: Block, windows: int, dtype: torch.dtype) -> Convolution:
    conv = block.conv
    large = windows >= 400 and min(conv.in_channels, conv.out_channels) >= 16
    return Native(block) if len(block.kernel) == 2 and dtype == torch.float32 and large else Columns(block)


class _Blocks(torch.autograd.Function):
    """The blocks one after the other, and back."""

    @staticmethod
    def forward(ctx: Any, first: FirstBlock, later: list[LaterBlock], patches: Patches, *tensors: Tensor | None) -> Tensor:
        weights = [BlockWeights(*tensors[i : i + 4]) for i in range(0, len(tensors), 4)]  # type: ignore[arg-type]
        z, kept = first.forward(patches, weights[0])
        ctx.first, ctx.later, ctx.patches, ctx.weights, ctx.kept = first, later, patches, weights, [kept]
        for block, own in zip(later, weights[1:], strict=True):
            z, kept_here = block.forward(z, own)
            ctx.kept.append(kept_here)
        ctx.save_for_backward(z)
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        (out,) = ctx.saved_tensors
        kept, ctx.kept = ctx.kept, None
        gradients: list[BlockWeights] = []
        g = g.contiguous()
        for block, own, weights in zip(reversed(ctx.later), reversed(kept[1:]), reversed(ctx.weights[1:]), strict=True):
            g, gradient = block.backward(g, out, weights, own)
            out = own.z
            gradients.append(gradient)
        gradients.append(ctx.first.backward(g, out, ctx.patches, ctx.weights[0], kept[0]))
        needed = ctx.needs_input_grad[3:]
        flat = [t for gradient in reversed(gradients) for t in gradient]
        return (None, None, None, *(t if need else None for t, need in zip(flat, needed, strict=True)))
