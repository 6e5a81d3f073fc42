"""Trunks on a CPU: channels last, one matrix product or native convolution a block, few passes over
memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from metanudge.accel.trunk import first_block, later_block
from metanudge.accel.trunk.blocks import Block, BlockWeights, Places, Trunk
from metanudge.accel.trunk.convolution import Columns, Convolution, Native
from metanudge.accel.trunk.first_block import FirstBlock, Patches
from metanudge.accel.trunk.groups import group_sizes
from metanudge.accel.trunk.later_block import LaterBlock

HELD = 1 << 24  # bytes of activations kept between a forward and a backward pass
LARGEST_PATCH = 256  # numbers that one output of the first convolution sees
MOST_GROUPS = 16  # of sets that go together; more would be too small


@dataclass(frozen=True)
class Prepared:
    """The first block's data, and how the other blocks run on data of this size."""

    patches: Patches
    first: FirstBlock
    later: list[LaterBlock]

    @property
    def borders(self) -> list[tuple[int, ...]]:
        """What each block wants around its inputs, from the second block on; nothing around the
        outputs.
        """
        return [*(block.border for block in self.later), (0,) * (len(self.patches.shape) - 1)]


class CPUTrunk(Trunk):
    """All blocks as one operation."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = tuple(blocks)

    @staticmethod
    def suits(blocks: Sequence[Block]) -> bool:
        """Whether the covariance of the first block's windows is small enough to work with."""
        return blocks[0].conv.in_channels * math.prod(blocks[0].kernel) <= LARGEST_PATCH

    def rows_at_once(self, inputs: Tensor) -> int:
        """So many that what they keep takes a few dozen megabytes."""
        _, examples, _, *spatial = inputs.shape
        numbers = 0
        for block in self._blocks:
            convolved, pooled, channels = (
                block.convolved(spatial),
                block.pooled(spatial),
                block.conv.out_channels,
            )
            if block is not self._blocks[0]:
                numbers += _convolution(block, examples, spatial, inputs.dtype).held(convolved)
                numbers += channels * (math.prod(convolved) + math.prod(pooled))
            numbers += channels * math.prod(pooled)
            spatial = list(pooled)
        return max(1, HELD // (numbers * examples * inputs.element_size()))

    def prepare(self, inputs: Tensor) -> Prepared:
        """Windows of the data for the first block."""
        first = FirstBlock(self._blocks[0])
        return self._with_patches(first, first.prepare(inputs), inputs.dtype)

    def join(self, sets: Sequence[Prepared]) -> Prepared | None:
        """Several sets of examples of the same tasks, to be convolved together and normalised
        apart; None where one by one is better.

        Small networks take most of their time to start operations, and these are half as many.
        """
        shapes = [prepared.patches.shape for prepared in sets]
        if (
            len({shape[1:] for shape in shapes}) > 1
            or sum(group_sizes([shape[0] for shape in shapes])) > MOST_GROUPS
        ):
            return None
        patches = Patches.joined([prepared.patches for prepared in sets])
        return self._with_patches(sets[0].first, patches, patches.windows().dtype)

    def _with_patches(self, first: FirstBlock, patches: Patches, dtype: torch.dtype) -> Prepared:
        examples, *spatial = patches.shape
        later = []
        for block in self._blocks[1:]:
            later.append(
                LaterBlock(_convolution(block, examples, spatial, dtype), block.eps, patches.groups)
            )
            spatial = list(block.pooled(spatial))
        return Prepared(patches, first, later)

    def outputs(
        self,
        prepared: Prepared,
        weights: Sequence[BlockWeights],
        into: Sequence[Places] | None = None,
    ) -> Tensor:
        """Outputs `(rows, examples, channels, *spatial)`; gradients come as they are made."""
        out: Tensor = _Blocks.apply(prepared, *(leaf for block in weights for leaf in block))
        return out.movedim(-1, 2)


def _convolution(
    block: Block, examples: int, spatial: Sequence[int], dtype: torch.dtype
) -> Convolution:
    """What is fastest: measured with 3×3 kernels, 16 to 64 channels, 3² to 14² pixels."""
    large = (
        examples * math.prod(block.convolved(spatial)) >= 400
        and min(block.conv.in_channels, block.conv.out_channels) >= 16
    )
    return (
        Native(block)
        if len(block.kernel) == 2 and dtype == torch.float32 and large
        else Columns(block)
    )


@dataclass
class _Kept:
    first: first_block.Kept
    later: list[later_block.Kept]


class _Blocks(torch.autograd.Function):
    """The blocks one after the other, and back."""

    @staticmethod
    def forward(ctx: Any, prepared: Prepared, *leaves: Tensor | None) -> Tensor:
        weights = [BlockWeights(*leaves[i : i + 4]) for i in range(0, len(leaves), 4)]  # type: ignore[arg-type]
        gammas = [block.gamma for block in weights[1:] if block.gamma is not None]
        positive = not gammas or bool(torch.cat(gammas, 1).amin() > 0)
        borders = prepared.borders
        z, first = prepared.first.forward(prepared.patches, weights[0], borders[0])
        kept = _Kept(first, [])
        for block, own, border in zip(prepared.later, weights[1:], borders[1:], strict=True):
            z, here = block.forward(z, own, border, positive=positive)
            kept.later.append(here)
        ctx.prepared, ctx.kept = prepared, kept
        ctx.save_for_backward(z.inside)
        return z.inside

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        (out,) = ctx.saved_tensors
        kept, ctx.kept = ctx.kept, None
        assert kept is not None, (
            "a second backward pass, but the first has overwritten what was kept"
        )
        g = g.contiguous()
        gradients: list[BlockWeights] = []
        for block in reversed(ctx.prepared.later):
            here = kept.later.pop()
            g, gradient = block.backward(g, out, here)
            out = here.z.inside
            gradients.append(gradient)
        gradients.append(ctx.prepared.first.backward(g, out, kept.first))
        leaves = [leaf for gradient in reversed(gradients) for leaf in gradient]
        return (
            None,
            *(
                leaf if needed else None
                for leaf, needed in zip(leaves, ctx.needs_input_grad[1:], strict=True)
            ),
        )
