"""Triton kernels for blocks of convolution, BatchNorm, ReLU and max-pooling with one set of weights per row.

Activations lie as `(rows, examples, height, width, channels)`. Every sum over examples is made tile by tile and then over the tiles in a
fixed order, so a result does not depend on which tile came first.
"""

from __future__ import annotations

import triton
import triton.language as tl

DROPPED = tl.constexpr(255)  # a pooled entry that the ReLU set to zero


@triton.jit(do_not_specialize=["row_stride"])
def pack_weights(
    weight, packed, row_stride, co_stride, ci_stride, tap_stride,
    CO: tl.constexpr, CI: tl.constexpr, TAPS: tl.constexpr, BLOCK_CO: tl.constexpr, BLOCK_CI: tl.constexpr,
):  # fmt: skip
    """Weights that lie in any order as `(rows, taps, co, ci)`."""
    tap = tl.program_id(0) % TAPS
    row = tl.program_id(1).to(tl.int64)
    co = tl.program_id(0) // TAPS * BLOCK_CO + tl.arange(0, BLOCK_CO)
    ci = tl.program_id(2) * BLOCK_CI + tl.arange(0, BLOCK_CI)
    known = (co < CO)[:, None] & (ci < CI)[None, :]
    source = weight + row * row_stride + tap * tap_stride + co[:, None] * co_stride + ci[None, :] * ci_stride
    value = tl.load(source, mask=known, other=0.0)
    tl.store(packed + (row * TAPS + tap) * (CO * CI) + co[:, None] * CI + ci[None, :], value.to(packed.dtype.element_ty), mask=known)


@triton.jit(do_not_specialize=["x_rows", "pixels", "height", "width", "out_height", "out_width", "tiles"])
def convolve(
    x, weight, out, stats,
    x_rows, pixels, height, width, out_height, out_width, tiles,
    CI: tl.constexpr, CO: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    BACK: tl.constexpr, STATS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A convolution as a matrix product over shifted pixels.

    `weight` is `(rows, taps, CO, CI)`. With `STATS`, mean and sum of squared deviations of every tile go to `(rows, tiles, 2, CO)`.
    With `BACK` it is the derivative in the input instead: the taps run backwards, `weight` is `(rows, taps, CI, CO)`, and `stats` holds
    each row's factor to divide by.
    """
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    co = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = m < pixels
    example = m // (out_height * out_width)
    i = m // out_width % out_height
    j = m % out_width
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
                b = tl.load(weight + (KH * KW - 1 - tap) * (CI * CO) + ci[:, None] * CO + co[None, :], mask=known, other=0.0)
            else:
                b = tl.load(weight + tap * (CI * CO) + co[None, :] * CI + ci[:, None], mask=known, other=0.0)
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
    """Tiles' statistics to `(rows, 4, CO)`: mean, 1/deviation, scale and shift of the normalisation."""
    row = tl.program_id(0).to(tl.int64)
    co = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    known = co < CO
    stats += row * tiles * 2 * CO
    mean = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for begin in range(0, tiles, BLOCK_T):
        t = begin + tl.arange(0, BLOCK_T)
        count = tl.maximum(tl.minimum(pixels - t * TILE, TILE), 0).to(tl.float32)
        part = tl.load(stats + t[:, None] * 2 * CO + co[None, :], mask=(t < tiles)[:, None] & known[None, :], other=0.0)
        mean += tl.sum(part * count[:, None], 0)
    mean = mean / pixels
    squares = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for begin in range(0, tiles, BLOCK_T):
        t = begin + tl.arange(0, BLOCK_T)
        count = tl.maximum(tl.minimum(pixels - t * TILE, TILE), 0).to(tl.float32)
        there = (t < tiles)[:, None] & known[None, :]
        part = tl.load(stats + t[:, None] * 2 * CO + co[None, :], mask=there, other=0.0) - mean[None, :]
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


@triton.jit(do_not_specialize=["pooled", "height", "width", "out_height", "out_width"])
def normalise_and_pool(
    z, coefficients, out, pick, pooled, height, width, out_height, out_width,
    CO: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Normalise, ReLU, the largest of each window, and which one it was (the first of equals)."""
    row = tl.program_id(1).to(tl.int64)
    co = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    kept = (p < pooled)[:, None] & (co < CO)[None, :]
    example = p // (out_height * out_width)
    i = p // out_width % out_height * PH
    j = p % out_width * PW
    z += row * (pooled // (out_height * out_width)) * height * width * CO
    coefficients += row * 4 * CO
    scale = tl.load(coefficients + 2 * CO + co, mask=co < CO, other=0.0)[None, :]
    shift = tl.load(coefficients + 3 * CO + co, mask=co < CO, other=0.0)[None, :]
    corner = z + ((example * height + i) * width + j)[:, None] * CO + co[None, :]
    best = tl.load(corner, mask=kept, other=0.0).to(tl.float32) * scale + shift
    which = tl.zeros((BLOCK_P, BLOCK_N), dtype=tl.int32)
    for n in tl.static_range(1, PH * PW):
        value = tl.load(corner + (n // PW * width + n % PW) * CO, mask=kept, other=0.0).to(tl.float32) * scale + shift
        which = tl.where(value > best, n, which)
        best = tl.where(value > best, value, best)
    which = tl.where(best <= 0, DROPPED, which)
    best = tl.where(best <= 0, 0.0, best)  # NaN stays NaN
    place = row * pooled * CO + p[:, None] * CO + co[None, :]
    tl.store(out + place, best.to(out.dtype.element_ty), mask=kept)
    tl.store(pick + place, which.to(tl.uint8), mask=kept)


@triton.jit(do_not_specialize=["pooled", "height", "width", "out_height", "out_width", "tiles"])
def sums_backward(
    z, coefficients, pick, dy, sums, pooled, height, width, out_height, out_width, tiles,
    CO: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Σ dy, Σ dy·x̂ and max |dy| over a tile of pooled entries, `(rows, tiles, 3, CO)`."""
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    co = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    p = tile * BLOCK_P + tl.arange(0, BLOCK_P)
    kept = (p < pooled)[:, None] & (co < CO)[None, :]
    example = p // (out_height * out_width)
    i = p // out_width % out_height * PH
    j = p % out_width * PW
    z += row * (pooled // (out_height * out_width)) * height * width * CO
    place = row * pooled * CO + p[:, None] * CO + co[None, :]
    which = tl.load(pick + place, mask=kept, other=255).to(tl.int32)
    alive = kept & (which != DROPPED)
    g = tl.load(dy + place, mask=alive, other=0.0).to(tl.float32)
    step = which // PW * width + which % PW
    chosen = tl.load(z + (((example * height + i) * width + j)[:, None] + step) * CO + co[None, :], mask=alive, other=0.0).to(tl.float32)
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
    CO: tl.constexpr, BIAS: tl.constexpr, SCALED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The tiles' sums to the gradients of scale and shift, and a factor for each row; a bias before the normalisation has none.

    With `SCALED` the factor is the power of two that brings the row's largest gradient to about 2⁹: in float16 it then has the precision
    of TF32.
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
            tl.store(dbias + row * bias_stride + co, tl.zeros((BLOCK_N,), dtype=tl.float32), mask=co < CO)
    if SCALED:
        exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
        exponent = tl.minimum(tl.maximum(263 - exponent, 27), 227)
        tl.store(factor + row, (exponent << 23).to(tl.float32, bitcast=True))
    else:
        tl.store(factor + row, 1.0)


@triton.jit(do_not_specialize=["gamma_stride", "beta_stride", "pixels", "height", "width", "out_height", "out_width"])
def spread_backward(
    z, coefficients, pick, dy, dgamma, dbeta, factor, dz, gamma_stride, beta_stride, pixels, height, width, out_height, out_width,
    CO: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The gradient before the normalisation, times the row's factor: dy at the chosen entries, less what mean and deviation take back."""
    row = tl.program_id(1).to(tl.int64)
    co = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    kept = (m < pixels)[:, None] & (co < CO)[None, :]
    example = m // (height * width)
    i = m // width % height
    j = m % width
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


@triton.jit(do_not_specialize=["x_rows", "pixels", "height", "width", "out_height", "out_width", "share", "share_stride", "row_stride"])
def weight_backward(
    x, dz, factor, out, x_rows, pixels, height, width, out_height, out_width, share,
    share_stride, row_stride, co_stride, ci_stride, tap_stride,
    CI: tl.constexpr, CO: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_CI: tl.constexpr, BLOCK_CO: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Gradient of the weights for every share of the pixels, laid out as the strides say; each program takes one share and one tap."""
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
        y = m // out_width % out_height + tap // KW - PAD_H
        w = m % out_width + tap % KW - PAD_W
        ok = inside & (y >= 0) & (y < height) & (w >= 0) & (w < width)
        source = (m // (out_height * out_width) * height + y) * width + w
        a = tl.load(x + source[None, :] * CI + ci[:, None], mask=ok[None, :] & (ci < CI)[:, None], other=0.0)
        b = tl.load(dz + m[:, None] * CO + co[None, :], mask=inside[:, None] & (co < CO)[None, :], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    place = out + part * share_stride + row * row_stride + tap * tap_stride + co[None, :] * co_stride + ci[:, None] * ci_stride
    tl.store(place, total / tl.load(factor + row), mask=(ci < CI)[:, None] & (co < CO)[None, :])


@triton.jit
def _rounded(x, ROUND: tl.constexpr):
    """Float32 rounded to what TF32 keeps: the tensor cores would cut the rest off."""
    if ROUND:
        x = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return x


@triton.jit
def _patch(f, KH: tl.constexpr, KW: tl.constexpr):
    """Place of a patch's entry: channel, row, column (entries are ordered like a convolution's weights)."""
    return f // (KH * KW), f // KW % KH, f % KW


@triton.jit(do_not_specialize=["pixels", "tiles", "share"])
def patch_moments(
    images, centre, moments, pixels, tiles, share,
    height: tl.constexpr, width: tl.constexpr, out_height: tl.constexpr, out_width: tl.constexpr,
    CI: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Σ p ⊗ (p, 1) over a share of the patches p of a first layer, less the task's centre, `(tasks, tiles, BLOCK_F, BLOCK_F)`."""
    FEATURES: tl.constexpr = CI * KH * KW
    tile = tl.program_id(0)
    task = tl.program_id(1).to(tl.int64)
    images += task * (pixels // (out_height * out_width)) * height * width * CI
    middle = tl.load(centre + task)
    f = tl.arange(0, BLOCK_F)
    channel, fy, fx = _patch(f, KH, KW)
    total = tl.zeros((BLOCK_F, BLOCK_F), dtype=tl.float32)
    end = tl.minimum((tile + 1) * share, pixels)
    for begin in range(tile * share, end, BLOCK_P):
        m = begin + tl.arange(0, BLOCK_P)
        y = (m // out_width % out_height - PAD_H)[None, :] + fy[:, None]
        x = (m % out_width - PAD_W)[None, :] + fx[:, None]
        real = (m < end)[None, :] & (f < FEATURES)[:, None]
        ok = real & (y >= 0) & (y < height) & (x >= 0) & (x < width)
        source = ((m // (out_height * out_width) * height)[None, :] + y) * width + x
        patch = tl.where(real, tl.load(images + source * CI + channel[:, None], mask=ok, other=0.0) - middle, 0.0)
        patch = tl.where((f == FEATURES)[:, None] & (m < end)[None, :], 1.0, patch)
        total = tl.dot(patch, tl.trans(patch), total, input_precision="tf32x3")
    moments += (task * tiles + tile) * (BLOCK_F * BLOCK_F)
    tl.store(moments + f[:, None] * BLOCK_F + f[None, :], total)


@triton.jit
def _first_normalisation(
    weight, gamma, beta, means, covariance, row, task, co, weight_stride, gamma_stride, beta_stride, eps,
    CO: tl.constexpr, FEATURES: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Statistics of a first layer's output from the moments of its input patches: mean w·m, variance wᵀCw."""
    f = tl.arange(0, BLOCK_F)
    known = (f < FEATURES)[:, None] & (co < CO)[None, :]
    w = tl.load(weight + row * weight_stride + co[None, :] * FEATURES + f[:, None], mask=known, other=0.0)
    m = tl.load(means + task * FEATURES + f, mask=f < FEATURES, other=0.0)
    square = (f < FEATURES)[:, None] & (f < FEATURES)[None, :]
    c = tl.load(covariance + task * (FEATURES * FEATURES) + f[:, None] * FEATURES + f[None, :], mask=square, other=0.0)
    cw = tl.dot(c, w, input_precision="ieee")
    mean = tl.sum(w * m[:, None], 0)
    inverse = 1.0 / tl.sqrt(tl.maximum(tl.sum(w * cw, 0), 0.0) + eps)
    scale = tl.load(gamma + row * gamma_stride + co, mask=co < CO, other=0.0) * inverse
    shift = tl.load(beta + row * beta_stride + co, mask=co < CO, other=0.0) - mean * scale
    return w, m, cw, mean, inverse, scale, shift


@triton.jit(do_not_specialize=["tasks", "weight_stride", "gamma_stride", "beta_stride"])
def first_normalisation(
    weight, gamma, beta, means, covariance, coefficients, tasks, weight_stride, gamma_stride, beta_stride, eps,
    CO: tl.constexpr, FEATURES: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Scale and shift of the first block's normalisation, `(rows, 2, CO)`."""
    row = tl.program_id(0).to(tl.int64)
    co = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    _, _, _, _, _, scale, shift = _first_normalisation(
        weight, gamma, beta, means, covariance, row, row % tasks, co, weight_stride, gamma_stride, beta_stride, eps, CO, FEATURES, BLOCK_F
    )
    tl.store(coefficients + row * 2 * CO + co, scale, mask=co < CO)
    tl.store(coefficients + (row * 2 + 1) * CO + co, shift, mask=co < CO)


@triton.jit
def _first_weights(
    weight, co, n, CO: tl.constexpr, CI: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    ROUND: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """The weights that lead from a window to its n-th convolution, `(BLOCK_Q, channels)`."""
    q = tl.arange(0, BLOCK_Q)
    channel, qy, qx = _patch(q, KH + PH - 1, KW + PW - 1)
    ky = qy - n // PW
    kx = qx - n % PW
    used = (channel < CI) & (ky >= 0) & (ky < KH) & (kx >= 0) & (kx < KW)
    at = weight + co[None, :] * (CI * KH * KW) + ((channel * KH + ky) * KW + kx)[:, None]
    return _rounded(tl.load(at, mask=used[:, None] & (co < CO)[None, :], other=0.0), ROUND)


@triton.jit
def _better(best, which, value, n):
    """The larger of two (the first of equals; NaN wins), and its number."""
    better = (value > best) | (value != value)
    return tl.where(better, value, best), tl.where(better, n, which)


@triton.jit(do_not_specialize=["tasks", "weight_stride", "pooled", "share"])
def first_forward(
    images, weight, coefficients, out, pick, tasks, weight_stride, pooled, share,
    height: tl.constexpr, width: tl.constexpr, out_height: tl.constexpr, out_width: tl.constexpr,
    CO: tl.constexpr, CI: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The first block from images `(tasks, examples, height, width, CI)` to pooled outputs; nothing of full size is written.

    A pooled entry sees a window of (KH + PH − 1) × (KW + PW − 1) pixels, which serves all its PH × PW convolutions.
    """
    ROUND: tl.constexpr = PRECISION == "tf32"
    row = tl.program_id(1).to(tl.int64)
    co = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    q = tl.arange(0, BLOCK_Q)
    channel, qy, qx = _patch(q, KH + PH - 1, KW + PW - 1)
    coefficients += row * 2 * CO
    scale = tl.load(coefficients + co, mask=co < CO, other=0.0)[None, :]
    shift = tl.load(coefficients + CO + co, mask=co < CO, other=0.0)[None, :]
    weight += row * weight_stride
    images += (row % tasks) * (pooled // (out_height * out_width)) * height * width * CI
    w0 = _first_weights(weight, co, 0, CO, CI, KH, KW, PH, PW, ROUND, BLOCK_Q)
    w1 = _first_weights(weight, co, 1, CO, CI, KH, KW, PH, PW, ROUND, BLOCK_Q)
    if PH * PW == 4:
        w2 = _first_weights(weight, co, 2, CO, CI, KH, KW, PH, PW, ROUND, BLOCK_Q)
        w3 = _first_weights(weight, co, 3, CO, CI, KH, KW, PH, PW, ROUND, BLOCK_Q)
    end = tl.minimum((tl.program_id(0) + 1) * share, pooled)
    for begin in range(tl.program_id(0) * share, end, BLOCK_P):
        p = begin + tl.arange(0, BLOCK_P)
        inside = p < end
        y = (p // out_width % out_height * PH - PAD_H)[:, None] + qy[None, :]
        x = (p % out_width * PW - PAD_W)[:, None] + qx[None, :]
        ok = inside[:, None] & (channel < CI)[None, :] & (y >= 0) & (y < height) & (x >= 0) & (x < width)
        source = ((p // (out_height * out_width) * height)[:, None] + y) * width + x
        window = _rounded(tl.load(images + source * CI + channel[None, :], mask=ok, other=0.0), ROUND)
        best = tl.dot(window, w0, input_precision=PRECISION) * scale + shift
        which = tl.zeros((BLOCK_P, BLOCK_N), dtype=tl.int32)
        best, which = _better(best, which, tl.dot(window, w1, input_precision=PRECISION) * scale + shift, 1)
        if PH * PW == 4:
            best, which = _better(best, which, tl.dot(window, w2, input_precision=PRECISION) * scale + shift, 2)
            best, which = _better(best, which, tl.dot(window, w3, input_precision=PRECISION) * scale + shift, 3)
        which = tl.where(best <= 0, DROPPED, which)
        best = tl.where(best <= 0, 0.0, best)  # NaN stays NaN
        kept = inside[:, None] & (co < CO)[None, :]
        place = row * pooled * CO + p[:, None] * CO + co[None, :]
        tl.store(out + place, best.to(out.dtype.element_ty), mask=kept)
        tl.store(pick + place, which.to(tl.uint8), mask=kept)


@triton.jit
def _gathered(
    sums, n, KH: tl.constexpr, KW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_Q: tl.constexpr
):
    """Of sums over windows, those over the patch at the window's n-th place, `(BLOCK_F, channels)`."""
    f = tl.arange(0, BLOCK_F)
    channel, fy, fx = _patch(f, KH, KW)
    q = (channel * (KH + PH - 1) + fy + n // PW) * (KW + PW - 1) + fx + n % PW
    chosen = (q[:, None] == tl.arange(0, BLOCK_Q)[None, :]).to(tl.float32)
    return tl.dot(chosen, sums, input_precision="ieee")


@triton.jit(do_not_specialize=["tasks", "pooled", "tiles", "share"])
def first_sums_backward(
    images, pick, dy, sums, ones, tasks, pooled, tiles, share,
    height: tl.constexpr, width: tl.constexpr, out_height: tl.constexpr, out_width: tl.constexpr,
    CO: tl.constexpr, CI: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Σ dy ⊗ chosen patch over a share of the pooled entries, `(rows, tiles, BLOCK_F, CO)`; Σ dy to `ones`."""
    ROUND: tl.constexpr = PRECISION == "tf32"
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    co = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    images += (row % tasks) * (pooled // (out_height * out_width)) * height * width * CI
    q = tl.arange(0, BLOCK_Q)
    channel, qy, qx = _patch(q, KH + PH - 1, KW + PW - 1)
    t0 = tl.zeros((BLOCK_Q, BLOCK_N), dtype=tl.float32)
    t1 = tl.zeros((BLOCK_Q, BLOCK_N), dtype=tl.float32)
    t2 = tl.zeros((BLOCK_Q, BLOCK_N), dtype=tl.float32)
    t3 = tl.zeros((BLOCK_Q, BLOCK_N), dtype=tl.float32)
    one = tl.zeros((BLOCK_N,), dtype=tl.float32)
    end = tl.minimum((tile + 1) * share, pooled)
    for begin in range(tile * share, end, BLOCK_P):
        p = begin + tl.arange(0, BLOCK_P)
        inside = p < end
        y = (p // out_width % out_height * PH - PAD_H)[None, :] + qy[:, None]
        x = (p % out_width * PW - PAD_W)[None, :] + qx[:, None]
        ok = inside[None, :] & (channel < CI)[:, None] & (y >= 0) & (y < height) & (x >= 0) & (x < width)
        source = ((p // (out_height * out_width) * height)[None, :] + y) * width + x
        window = _rounded(tl.load(images + source * CI + channel[:, None], mask=ok, other=0.0), ROUND)
        place = row * pooled * CO + p[:, None] * CO + co[None, :]
        kept = inside[:, None] & (co < CO)[None, :]
        which = tl.load(pick + place, mask=kept, other=255).to(tl.int32)
        g = tl.load(dy + place, mask=kept, other=0.0).to(tl.float32)
        g = tl.where(which == DROPPED, 0.0, g)
        one += tl.sum(g, 0)
        g = _rounded(g, ROUND)
        t0 = tl.dot(window, tl.where(which == 0, g, 0.0), t0, input_precision=PRECISION)
        t1 = tl.dot(window, tl.where(which == 1, g, 0.0), t1, input_precision=PRECISION)
        if PH * PW == 4:
            t2 = tl.dot(window, tl.where(which == 2, g, 0.0), t2, input_precision=PRECISION)
            t3 = tl.dot(window, tl.where(which == 3, g, 0.0), t3, input_precision=PRECISION)
    total = _gathered(t0, 0, KH, KW, PH, PW, BLOCK_F, BLOCK_Q) + _gathered(t1, 1, KH, KW, PH, PW, BLOCK_F, BLOCK_Q)
    if PH * PW == 4:
        total += _gathered(t2, 2, KH, KW, PH, PW, BLOCK_F, BLOCK_Q) + _gathered(t3, 3, KH, KW, PH, PW, BLOCK_F, BLOCK_Q)
    sums += (row * tiles + tile) * (BLOCK_F * CO)
    tl.store(sums + tl.arange(0, BLOCK_F)[:, None] * CO + co[None, :], total, mask=(co < CO)[None, :])
    tl.store(ones + (row * tiles + tile) * CO + co, one, mask=co < CO)


@triton.jit(do_not_specialize=[
    "tasks", "tiles", "weight_stride", "gamma_stride", "beta_stride", "dweight_stride", "dgamma_stride", "dbeta_stride", "dbias_stride"
])  # fmt: skip
def first_backward(
    sums, ones, weight, gamma, beta, means, covariance, dweight, dgamma, dbeta, dbias,
    tasks, tiles, weight_stride, gamma_stride, beta_stride, dweight_stride, dgamma_stride, dbeta_stride, dbias_stride, eps,
    CO: tl.constexpr, FEATURES: tl.constexpr, BIAS: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Gradients of the first block from its tiles' sums and the moments of its input."""
    row = tl.program_id(0).to(tl.int64)
    co = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    f = tl.arange(0, BLOCK_F)
    known = co < CO
    there = (f < FEATURES)[:, None] & known[None, :]
    total = tl.zeros((BLOCK_F, BLOCK_N), dtype=tl.float32)
    first = tl.zeros((BLOCK_N,), dtype=tl.float32)
    sums += row * tiles * (BLOCK_F * CO)
    ones += row * tiles * CO
    for tile in range(tiles):
        total += tl.load(sums + tile * (BLOCK_F * CO) + f[:, None] * CO + co[None, :], mask=there, other=0.0)
        first += tl.load(ones + tile * CO + co, mask=known, other=0.0)
    w, m, cw, mean, inverse, scale, _ = _first_normalisation(
        weight, gamma, beta, means, covariance, row, row % tasks, co, weight_stride, gamma_stride, beta_stride, eps, CO, FEATURES, BLOCK_F
    )
    second = inverse * (tl.sum(w * total, 0) - mean * first)
    dw = scale[None, :] * (total - first[None, :] * m[:, None] - (second * inverse)[None, :] * cw)
    tl.store(dweight + row * dweight_stride + co[None, :] * FEATURES + f[:, None], dw, mask=there)
    tl.store(dbeta + row * dbeta_stride + co, first, mask=known)
    tl.store(dgamma + row * dgamma_stride + co, second, mask=known)
    if BIAS:
        tl.store(dbias + row * dbias_stride + co, tl.zeros((BLOCK_N,), dtype=tl.float32), mask=known)
