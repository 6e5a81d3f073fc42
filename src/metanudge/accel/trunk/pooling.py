"""Max-pooling by 2 as arithmetic on phases: the entries that are first or second in their pairs
along every axis.

Written with whole tensors, because on a CPU torch's own pooling with indices is several times
slower than these few passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product

import torch
from torch import Tensor

FEW = 16  # channels


def phases(y: Tensor) -> list[Tensor]:
    """Views `(rows, examples, *pooled, channels)` of `(rows, examples, *spatial, channels)`, in the
    order in which torch scans a window.

    An odd last entry belongs to no window.
    """
    found = [y]
    for axis in range(2, y.ndim - 1):
        found = [half for part in found for half in _halves(part, axis)]
    return found


def _halves(y: Tensor, axis: int) -> Sequence[Tensor]:
    """The even and the odd entries along an axis."""
    size = y.shape[axis] // 2
    even = y if y.shape[axis] == 2 * size else y.narrow(axis, 0, 2 * size)
    return even.view(*y.shape[:axis], size, 2, *y.shape[axis + 1 :]).unbind(axis + 1)


@cache
def parities(pooled: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """Indices of the phases of a tensor `(rows, examples, *spatial, ...)`."""
    return [
        (slice(None), slice(None), *parity)
        for parity in product(*([slice(i, 2 * n, 2) for i in (0, 1)] for n in pooled))
    ]


def products(a: Tensor, b: Tensor) -> Tensor:
    """Σ a b of every channel, `(rows, 1, channels)`, for `(rows, entries, channels)`."""
    if a.shape[-1] <= FEW:
        # channels by channels, but one pass over memory
        return torch.bmm(a.transpose(1, 2), b).diagonal(dim1=1, dim2=2).unsqueeze(1)
    return (a * b).sum(1, keepdim=True)


def largest(of: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """The elementwise maximum."""
    if len(of) == 1:
        return of[0]
    half = len(of) // 2
    return torch.maximum(largest(of[:half]), largest(of[half:]), out=out)


def share(g: Tensor, of: Sequence[Tensor]) -> None:
    """Overwrite each phase with what it gets of the maximum's gradient: all or nothing. Of equals
    the first wins, as in torch.
    """
    half = len(of) // 2
    first, second = of if half == 1 else (torch.empty_like(g), torch.empty_like(g))
    # A comparison written as numbers: a product with booleans converts them first, which takes
    # twice as long.
    torch.ge(largest(of[:half]), largest(of[half:]), out=first).mul_(g)
    torch.sub(g, first, out=second)
    if half > 1:
        share(first, of[:half])
        share(second, of[half:])


def add_share(g: Tensor, of: Sequence[Tensor], to: Sequence[Tensor]) -> None:
    """Add to each phase what it gets of the maximum's gradient. Overwrites `g`."""
    half = len(of) // 2
    first = torch.ge(largest(of[:half]), largest(of[half:]), out=torch.empty_like(g)).mul_(g)
    g.sub_(first)
    for part, begin in ((first, 0), (g, half)):
        if half == 1:
            to[begin].add_(part)
        else:
            add_share(part, of[begin : begin + half], to[begin : begin + half])
