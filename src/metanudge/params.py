"""Parameters as dicts of tensors with a leading *row* axis: one row is one inner problem being
solved.

Every solver is written on rows, so that the same code serves the stacked engine (rows = tasks ×
nudges) and the in-place engine (one row). Nothing here knows what the rows mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import singledispatch

import torch
from torch import Tensor

from metanudge.spread import is_spread, present

Params = dict[str, Tensor]
"""Tensors keyed like `named_parameters()`; inside solvers each has shape `(rows,
*parameter.shape)`.
"""

LEAST_PACKED = 2**16  # entries of a parameter: below, kernels cost more than memory


def _matrix(leaf: Tensor) -> Tensor:
    """`(rows, entries)`, also for a parameter that is a single number."""
    return leaf.flatten(1) if leaf.ndim > 1 else leaf.unsqueeze(1)


def num_rows(a: Mapping[str, Tensor]) -> int:
    """How many rows the leaves have."""
    return next(iter(a.values())).shape[0]


def dot(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """Inner product of each row, shape `(rows,)`."""
    products = {name: torch.linalg.vecdot(_matrix(a[name]), _matrix(b[name])) for name in a}
    spread = present()
    return torch.stack([*products.values()]).sum(0) if spread is None else spread.sum(products)


@singledispatch
def norm(a: Mapping[str, Tensor]) -> Tensor:
    """Euclidean norm of each row, shape `(rows,)`; allocates nothing of the size of `a`. Mappings
    that know a shorter way register it, here and with `condensed`.
    """
    if num_rows(a) == 1:
        return joined(dict(zip(a, torch._foreach_norm([*a.values()]), strict=True))).reshape(1)
    return joined({name: lengths(leaf) for name, leaf in a.items()})


def lengths(leaf: Tensor) -> Tensor:
    """Euclidean norm of each row of a leaf (of the part that lies in this process), `(rows,)`."""
    return torch.linalg.vector_norm(_matrix(leaf), dim=1)


def joined(norms: Mapping[str, Tensor]) -> Tensor:
    """The norm of the whole from those of its leaves; over all ranks where leaves are spread."""
    spread = present()
    if spread is None:
        return torch.linalg.vector_norm(torch.stack([*norms.values()]), dim=0)
    dtype = next(iter(norms.values())).dtype
    return spread.sum({n: value.double().square() for n, value in norms.items()}).sqrt().to(dtype)


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

    return {name: tile(leaf) for name, leaf in a.items()}


def middle(a: Params, rows: int) -> Params:
    """Between each of the first `rows` rows and that of the next as many.

    Example:
        >>> middle({"w": torch.tensor([1.0, 2.0, 5.0, 8.0, 0.0])}, 2)["w"].tolist()
        [3.0, 5.0]
    """
    return {name: torch.lerp(leaf[:rows], leaf[rows : 2 * rows], 0.5) for name, leaf in a.items()}


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


@singledispatch
def condensed(
    a: Params, weights: float | Sequence[float]
) -> tuple[Params, float | Sequence[float]]:
    """Rows and weights with the same weighted sum: by default as they are."""
    return a, weights


def wide(dtype: torch.dtype) -> torch.dtype:
    """float32 or wider: small differences of what is stored in fewer bits would drown in
    rounding.
    """
    return torch.promote_types(dtype, torch.float32)


def names_to_pack(parameters: Mapping[str, Tensor]) -> list[str]:
    """Parameters of 16 bits that are large, and whole in this process: those whose displacements
    and meta-gradients `metanudge.engines.packed` can hold.
    """
    return [
        n
        for n, p in parameters.items()
        if p.is_floating_point()
        and p.dtype.itemsize == 2
        and p.numel() >= LEAST_PACKED
        and not is_spread(p)
    ]
