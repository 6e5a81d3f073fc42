"""Max-pooling by 2 as arithmetic on phases: the entries that are first or second in their pairs along every axis.

Written with whole tensors, because on a CPU torch's own pooling with indices is several times slower than these few passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor


def phases(y: Tensor) -> list[Tensor]:
    """Views `(rows, examples, *pooled, channels)` of `(rows, examples, *spatial, channels)`, in the order in which torch scans a window.

    An odd last entry belongs to no window.
    """
    pooled = [size // 2 for size in y.shape[2:-1]]
    return [y[(slice(None), slice(None), *parity)] for parity in product(*([slice(i, 2 * n, 2) for i in (0, 1)] for n in pooled))]


def largest(of: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """The elementwise maximum."""
    if len(of) == 1:
        return of[0]
    half = len(of) // 2
    return torch.maximum(largest(of[:half]), largest(of[half:]), out=out)


def shares(g: Tensor, of: Sequence[Tensor]) -> list[Tensor]:
    """What each phase gets of the maximum's gradient: all of it or nothing. Of equals the first wins, as in torch. Overwrites `g`."""
    if len(of) == 1:
        return [g]
    half = len(of) // 2
    # A comparison written as numbers: a product with booleans converts them first, which takes twice as long.
    first = torch.ge(largest(of[:half]), largest(of[half:]), out=torch.empty_like(g)).mul_(g)
    g.sub_(first)
    return shares(first, of[:half]) + shares(g, of[half:])
