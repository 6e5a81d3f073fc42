"""Triton kernels for blocks of convolution, BatchNorm, ReLU and max-pooling with one set of weights
per row.

Activations lie as `(rows, examples, height, width, channels)`. Every sum over examples is made tile
by tile and then over the tiles in a fixed order, so a result does not depend on which tile came
first.
"""

from __future__ import annotations

import triton
import triton.language as tl

DROPPED = tl.constexpr(255)  # a pooled entry that the ReLU set to zero
SIZES = ("height", "width", "out_height", "out_width")
"""Arguments of kernels that are not compiled anew for other values."""


def width(channels: int) -> int:
    """How many channels one program takes."""
    return min(64, max(16, triton.next_power_of_2(channels)))


@triton.jit
def place_of(p, height, width):
    """Example, row and column of an entry."""
    return p // (height * width), p // width % height, p % width


@triton.jit
def within(y, x, height, width):
    """Whether a pixel is one of the image, and not beyond its border."""
    return (y >= 0) & (y < height) & (x >= 0) & (x < width)


@triton.jit(do_not_specialize=["row_stride"])
def pack_weights(
    weight, packed, row_stride, co_stride, ci_stride, tap_stride,
    CO: tl.constexpr, CI: tl.constexpr, TAPS: tl.constexpr, BLOCK_CO: tl.constexpr,
    BLOCK_CI: tl.constexpr,
):  # fmt: skip
    """Weights that lie in any order as `(rows, taps, co, ci)`."""
    tap = tl.program_id(0) % TAPS
    row = tl.program_id(1).to(tl.int64)
    co = tl.program_id(0) // TAPS * BLOCK_CO + tl.arange(0, BLOCK_CO)
    ci = tl.program_id(2) * BLOCK_CI + tl.arange(0, BLOCK_CI)
    known = (co < CO)[:, None] & (ci < CI)[None, :]
    source = (
        weight
        + row * row_stride
        + tap * tap_stride
        + co[:, None] * co_stride
        + ci[None, :] * ci_stride
    )
    value = tl.load(source, mask=known, other=0.0)
    tl.store(
        packed + (row * TAPS + tap) * (CO * CI) + co[:, None] * CI + ci[None, :],
        value.to(packed.dtype.element_ty),
        mask=known,
    )


@triton.jit(do_not_specialize=["x_rows", "pixels", *SIZES, "tiles"])
def convolve(
    x, weight, out, stats,
    x_rows, pixels, height, width, out_height, out_width, tiles,
    CI: tl.constexpr, CO: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    BACK: tl.constexpr, STATS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A convolution as a matrix product over shifted pixels.

    `weight` is `(rows, taps, CO, CI)`. With `STATS`, mean and sum of squared deviations of every
    tile go to `(rows, tiles, 2, CO)`. With `BACK` it is the derivative in the input instead: the
    taps run backwards, `weight` is `(rows, taps, CI, CO)`, and `stats` holds each row's factor to
    divide by.
    """
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    co = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = m < pixels
    example, i, j = place_of(m, out_height, out_width)
    k = tl.arange(0, BLOCK_K)
    x += (row % x_rows) * (pixels // (out_height * out_width)) * height * width * CI
    weight += row * (KH * KW * CI * CO)
    out += row * pixels * CO
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for tap in range(KH * KW):
        y = i + tap // KW - PAD_H
        z = j + tap % KW - PAD_W
        ok = inside & (y >= 0) & (y < height) & (z >= 0) & (z < width)
        source = x + ((example * height + y) * width + z)[:, None] * CI
        for begin in range(0, CI, BLOCK_K):
            ci = begin + k
            a = tl.load(source + ci[None, :], mask=ok[:, None] & (ci < CI)[None, :], other=0.0)
            known = (ci < CI)[:, None] & (co < CO)[None, :]
            if BACK:
                at = weight + (KH * KW - 1 - tap) * (CI * CO) + ci[:, None] * CO + co[None, :]
            else:
                at = weight + tap * (CI * CO) + co[None, :] * CI + ci[:, None]
            b = tl.load(at, mask=known, other=0.0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
    if BACK:
        total = total / tl.load(stats + row)
    kept = inside[:, None] & (co < CO)[None, :]
    tl.store(out + m[:, None] * CO + co[None, :], total.to(out.dtype.element_ty), mask=kept)
    if STATS:
        count = tl.minimum(pixels - tile * BLOCK_M, BLOCK_M).to(tl.float32)
        mean = tl.sum(tl.where(kept, total, 0.0), 0) / count
        off = tl.where(kept, total - mean[None, :], 0.0)
        stats += (row * tiles + tile) * 2 * CO
        tl.store(stats + co, mean, mask=co < CO)
        tl.store(stats + CO + co, tl.sum(off * off, 0), mask=co < CO)


@triton.jit(do_not_specialize=["pixels", "tiles", "gamma_stride", "beta_stride"])
def normalisation(
    stats, gamma, beta, coefficients, pixels, tiles, gamma_stride, beta_stride, eps,
    CO: tl.constexpr, TILE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Tiles' statistics to `(rows, 4, CO)`: mean, 1/deviation, scale and shift of the
    normalisation.
    """
    row = tl.program_id(0).to(tl.int64)
    co = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    known = co < CO
    stats += row * tiles * 2 * CO
    mean = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for begin in range(0, tiles, BLOCK_T):
        t = begin + tl.arange(0, BLOCK_T)
        count = tl.maximum(tl.minimum(pixels - t * TILE, TILE), 0).to(tl.float32)
        part = tl.load(
            stats + t[:, None] * 2 * CO + co[None, :],
            mask=(t < tiles)[:, None] & known[None, :],
            other=0.0,
        )
        mean += tl.sum(part * count[:, None], 0)
    mean = mean / pixels
    squares = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for begin in range(0, tiles, BLOCK_T):
        t = begin + tl.arange(0, BLOCK_T)
        count = tl.maximum(tl.minimum(pixels - t * TILE, TILE), 0).to(tl.float32)
        there = (t < tiles)[:, None] & known[None, :]
        part = (
            tl.load(stats + t[:, None] * 2 * CO + co[None, :], mask=there, other=0.0)
            - mean[None, :]
        )
        spread = tl.load(stats + t[:, None] * 2 * CO + CO + co[None, :], mask=there, other=0.0)
        squares += tl.sum(tl.where(there, spread + part * part * count[:, None], 0.0), 0)
    inverse = 1.0 / tl.sqrt(squares / pixels + eps)
    scale = tl.load(gamma + row * gamma_stride + co, mask=known, other=0.0) * inverse
    shift = tl.load(beta + row * beta_stride + co, mask=known, other=0.0) - mean * scale
    coefficients += row * 4 * CO
    tl.store(coefficients + co, mean, mask=known)
    tl.store(coefficients + CO + co, inverse, mask=known)
    tl.store(coefficients + 2 * CO + co, scale, mask=known)
    tl.store(coefficients + 3 * CO + co, shift, mask=known)


@triton.jit(do_not_specialize=["pooled", *SIZES])
def normalise_and_pool(
    z, coefficients, out, pick, pooled, height, width, out_height, out_width,
    CO: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Normalise, ReLU, the largest of each window, and which one it was (the first of equals)."""
    row = tl.program_id(1).to(tl.int64)
    co = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    kept = (p < pooled)[:, None] & (co < CO)[None, :]
    example, i, j = place_of(p, out_height, out_width)
    z += row * (pooled // (out_height * out_width)) * height * width * CO
    coefficients += row * 4 * CO
    scale = tl.load(coefficients + 2 * CO + co, mask=co < CO, other=0.0)[None, :]
    shift = tl.load(coefficients + 3 * CO + co, mask=co < CO, other=0.0)[None, :]
    corner = z + ((example * height + i * PH) * width + j * PW)[:, None] * CO + co[None, :]
    best = tl.load(corner, mask=kept, other=0.0).to(tl.float32) * scale + shift
    which = tl.zeros((BLOCK_P, BLOCK_N), dtype=tl.int32)
    for n in tl.static_range(1, PH * PW):
        value = (
            tl.load(corner + (n // PW * width + n % PW) * CO, mask=kept, other=0.0).to(tl.float32)
            * scale
            + shift
        )
        which = tl.where(value > best, n, which)
        best = tl.where(value > best, value, best)
    which = tl.where(best <= 0, DROPPED, which)
    best = tl.where(best <= 0, 0.0, best)  # NaN stays NaN
    place = row * pooled * CO + p[:, None] * CO + co[None, :]
    tl.store(out + place, best.to(out.dtype.element_ty), mask=kept)
    tl.store(pick + place, which.to(tl.uint8), mask=kept)


@triton.jit(do_not_specialize=["pooled", *SIZES, "tiles"])
def sums_backward(
    z, coefficients, pick, dy, sums, pooled, height, width, out_height, out_width, tiles,
    CO: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Σ dy, Σ dy·x̂ and max |dy| over a tile of pooled entries, `(rows, tiles, 3, CO)`."""
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    co = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    p = tile * BLOCK_P + tl.arange(0, BLOCK_P)
    kept = (p < pooled)[:, None] & (co < CO)[None, :]
    example, i, j = place_of(p, out_height, out_width)
    z += row * (pooled // (out_height * out_width)) * height * width * CO
    place = row * pooled * CO + p[:, None] * CO + co[None, :]
    which = tl.load(pick + place, mask=kept, other=255).to(tl.int32)
    alive = kept & (which != DROPPED)
    g = tl.load(dy + place, mask=alive, other=0.0).to(tl.float32)
    step = which // PW * width + which % PW
    chosen = tl.load(
        z + (((example * height + i * PH) * width + j * PW)[:, None] + step) * CO + co[None, :],
        mask=alive,
        other=0.0,
    ).to(tl.float32)
    coefficients += row * 4 * CO
    mean = tl.load(coefficients + co, mask=co < CO, other=0.0)[None, :]
    inverse = tl.load(coefficients + CO + co, mask=co < CO, other=0.0)[None, :]
    sums += (row * tiles + tile) * 3 * CO
    tl.store(sums + co, tl.sum(g, 0), mask=co < CO)
    tl.store(sums + CO + co, tl.sum(g * (chosen - mean) * inverse, 0), mask=co < CO)
    tl.store(sums + 2 * CO + co, tl.max(tl.abs(g), 0), mask=co < CO)


@triton.jit(do_not_specialize=["tiles", "gamma_stride", "beta_stride", "bias_stride"])
def normalisation_backward(
    sums, coefficients, dgamma, dbeta, dbias, factor, tiles, gamma_stride, beta_stride, bias_stride,
    CO: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The tiles' sums to the gradients of scale and shift, and a factor for each row; a bias before
    the normalisation has none.

    With `SCALED` the factor is the power of two that brings the row's largest gradient to about 2⁹:
    in float16 it then has the precision of TF32.
    """
    row = tl.program_id(0).to(tl.int64)
    sums += row * tiles * 3 * CO
    largest = 0.0
    for block in range(0, CO, BLOCK_N):
        co = block + tl.arange(0, BLOCK_N)
        first = tl.zeros((BLOCK_N,), dtype=tl.float32)
        second = tl.zeros((BLOCK_N,), dtype=tl.float32)
        third = tl.zeros((BLOCK_N,), dtype=tl.float32)
        for begin in range(0, tiles, BLOCK_T):
            t = begin + tl.arange(0, BLOCK_T)
            there = (t < tiles)[:, None] & (co < CO)[None, :]
            at = sums + t[:, None] * 3 * CO + co[None, :]
            first += tl.sum(tl.load(at, mask=there, other=0.0), 0)
            second += tl.sum(tl.load(at + CO, mask=there, other=0.0), 0)
            third = tl.maximum(third, tl.max(tl.load(at + 2 * CO, mask=there, other=0.0), 0))
        scale = tl.load(coefficients + (row * 4 + 2) * CO + co, mask=co < CO, other=0.0)
        largest = tl.maximum(largest, tl.max(third * tl.abs(scale), 0))
        tl.store(dbeta + row * beta_stride + co, first, mask=co < CO)
        tl.store(dgamma + row * gamma_stride + co, second, mask=co < CO)
        if BIAS:
            tl.store(
                dbias + row * bias_stride + co, tl.zeros((BLOCK_N,), dtype=tl.float32), mask=co < CO
            )
    if SCALED:
        exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
        exponent = tl.minimum(tl.maximum(263 - exponent, 27), 227)
        tl.store(factor + row, (exponent << 23).to(tl.float32, bitcast=True))
    else:
        tl.store(factor + row, 1.0)


@triton.jit(do_not_specialize=["gamma_stride", "beta_stride", "pixels", *SIZES])
def spread_backward(
    z, coefficients, pick, dy, dgamma, dbeta, factor, dz, gamma_stride, beta_stride, pixels,
    height, width, out_height, out_width,
    CO: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The gradient before the normalisation, times the row's factor: dy at the chosen entries, less
    what mean and deviation take back.
    """
    row = tl.program_id(1).to(tl.int64)
    co = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    kept = (m < pixels)[:, None] & (co < CO)[None, :]
    example, i, j = place_of(m, height, width)
    pooled = (i // PH < out_height) & (j // PW < out_width)
    p = (example * out_height + i // PH) * out_width + j // PW
    examples = pixels // (height * width)
    place = row * (examples * out_height * out_width) * CO + p[:, None] * CO + co[None, :]
    seen = kept & pooled[:, None]
    which = tl.load(pick + place, mask=seen, other=255).to(tl.int32)
    alive = seen & (which == (i % PH * PW + j % PW)[:, None])
    g = tl.load(dy + place, mask=alive, other=0.0).to(tl.float32)
    coefficients += row * 4 * CO
    mean = tl.load(coefficients + co, mask=co < CO, other=0.0)[None, :]
    inverse = tl.load(coefficients + CO + co, mask=co < CO, other=0.0)[None, :]
    scale = tl.load(coefficients + 2 * CO + co, mask=co < CO, other=0.0)[None, :]
    first = tl.load(dbeta + row * beta_stride + co, mask=co < CO, other=0.0)[None, :] / pixels
    second = tl.load(dgamma + row * gamma_stride + co, mask=co < CO, other=0.0)[None, :] / pixels
    at = row * pixels * CO + m[:, None] * CO + co[None, :]
    x = (tl.load(z + at, mask=kept, other=0.0).to(tl.float32) - mean) * inverse
    value = scale * (g - first - x * second) * tl.load(factor + row)
    tl.store(dz + at, value.to(dz.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["x_rows", "pixels", *SIZES, "share", "share_stride", "row_stride"])
def weight_backward(
    x, dz, factor, out, x_rows, pixels, height, width, out_height, out_width, share,
    share_stride, row_stride, co_stride, ci_stride, tap_stride,
    CI: tl.constexpr, CO: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_CI: tl.constexpr, BLOCK_CO: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Gradient of the weights for every share of the pixels, laid out as the strides say; each
    program takes one share and one tap.
    """
    tap = tl.program_id(0) % (KH * KW)
    part = tl.program_id(0) // (KH * KW)
    row = tl.program_id(1).to(tl.int64)
    BLOCKS: tl.constexpr = (CI + BLOCK_CI - 1) // BLOCK_CI
    ci = tl.program_id(2) % BLOCKS * BLOCK_CI + tl.arange(0, BLOCK_CI)
    co = tl.program_id(2) // BLOCKS * BLOCK_CO + tl.arange(0, BLOCK_CO)
    k = tl.arange(0, BLOCK_K)
    x += (row % x_rows) * (pixels // (out_height * out_width)) * height * width * CI
    dz += row * pixels * CO
    total = tl.zeros((BLOCK_CI, BLOCK_CO), dtype=tl.float32)
    end = tl.minimum((part + 1) * share, pixels)
    for begin in range(part * share, end, BLOCK_K):
        m = begin + k
        inside = m < end
        example, i, j = place_of(m, out_height, out_width)
        y = i + tap // KW - PAD_H
        w = j + tap % KW - PAD_W
        ok = inside & within(y, w, height, width)
        source = (example * height + y) * width + w
        a = tl.load(
            x + source[None, :] * CI + ci[:, None], mask=ok[None, :] & (ci < CI)[:, None], other=0.0
        )
        b = tl.load(
            dz + m[:, None] * CO + co[None, :], mask=inside[:, None] & (co < CO)[None, :], other=0.0
        )
        total = tl.dot(a, b, total, input_precision=PRECISION)
    place = (
        out
        + part * share_stride
        + row * row_stride
        + tap * tap_stride
        + co[None, :] * co_stride
        + ci[:, None] * ci_stride
    )
    tl.store(place, total / tl.load(factor + row), mask=(ci < CI)[:, None] & (co < CO)[None, :])
