"""Sets of examples that share weights and convolutions but are normalised apart, as groups of equal
size: a set is one or several.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Groups:
    """The groups of several sets, one after the other; with one set there is one group."""

    sizes: tuple[int, ...]  # how many groups each set has
    # (count, count), the mean over the groups of a set; None where every set is one group
    mixing: Tensor | None

    @classmethod
    def of(cls, sets: Sequence[int], like: Tensor) -> Groups:
        """Those of sets with so many examples each."""
        sizes = group_sizes(sets)
        if max(sizes) == 1:
            return cls(sizes, None)
        return cls(
            sizes, torch.block_diag(*(like.new_full((size, size), 1 / size) for size in sizes))
        )

    @property
    def count(self) -> int:
        """Of all sets."""
        return sum(self.sizes)

    def each(self, leaf: Tensor) -> Tensor:
        """`(rows, ...)` once for every group, `(rows × count, ...)`."""
        if self.count == 1:
            return leaf
        return leaf.unsqueeze(1).expand(-1, self.count, *leaf.shape[1:]).flatten(0, 1)

    def total(self, leaf: Tensor) -> Tensor:
        """The sum over all groups, from `(rows × count, ...)` to `(rows, ...)`."""
        return leaf if self.count == 1 else leaf.unflatten(0, (-1, self.count)).sum(1)

    def average(self, means: Tensor) -> Tensor:
        """Means over the sets from means over the groups, `(rows × count, 1, channels)` both."""
        if self.mixing is None:
            return means
        return torch.matmul(self.mixing, means.reshape(-1, self.count, means.shape[-1])).view(
            means.shape
        )


def group_sizes(sets: Sequence[int]) -> tuple[int, ...]:
    """How many groups each of the sets has, all groups being of one size, the largest."""
    size = math.gcd(*sets)
    return tuple(number // size for number in sets)
