"""One step of gradient descent for all rows in one pass over memory, as a Triton kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit(do_not_specialize=["size", "tiles"])
def _step(
    d, g, pull, lam, squares, size, tiles, lr, pull_scale, PULL: tl.constexpr, BLOCK: tl.constexpr
):
    """d ← d − lr (g + λ d + pull), and the squared norm of what is in brackets, tile by tile."""
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    at = tile * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    place = row * size + at
    old = tl.load(d + place, mask=inside, other=0.0)
    total = tl.load(g + place, mask=inside, other=0.0) + tl.load(lam) * old
    if PULL:
        total += pull_scale * tl.load(pull + place, mask=inside, other=0.0)
    tl.store(d + place, old - lr * total, mask=inside)
    tl.store(squares + row * tiles + tile, tl.sum(total * total, 0))


def step(
    d: Tensor, g: Tensor, lam: Tensor, pull: Tensor | None, pull_scale: float, lr: float
) -> Tensor:
    """d ← d − lr (g + λ d + pull_scale · pull) in place; the norm of what is in brackets for each
    row.
    """
    rows, size = d.shape
    tiles = triton.cdiv(size, _BLOCK)
    squares = torch.empty(rows, tiles, dtype=torch.float32, device=d.device)
    _step[(tiles, rows)](
        d, g, g if pull is None else pull, lam, squares, size, tiles, lr, pull_scale,
        PULL=pull is not None, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    return squares.sum(1).sqrt()
