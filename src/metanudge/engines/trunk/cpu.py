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
from metanudge.engines.trunk.workers import spread

HELD = 1 << 26  # bytes of activations kept between a forward and a backward pass
WORTH_A_THREAD = 1 << 16  # activations


class CPUTrunk:
    """All blocks as one operation."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = tuple(blocks)
        self._first = FirstBlock(blocks[0])

    def rows_at_once(self, inputs: Tensor) -> int:
        """So many that their activations take a few dozen megabytes, but enough for all threads."""
        threads = torch.get_num_threads()
        rows = HELD // (self._activations(inputs.shape[1], inputs.shape[3:]) * inputs.element_size())
        return max(1, rows // threads) * threads

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
        small = self._activations(examples, [2 * n for n in prepared.shape[1:]]) * len(weights[0].weight) < WORTH_A_THREAD
        groups = _groups(len(weights[0].weight), len(prepared.covariance), 1 if small else torch.get_num_threads())
        out: Tensor = _Blocks.apply(_Run(self._first, later, prepared, groups), *(t for block in weights for t in block))
        return out.movedim(-1, 2)

    def _activations(self, examples: int, spatial: Sequence[int]) -> int:
        """How many numbers one row keeps for its backward pass."""
        numbers = 0
        for place, block in enumerate(self._blocks):
            convolved, spatial = block.convolved(spatial), block.pooled(spatial)
            numbers += block.conv.out_channels * (math.prod(spatial) + (math.prod(convolved) + math.prod(spatial) if place else 0))
        return numbers * examples


def _convolution(block: Block, windows: int, dtype: torch.dtype) -> Convolution:
    conv = block.conv
    large = windows >= 400 and min(conv.in_channels, conv.out_channels) >= 16
    return Native(block) if len(block.kernel) == 2 and dtype == torch.float32 and large else Columns(block)


def _groups(rows: int, tasks: int, threads: int) -> list[tuple[slice, slice]]:
    """Rows, and their tasks, for each thread: all, or tasks of one nudge."""
    nudges = rows // tasks
    if threads == 1:
        return [(slice(0, rows), slice(0, tasks))]
    each = math.ceil(tasks / math.ceil(threads / nudges))
    return [
        (slice(nudge + first, nudge + min(first + each, tasks)), slice(first, min(first + each, tasks)))
        for nudge in range(0, rows, tasks)
        for first in range(0, tasks, each)
    ]


@dataclass
class _Kept:
    """What the backward pass of a group of rows needs."""

    first: first_block.Kept
    later: list[later_block.Kept]


@dataclass(frozen=True)
class _Run:
    """The blocks one after the other, and back, for groups of rows."""

    first: FirstBlock
    later: list[LaterBlock]
    patches: Patches
    groups: list[tuple[slice, slice]]

    def forward(self, group: tuple[slice, slice], weights: list[BlockWeights]) -> tuple[Tensor, _Kept]:
        rows, tasks = group
        own, *others = (_rows_of(block, rows) for block in weights)
        z, kept_first = self.first.forward(self.patches[tasks], own)
        kept = _Kept(kept_first, [])
        for block, own in zip(self.later, others, strict=True):
            z, here = block.forward(z, own)
            kept.later.append(here)
        return z, kept

    def backward(self, group: tuple[slice, slice], g: Tensor, out: Tensor, weights: list[BlockWeights], kept: _Kept) -> list[Tensor]:
        rows, tasks = group
        first, *others = (_rows_of(block, rows) for block in weights)
        g, out = g[rows].contiguous(), out[rows]
        gradients: list[BlockWeights] = []
        for block, own, here in zip(reversed(self.later), reversed(others), reversed(kept.later), strict=True):
            g, gradient = block.backward(g, out, own, here)
            out = here.z
            gradients.append(gradient)
        gradients.append(self.first.backward(g, out, self.patches[tasks], first, kept.first))
        return [leaf for gradient in reversed(gradients) for leaf in gradient]


def _rows_of(weights: BlockWeights, rows: slice) -> BlockWeights:
    return BlockWeights(*(None if leaf is None else leaf[rows] for leaf in weights))  # type: ignore[arg-type]


class _Blocks(torch.autograd.Function):
    """A run of blocks as torch's autograd sees it."""

    @staticmethod
    def forward(ctx: Any, run: _Run, *tensors: Tensor | None) -> Tensor:
        weights = [BlockWeights(*tensors[i : i + 4]) for i in range(0, len(tensors), 4)]  # type: ignore[arg-type]
        parts = spread(lambda group: run.forward(group, weights), run.groups)
        out = _joined([z for z, _ in parts])
        ctx.run, ctx.kept = run, [kept for _, kept in parts]
        ctx.save_for_backward(out, *tensors)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        run: _Run = ctx.run
        out, *tensors = ctx.saved_tensors
        weights = [BlockWeights(*tensors[i : i + 4]) for i in range(0, len(tensors), 4)]
        kept, ctx.kept = ctx.kept, None
        assert kept is not None, "what was kept is overwritten by the first backward pass"
        parts = spread(lambda at: run.backward(run.groups[at], g, out, weights, kept[at]), range(len(run.groups)))
        gradients = zip(*parts, strict=True)
        return (None, *(_joined(leaf) if needed else None for leaf, needed in zip(gradients, ctx.needs_input_grad[1:], strict=True)))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(tuple(parts))
