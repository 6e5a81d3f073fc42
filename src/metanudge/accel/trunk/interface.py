"""What a trunk is to the chain: data prepared once, then outputs for many weights, differentiable
in the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor


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


class Trunk(Protocol):
    """All blocks of a trunk as one operation. First derivatives, and only in the weights."""

    def prepare(self, inputs: Tensor) -> Any:
        """What depends on the inputs `(tasks, examples, channels, *spatial)` alone; done once, used
        for every step and nudge.
        """

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
