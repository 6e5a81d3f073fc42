"""Which leading layers of a chain form a trunk: `Conv → BatchNorm → ReLU → MaxPool(2)`, one or more
times; and what a trunk is to the chain: data prepared once, then outputs for many weights,
differentiable in the weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from metanudge.accel.layers import halves, is_per_example

KINDS = (
    (nn.Conv1d, nn.BatchNorm1d, nn.ReLU, nn.MaxPool1d),
    (nn.Conv2d, nn.BatchNorm2d, nn.ReLU, nn.MaxPool2d),
)
Tail = Callable[[Tensor, Tensor | None, Tensor | None, float], Tensor]
"""Outputs of a convolution `(examples, channels, height, width)`, scale and shift of the
normalisation, its ε → pooled outputs.
"""


@dataclass(frozen=True)
class Block:
    """One block's shape: a convolution with stride 1, BatchNorm on batch statistics, ReLU,
    max-pooling by 2.
    """

    conv: nn.Conv1d | nn.Conv2d
    norm: nn.BatchNorm1d | nn.BatchNorm2d
    kernel: tuple[int, ...]
    padding: tuple[int, ...]
    eps: float

    def convolved(self, spatial: Sequence[int]) -> tuple[int, ...]:
        """Spatial shape after the convolution."""
        return tuple(
            n + 2 * p - k + 1 for n, p, k in zip(spatial, self.padding, self.kernel, strict=True)
        )

    def pooled(self, spatial: Sequence[int]) -> tuple[int, ...]:
        """Spatial shape after the block; an odd last entry is dropped."""
        return tuple(n // 2 for n in self.convolved(spatial))


@dataclass(frozen=True)
class Match:
    """The trunk of a chain: the layers before it that work on each example alone, its blocks, and
    how many layers that makes.
    """

    before: tuple[nn.Module, ...]
    blocks: tuple[Block, ...]
    layers: int

    def fits(self, inputs: Tensor) -> bool:
        """Whether inputs `(tasks, examples, channels, *spatial)` pass through all blocks; what does
        not is left to torch to refuse.
        """
        conv = self.blocks[0].conv
        if inputs.ndim != 1 + conv.weight.ndim or inputs.shape[2] != conv.in_channels:
            return False
        if any(
            p.dtype != inputs.dtype
            for block in self.blocks
            for p in (*block.conv.parameters(), *block.norm.parameters())
        ):
            return False
        spatial: tuple[int, ...] = tuple(inputs.shape[3:])
        for block in self.blocks:
            spatial = block.pooled(spatial)
            if min(spatial) < 1:
                return False
        return True


class BlockWeights(NamedTuple):
    """The parameters of one block, one set a row."""

    weight: Tensor  # (rows, out_channels, in_channels, *kernel)
    # (rows, out_channels); cancels in the BatchNorm that follows, so its gradient is zero
    bias: Tensor | None
    gamma: Tensor | None  # (rows, out_channels)
    beta: Tensor | None  # (rows, out_channels)


class BlockPlaces(NamedTuple):
    """Where a block's gradients may be written, one each for the parameters of `BlockWeights`."""

    weight: Tensor | None = None
    bias: Tensor | None = None
    gamma: Tensor | None = None
    beta: Tensor | None = None


class Trunk(ABC):
    """All blocks of a trunk as one operation. First derivatives, and only in the weights."""

    @abstractmethod
    def prepare(self, inputs: Tensor) -> Any:
        """What depends on the inputs `(tasks, examples, channels, *spatial)` alone; done once, used
        for every step and nudge.
        """

    @abstractmethod
    def outputs(
        self,
        prepared: Any,
        weights: Sequence[BlockWeights],
        into: Sequence[BlockPlaces] | None = None,
    ) -> Tensor:
        """Outputs `(rows, examples, channels, *spatial)`; rows are nudges × tasks, nudge by nudge,
        on the prepared tasks.

        A trunk may write the weights' gradients to `into`; those that a backward pass returns are
        then the same memory.
        """

    def rows_at_once(self, inputs: Tensor) -> int | None:
        """For how many rows on inputs `(tasks, examples, channels, *spatial)` activations should be
        held at once; None for all.
        """
        return None

    def join(self, sets: Sequence[Any]) -> Any | None:
        """Prepared sets of examples of the same tasks as one, each normalised by itself; None where
        one by one is better.
        """
        return None

    @property
    def tail(self) -> Tail | None:
        """What runs BatchNorm, ReLU and pooling as one operation where second derivatives are
        wanted, or None where nothing does.
        """
        return None


def match(layers: Sequence[nn.Module]) -> Match | None:
    """The trunk that a list of layers begins with, or None where there is none."""
    before: list[nn.Module] = []
    for layer in layers:
        if not is_per_example(layer):
            break
        before.append(layer)
    blocks: list[Block] = []
    at = len(before)
    while (block := _block(layers[at : at + 4])) is not None:
        if blocks and block.conv.in_channels != blocks[-1].conv.out_channels:
            break
        blocks.append(block)
        at += 4
    return Match(tuple(before), tuple(blocks), at) if blocks else None


def _block(layers: Sequence[nn.Module]) -> Block | None:
    if tuple(map(type, layers)) not in KINDS:
        return None
    conv, norm, _, pool = layers
    assert isinstance(conv, nn.Conv1d | nn.Conv2d)
    assert isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d)
    assert isinstance(pool, nn.MaxPool1d | nn.MaxPool2d)
    plain = (
        conv.groups == 1 and conv.padding_mode == "zeros" and {*conv.stride, *conv.dilation} == {1}
    )
    batch_statistics = norm.training or norm.running_mean is None
    padding = _padding(conv)
    fits = plain and batch_statistics and halves(pool) and norm.num_features == conv.out_channels
    if not fits or padding is None:
        return None
    return Block(conv, norm, tuple(conv.kernel_size), padding, norm.eps)


def _padding(conv: nn.Conv1d | nn.Conv2d) -> tuple[int, ...] | None:
    if not isinstance(conv.padding, str):
        return tuple(conv.padding)
    if conv.padding == "valid":
        return (0,) * len(conv.kernel_size)
    return tuple(k // 2 for k in conv.kernel_size) if all(k % 2 for k in conv.kernel_size) else None
