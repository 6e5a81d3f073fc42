"""What calls to the kernels of a trunk have in common: the sizes of a block, and its tensors as the
kernels want them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import triton
from torch import Tensor

from metanudge.accel.trunk.blocks import Block, BlockWeights, Places

ENOUGH_PROGRAMS = 256  # about two for each multiprocessor of a large GPU


@dataclass(frozen=True)
class Shape:
    """The sizes of one block: what goes in, what the convolution makes of it, what pooling
    leaves.
    """

    ci: int
    co: int
    kernel: tuple[int, int]
    padding: tuple[int, int]
    pool: tuple[int, int]
    examples: int
    before: tuple[int, int]
    after: tuple[int, int]
    pooled: tuple[int, int]
    eps: float

    @property
    def taps(self) -> int:
        """Places in the kernel."""
        return self.kernel[0] * self.kernel[1]

    @property
    def patch(self) -> int:
        """Numbers that one output of the convolution sees."""
        return self.ci * self.taps

    @property
    def padded_patch(self) -> int:
        """With a 1 after them, as tensor cores want it."""
        return max(16, triton.next_power_of_2(self.patch + 1))

    @property
    def padded_window(self) -> int:
        """Numbers that one pooled output sees, as tensor cores want it."""
        height, width = (k + p - 1 for k, p in zip(self.kernel, self.pool, strict=True))
        return max(16, triton.next_power_of_2(self.ci * height * width))

    @property
    def pixels(self) -> int:
        """Of the convolution's output, all examples of a row together."""
        return self.examples * self.after[0] * self.after[1]

    @property
    def entries(self) -> int:
        """Of the pooled output, all examples of a row together."""
        return self.examples * self.pooled[0] * self.pooled[1]


def shapes_of(blocks: Sequence[Block], examples: int, spatial: tuple[int, int]) -> list[Shape]:
    """The sizes of blocks one after the other, on so many examples a row."""
    shapes = []
    for block in blocks:
        kernel, padding = _pair(block.kernel, 1), _pair(block.padding, 0)
        pool = _pair((2,) * len(block.kernel), 1)
        height, width = (
            n + 2 * p - k + 1 for n, p, k in zip(spatial, padding, kernel, strict=True)
        )
        pooled = height // pool[0], width // pool[1]
        before, after, conv = spatial, (height, width), block.conv
        shapes.append(
            Shape(
                conv.in_channels, conv.out_channels, kernel, padding, pool,
                examples, before, after, pooled, block.eps,
            )
        )  # fmt: skip
        spatial = pooled
    return shapes


def shares_of(
    entries: int, step: int, others: int, programs: int = 4 * ENOUGH_PROGRAMS
) -> tuple[int, int]:
    """How many programs share the entries of one row, and how many entries (a multiple of `step`)
    each takes.
    """
    tiles = max(1, min(triton.cdiv(entries, step), triton.cdiv(programs, others)))
    share = triton.cdiv(triton.cdiv(entries, tiles), step) * step
    return triton.cdiv(entries, share), share


def tile_of(pixels: int) -> int:
    """How many pixels one program of a convolution takes."""
    return 128 if pixels >= 4096 else 64 if pixels >= 64 else 32


def _pair(sizes: Sequence[int], missing: int) -> tuple[int, int]:
    """Sizes along height and width, of which a one-dimensional layer has the last only."""
    height, width = (missing, *sizes)[-2:]
    return height, width


@dataclass(frozen=True)
class Gradients:
    """Where a block's gradients go."""

    weight: Tensor
    bias: Tensor
    gamma: Tensor
    beta: Tensor

    @classmethod
    def of(cls, block: BlockWeights, into: Places | None) -> Gradients:
        """The given places, and new ones where none is given; the sums for scale and shift are
        needed anyway.
        """
        weight, (bias, gamma, beta) = block.weight.shape, [block.weight.shape[:2]] * 3
        given = (None,) * 4 if into is None else into
        pairs = zip((weight, bias, gamma, beta), given, strict=True)
        return cls(
            *(block.weight.new_empty(shape) if place is None else place for shape, place in pairs)
        )

    def wanted(self, block: BlockWeights) -> tuple[Tensor | None, ...]:
        """The gradients of what the block has."""
        found = (self.weight, self.bias, self.gamma, self.beta)
        return tuple(
            None if leaf is None else gradient for leaf, gradient in zip(block, found, strict=True)
        )


def affine(block: BlockWeights) -> tuple[Tensor, Tensor, Tensor]:
    """Weight, scale and shift as the first layer's kernels want them: each row dense, rows
    anywhere.
    """
    weight = block.weight if block.weight[0].is_contiguous() else block.weight.contiguous()
    return weight, *scale_and_shift(block)


def scale_and_shift(block: BlockWeights) -> tuple[Tensor, Tensor]:
    """γ and β, 1 and 0 where the block has none; each row dense."""
    shape = block.weight.shape[:2]
    gamma = block.weight.new_ones(shape) if block.gamma is None else block.gamma
    beta = block.weight.new_zeros(shape) if block.beta is None else block.beta
    gamma, beta = (leaf if leaf.stride(1) == 1 else leaf.contiguous() for leaf in (gamma, beta))
    return gamma, beta
