"""Parameters that lie in one matrix, so that what is done to all of them alike is one operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from metanudge.params import Params, combined, condensed, norm

Orders = Mapping[str, tuple[int, ...]]
"""In which order the axes of some parameters lie in memory, the slowest first; the others lie as
they are.
"""


class Flat(dict[str, Tensor]):
    """Parameters whose leaves are views of one matrix. To everybody else it is a plain dict.

    Args:
        matrix: `(rows, num_parameters)`.
        shapes: of one row of each leaf, in the order in which they lie.
        orders: of the axes within leaves.

    Example:
        >>> flat = Flat(torch.arange(8.0).view(2, 4), {"w": torch.Size([3]), "b": torch.Size([])})
        >>> flat["w"].tolist(), flat["b"].tolist()
        ([[0.0, 1.0, 2.0], [4.0, 5.0, 6.0]], [3.0, 7.0])
        >>> Flat(torch.arange(6.0).view(1, 6), {"w": torch.Size([2, 3])},
        ...     {"w": (1, 0)})["w"].tolist()
        [[[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]]
    """

    def __init__(
        self, matrix: Tensor, shapes: Mapping[str, torch.Size], orders: Orders | None = None
    ) -> None:
        orders = {} if orders is None else orders
        pieces = matrix.split([shape.numel() for shape in shapes.values()], dim=1)
        super().__init__(
            {
                n: _laid_out(p, shape, orders.get(n))
                for (n, shape), p in zip(shapes.items(), pieces, strict=True)
            }
        )
        self.matrix = matrix
        self.shapes = shapes
        self.orders = orders

    @classmethod
    def of(cls, leaves: Mapping[str, Tensor], orders: Orders | None = None) -> Flat:
        """One row that holds these leaves, copied."""
        orders = {} if orders is None else orders
        pieces = [
            leaf.permute(orders.get(n, tuple(range(leaf.ndim)))).flatten()
            for n, leaf in leaves.items()
        ]
        return cls(
            torch.cat(pieces).unsqueeze(0), {n: leaf.shape for n, leaf in leaves.items()}, orders
        )

    def like(self, matrix: Tensor) -> Flat:
        """Another matrix, cut in the same way."""
        return Flat(matrix, self.shapes, self.orders)

    def holding(self, rows: Params) -> Flat:
        """These rows in a matrix cut in the same way; themselves where they lie in one."""
        if isinstance(rows, Flat):
            return rows
        first = next(iter(rows.values()))
        found = self.like(first.new_empty(len(first), self.matrix.shape[1]))
        torch._foreach_copy_([found[n] for n in rows], list(rows.values()))
        return found


@norm.register(Flat)
def _norm(a: Flat) -> Tensor:
    return torch.linalg.vector_norm(a.matrix, dim=1)


@condensed.register(Flat)
def _condensed(a: Flat, weights: float | Sequence[float]) -> tuple[Params, float | Sequence[float]]:
    return a.like(combined(a.matrix, weights).unsqueeze(0)), 1.0


def _laid_out(piece: Tensor, shape: torch.Size, order: tuple[int, ...] | None) -> Tensor:
    if order is None:
        return piece.view(-1, *shape)
    return piece.view(-1, *[shape[axis] for axis in order]).permute(
        0, *[1 + order.index(axis) for axis in range(len(shape))]
    )
