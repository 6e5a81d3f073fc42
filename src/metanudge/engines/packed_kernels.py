"""What `packed` does, in one pass over memory each, as Triton kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _open(high, low, at, inside):
    upper = tl.load(high + at, mask=inside, other=0).to(tl.int32)
    third = tl.load(low + at, mask=inside, other=0).to(tl.int32)
    return ((upper << 16) | (third << 8)).to(tl.float32, bitcast=True)


@triton.jit
def _close(high, low, at, inside, values):
    bits = values.to(tl.int32, bitcast=True)
    bits = bits + 0x7F + ((bits >> 8) & 1)  # ties to even
    bits = tl.where(values == values, bits, 0x7FC00000)
    tl.store(high + at, (bits >> 16).to(tl.int16), mask=inside)
    tl.store(low + at, ((bits >> 8) & 0xFF).to(tl.uint8), mask=inside)


@triton.jit
def _factor(values, at, inside, WHOLE: tl.constexpr):
    if WHOLE:  # one return: Triton takes both branches' types together
        factor = tl.load(values + at, mask=inside, other=0.0).to(tl.float32)
    else:
        factor = tl.load(values).to(tl.float32)
    return factor


@triton.jit(do_not_specialize=["lr"])
def _descend(
    high, low, g, lam, seen, sums, size, lr,
    FORCE: tl.constexpr, WHOLE: tl.constexpr, KEEP: tl.constexpr, AFTER: tl.constexpr,
    SEEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    at = tile.to(tl.int64) * BLOCK + lane
    inside = at < size
    old = _open(high, low, at, inside)
    step = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
    if FORCE:
        step += _factor(lam, at, inside, WHOLE) * old
    tl.store(sums + tile, tl.sum(step * step, 0))
    if KEEP or AFTER:
        # other columns in every tile
        chosen = tl.where((lane + tile * 61) % (BLOCK // SEEN) == 0, step, 0.0)
        now = tl.sum(tl.reshape(chosen, (SEEN, BLOCK // SEEN)), 1)
        places = seen + tile * SEEN + tl.arange(0, SEEN)
        if KEEP:
            tl.store(places, now)
        else:
            before, tiles = tl.load(places), tl.num_programs(0)
            tl.store(sums + tiles + tile, tl.sum(before * now, 0))
            tl.store(sums + 2 * tiles + tile, tl.sum(before * before, 0))
            tl.store(sums + 3 * tiles + tile, tl.sum(now * now, 0))
    _close(high, low, at, inside, old - lr * step)


@triton.jit
def _place(high, low, theta, phi, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    centre = tl.load(theta + at, mask=inside, other=0.0).to(tl.float32)
    moved = centre + _open(high, low, at, inside)
    tl.store(phi + at, moved.to(phi.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["weight"])
def _add(
    high, low, row, row_low, scale, size, weight,
    PACKED: tl.constexpr, SCALED: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    if PACKED:
        more = _open(row, row_low, at, inside)
    else:
        more = tl.load(row + at, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        more *= _factor(scale, at, inside, WHOLE)
    _close(high, low, at, inside, _open(high, low, at, inside) + weight * more)


def descend(
    d: Any, g: Tensor, lr: float, lam: Tensor | None, seen: Tensor | None, kept: Tensor | None,
    sums: Tensor, *, tile: int,
) -> None:  # fmt: skip
    """See `metanudge.engines.packed`, which makes room for what is found: sums of each tile, and
    a sample where it is to be kept.
    """
    tiles = sums.shape[1]
    sample = next((found for found in (kept, seen) if found is not None), sums)
    _descend[(tiles,)](
        d.high, d.low, g, g if lam is None else lam, sample, sums, d.high.numel(), lr,
        FORCE=lam is not None, WHOLE=_whole(lam), KEEP=kept is not None, AFTER=seen is not None,
        SEEN=1 if sample is sums else sample.numel() // tiles, BLOCK=tile, num_warps=8,
    )  # fmt: skip


def place(d: Any, theta: Tensor, phi: Tensor) -> None:
    """See `metanudge.engines.packed`."""
    size = d.high.numel()
    _place[(triton.cdiv(size, _BLOCK),)](d.high, d.low, theta, phi, size, BLOCK=_BLOCK, num_warps=8)


def add(m: Any, rows: Any, weight: float, scale: Tensor | None) -> None:
    """See `metanudge.engines.packed`."""
    size = m.high.numel()
    row, low = (rows, rows) if isinstance(rows, Tensor) else (rows.high, rows.low)
    _add[(triton.cdiv(size, _BLOCK),)](
        m.high, m.low, row, low, row if scale is None else scale, size, weight,
        PACKED=not isinstance(rows, Tensor), SCALED=scale is not None, WHOLE=_whole(scale),
        BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip


def try_out(kind: Any) -> None:
    """Raise where one of them does not do what it should."""
    g = torch.linspace(-1, 1, 5000, device="cuda")
    d, m, lam, phi = kind.of(g), kind.of(g), torch.full_like(g, 3.0), torch.empty_like(g).bfloat16()
    first, again, kept = torch.empty_like(g[:2])[None], g.new_empty(4, 2), g.new_empty(128)
    descend(d, g.bfloat16(), 0.5, lam[0], None, kept, first, tile=_BLOCK)
    descend(d, g.bfloat16(), 0.5, None, kept, None, again, tile=_BLOCK)
    place(d, torch.ones_like(phi), phi)
    add(m, d, 0.5, lam)
    add(m, g, -2.0, None)
    torch.testing.assert_close(first.sum(), 16 * g.square().sum(), rtol=0.02, atol=0)
    along = again.sum(1)[1] / (again.sum(1)[2] * again.sum(1)[3]).sqrt()
    torch.testing.assert_close(along, torch.ones_like(along), rtol=1e-3, atol=0)
    torch.testing.assert_close(phi, (1 - 1.5 * g).bfloat16(), rtol=0.02, atol=0.02)
    torch.testing.assert_close(m.open(), -3.25 * g, rtol=0.02, atol=0.02)


def _whole(factor: Tensor | None) -> bool:
    """Whether there is a factor for each entry."""
    return factor is not None and factor.ndim > 0


KERNELS = SimpleNamespace(descend=descend, place=place, add=add, try_out=try_out)
