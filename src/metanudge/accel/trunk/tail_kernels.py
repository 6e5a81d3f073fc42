"""Triton kernels for BatchNorm, ReLU and max-pooling by 2 with second derivatives.

Activations lie as `(examples, height, width, channels)`; see `tail` for the formulas. Sums are made
tile by tile as in `kernels`, whose kernels for values and first derivatives serve here too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from metanudge.accel.trunk.kernels import DROPPED, SIZES, place_of


@triton.jit(do_not_specialize=["pixels"])
def statistics(z, stats, pixels, CO: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Mean and sum of squared deviations of every tile of pixels, `(tiles, 2, CO)`."""
    tile = tl.program_id(0)
    co = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    kept = (m < pixels)[:, None] & (co < CO)[None, :]
    value = tl.load(z + m[:, None] * CO + co[None, :], mask=kept, other=0.0).to(tl.float32)
    mean = tl.sum(value, 0) / tl.minimum(pixels - tile * BLOCK_M, BLOCK_M).to(tl.float32)
    off = tl.where(kept, value - mean[None, :], 0.0)
    stats += tile * 2 * CO
    tl.store(stats + co, mean, mask=co < CO)
    tl.store(stats + CO + co, tl.sum(off * off, 0), mask=co < CO)


@triton.jit
def _entries(
    z, coefficients, pick, dy, h, m, co, pixels, height, width, out_height, out_width,
    CO: tl.constexpr,
):  # fmt: skip
    """Of pixels and channels: x̂, h, and g, which is dy at the chosen entries and zero elsewhere;
    which are chosen, which exist, and which write to their pooled entry; where both lie.
    """
    kept = (m < pixels)[:, None] & (co < CO)[None, :]
    example, i, j = place_of(m, height, width)
    inside = (i // 2 < out_height) & (j // 2 < out_width)
    seen = kept & inside[:, None]
    place = ((example * out_height + i // 2) * out_width + j // 2)[:, None] * CO + co[None, :]
    which = tl.load(pick + place, mask=seen, other=255).to(tl.int32)
    member = (i % 2 * 2 + j % 2)[:, None]
    chosen = seen & (which == member)
    g = tl.load(dy + place, mask=chosen, other=0.0).to(tl.float32)
    at = m[:, None] * CO + co[None, :]
    along = tl.load(h + at, mask=kept, other=0.0).to(tl.float32)
    mean = tl.load(coefficients + co, mask=co < CO, other=0.0)[None, :]
    inverse = tl.load(coefficients + CO + co, mask=co < CO, other=0.0)[None, :]
    x = (tl.load(z + at, mask=kept, other=0.0).to(tl.float32) - mean) * inverse
    # somebody has to write the zero of what was dropped
    written = chosen | (seen & (which == DROPPED) & (member == 0))
    return x, along, g, chosen, kept, written, at, place


@triton.jit(do_not_specialize=["pixels", *SIZES])
def sums_twice(
    z, coefficients, pick, dy, h, sums, pixels, height, width, out_height, out_width,
    CO: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Σ h, Σ h·x̂ and Σ h·g over a tile of pixels, `(tiles, 3, CO)`, where g is dy at the chosen
    entries and zero elsewhere.
    """
    tile = tl.program_id(0)
    co = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    x, along, g, _, _, _, _, _ = _entries(
        z, coefficients, pick, dy, h, m, co, pixels, height, width, out_height, out_width, CO
    )
    sums += tile * 3 * CO
    tl.store(sums + co, tl.sum(along, 0), mask=co < CO)
    tl.store(sums + CO + co, tl.sum(along * x, 0), mask=co < CO)
    tl.store(sums + 2 * CO + co, tl.sum(along * g, 0), mask=co < CO)


@triton.jit(do_not_specialize=["pixels", "tiles"])
def factors_twice(
    sums, coefficients, first, along_gamma, along_beta, factors, dgamma, pixels, tiles,
    CO: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The tiles' sums to the gradient of the scale and the factors `(7, CO)` of `spread_twice`;
    `first` holds Σ g and Σ g·x̂.
    """
    co = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    known = co < CO
    total_h = tl.zeros((BLOCK_N,), dtype=tl.float32)
    total_hx = tl.zeros((BLOCK_N,), dtype=tl.float32)
    total_hg = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for begin in range(0, tiles, BLOCK_T):
        t = begin + tl.arange(0, BLOCK_T)
        there = (t < tiles)[:, None] & known[None, :]
        at = sums + t[:, None] * 3 * CO + co[None, :]
        total_h += tl.sum(tl.load(at, mask=there, other=0.0), 0)
        total_hx += tl.sum(tl.load(at + CO, mask=there, other=0.0), 0)
        total_hg += tl.sum(tl.load(at + 2 * CO, mask=there, other=0.0), 0)
    h = total_h / pixels
    hx = total_hx / pixels
    hg = total_hg / pixels
    g = tl.load(first + co, mask=known, other=0.0) / pixels
    gx = tl.load(first + CO + co, mask=known, other=0.0) / pixels
    inverse = tl.load(coefficients + CO + co, mask=known, other=0.0)
    scale = tl.load(coefficients + 2 * CO + co, mask=known, other=0.0)
    a_gamma = tl.load(along_gamma + co, mask=known, other=0.0).to(tl.float32)
    a_beta = tl.load(along_beta + co, mask=known, other=0.0).to(tl.float32)
    bend = scale * inverse
    slope = a_gamma * inverse
    tl.store(dgamma + co, inverse * pixels * (hg - g * h - gx * hx), mask=known)
    tl.store(factors + co, slope - bend * hx, mask=known)
    tl.store(factors + CO + co, -bend * gx, mask=known)
    tl.store(factors + 2 * CO + co, -bend * (hg - g * h - 3.0 * gx * hx) - slope * gx, mask=known)
    tl.store(factors + 3 * CO + co, bend * (hx * g + gx * h) - slope * g, mask=known)
    tl.store(factors + 4 * CO + co, scale, mask=known)
    tl.store(factors + 5 * CO + co, a_gamma - scale * hx, mask=known)
    tl.store(factors + 6 * CO + co, a_beta - scale * h, mask=known)


@triton.jit(do_not_specialize=["pixels", *SIZES])
def spread_twice(
    z, coefficients, pick, dy, h, factors, dz, ddy, pixels, height, width, out_height, out_width,
    CO: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Gradients before the normalisation, a·g + b·h + c·x̂ + e, and of dy, s·h + t·x̂ + w at the
    chosen entries.
    """
    co = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    known = co < CO
    x, along, g, chosen, kept, written, at, place = _entries(
        z, coefficients, pick, dy, h, m, co, pixels, height, width, out_height, out_width, CO
    )
    a = tl.load(factors + co, mask=known, other=0.0)[None, :]
    b = tl.load(factors + CO + co, mask=known, other=0.0)[None, :]
    c = tl.load(factors + 2 * CO + co, mask=known, other=0.0)[None, :]
    e = tl.load(factors + 3 * CO + co, mask=known, other=0.0)[None, :]
    tl.store(dz + at, (a * g + b * along + c * x + e).to(dz.dtype.element_ty), mask=kept)
    s = tl.load(factors + 4 * CO + co, mask=known, other=0.0)[None, :]
    t = tl.load(factors + 5 * CO + co, mask=known, other=0.0)[None, :]
    w = tl.load(factors + 6 * CO + co, mask=known, other=0.0)[None, :]
    value = tl.where(chosen, s * along + t * x + w, 0.0)
    tl.store(ddy + place, value.to(ddy.dtype.element_ty), mask=written)
