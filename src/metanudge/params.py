"""Parameters as dicts of tensors with a leading *row* axis: one row is one inner problem being
solved.

Every solver is written on rows, so that the same code serves the stacked engine (rows = tasks ×
nudges) and the in-place engine (one row). Nothing here knows what the rows mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Params = dict[str, Tensor]
"""Tensors keyed like `named_parameters()`; inside solvers each has shape `(rows,
*parameter.shape)`.
"""


def _matrix(leaf: Tensor) -> Tensor:
    """`(rows, entries)`, also for a parameter that is a single number."""
    return leaf.flatten(1) if leaf.ndim > 1 else leaf.unsqueeze(1)


Orders = Mapping[str, tuple[int, ...]]
"""In which order the axes of some parameters lie in memory, the slowest first; the others lie as
they are.
"""


class Flat(dict[str, Tensor]):
    """Parameters whose leaves are views of one matrix: what is done to all of them alike is done to
    the matrix, in one go.

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


def _laid_out(piece: Tensor, shape: torch.Size, order: tuple[int, ...] | None) -> Tensor:
    if order is None:
        return piece.view(-1, *shape)
    return piece.view(-1, *[shape[axis] for axis in order]).permute(
        0, *[1 + order.index(axis) for axis in range(len(shape))]
    )


def dot(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """Inner product of each row, shape `(rows,)`."""
    products = [torch.linalg.vecdot(_matrix(a[name]), _matrix(b[name])) for name in a]
    return torch.stack(products).sum(0)


def norm(a: Mapping[str, Tensor]) -> Tensor:
    """Euclidean norm of each row, shape `(rows,)`; allocates nothing of the size of `a`."""
    if isinstance(a, Flat):
        return torch.linalg.vector_norm(a.matrix, dim=1)
    norms = [torch.linalg.vector_norm(_matrix(leaf), dim=1) for leaf in a.values()]
    return torch.linalg.vector_norm(torch.stack(norms), dim=0)


def per_row(values: Tensor, like: Tensor) -> Tensor:
    """`values` of shape `(rows,)`, shaped to multiply a leaf of shape `(rows, ...)`."""
    return values.view(-1, *[1] * (like.ndim - 1)).to(like.dtype)


def add_scaled(a: Params, scale: Tensor, b: Params) -> Params:
    """`a + scale·b` with one scale per row, out of place."""
    return {name: torch.addcmul(a[name], per_row(scale, b[name]), b[name]) for name in a}


def tiled(a: Params, factors: Sequence[float]) -> Params:
    """All rows of `a` times the first factor, then all times the second, and so on."""

    def tile(leaf: Tensor) -> Tensor:
        return (
            leaf * factors[0]
            if len(factors) == 1
            else torch.cat([leaf * factor for factor in factors])
        )

    return (
        a.like(tile(a.matrix))
        if isinstance(a, Flat)
        else {name: tile(leaf) for name, leaf in a.items()}
    )


def select(mask: Tensor, new: Params, old: Params) -> Params:
    """Rows of `new` where `mask` holds, of `old` elsewhere."""
    return {
        name: torch.where(mask.view(-1, *[1] * (new[name].ndim - 1)), new[name], old[name])
        for name in new
    }


def zeros_like(a: Params) -> Params:
    """Zeros of the same shapes."""
    return {name: torch.zeros_like(leaf) for name, leaf in a.items()}


def flatten(a: Params) -> Tensor:
    """All parameters of each row in one matrix, shape `(rows, num_parameters)`."""
    return torch.cat([_matrix(leaf) for leaf in a.values()], dim=1)


def unflatten(matrix: Tensor, like: Params) -> Params:
    """The inverse of `flatten`: rows of `matrix` cut and shaped like the leaves of `like` (whose
    row count may differ).
    """
    pieces = matrix.split([leaf[0].numel() for leaf in like.values()], dim=1)
    return {
        name: piece.reshape(-1, *leaf.shape[1:])
        for (name, leaf), piece in zip(like.items(), pieces, strict=True)
    }


def combined(rows: Tensor, weights: float | Sequence[float]) -> Tensor:
    """Σ_r w_r rows_r, with one weight for all rows or one for each of equal parts of them."""
    if isinstance(weights, (int, float)):
        return rows.sum(0) * weights
    # Python's numbers as weights: making a tensor of them would wait for the device.
    first, *others = rows.unflatten(0, (len(weights), -1)).sum(1)
    total = first * weights[0]
    for weight, row in zip(weights[1:], others, strict=True):
        total.add_(row, alpha=weight)
    return total


def wide(dtype: torch.dtype) -> torch.dtype:
    """float32 or wider: small differences of what is stored in fewer bits would drown in
    rounding.
    """
    return torch.promote_types(dtype, torch.float32)
