"""Triton kernels for a first block whose convolution sees few numbers at a time: nothing of the
convolution's size is ever written.

Its statistics follow from the moments of the data's patches, and its outputs are cheap to make
again. Layouts and sums are as in `kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from metanudge.accel.trunk.kernels import DROPPED, within


@triton.jit
def _rounded(x, ROUND: tl.constexpr):
    """Float32 rounded to what TF32 keeps: the tensor cores would cut the rest off."""
    if ROUND:
        x = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return x


@triton.jit
def _product(data, factor, total, PRECISION: tl.constexpr):
    """total + data · factor. With "tf32x2" all of the factor counts, and of the data what TF32
    keeps.
    """
    if PRECISION == "tf32x2":
        most = _rounded(factor, True)
        total = tl.dot(data, _rounded(factor - most, True), total, input_precision="tf32")
        total = tl.dot(data, most, total, input_precision="tf32")
    else:
        total = tl.dot(data, factor, total, input_precision=PRECISION)
    return total


@triton.jit
def _patch(f, KH: tl.constexpr, KW: tl.constexpr):
    """Place of a patch's entry: channel, row, column (entries are ordered like a convolution's
    weights).
    """
    return f // (KH * KW), f // KW % KH, f % KW


@triton.jit(do_not_specialize=["pixels", "tiles", "share"])
def patch_moments(
    images, centre, moments, pixels, tiles, share,
    height: tl.constexpr, width: tl.constexpr, out_height: tl.constexpr, out_width: tl.constexpr,
    CI: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Σ p ⊗ (p, 1) over a share of the patches p of a first layer, less the task's centre, `(tasks,
    tiles, BLOCK_F, BLOCK_F)`.
    """
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
        ok = real & within(y, x, height, width)
        source = ((m // (out_height * out_width) * height)[None, :] + y) * width + x
        patch = tl.where(
            real, tl.load(images + source * CI + channel[:, None], mask=ok, other=0.0) - middle, 0.0
        )
        patch = tl.where((f == FEATURES)[:, None] & (m < end)[None, :], 1.0, patch)
        total = tl.dot(patch, tl.trans(patch), total, input_precision="tf32x3")
    moments += (task * tiles + tile) * (BLOCK_F * BLOCK_F)
    tl.store(moments + f[:, None] * BLOCK_F + f[None, :], total)


@triton.jit
def _first_normalisation(
    weight, gamma, beta, means, covariance, row, task, co, weight_stride, gamma_stride,
    beta_stride, eps,
    CO: tl.constexpr, FEATURES: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Statistics of a first layer's output from the moments of its input patches: mean w·m,
    variance wᵀCw.
    """
    f = tl.arange(0, BLOCK_F)
    known = (f < FEATURES)[:, None] & (co < CO)[None, :]
    w = tl.load(
        weight + row * weight_stride + co[None, :] * FEATURES + f[:, None], mask=known, other=0.0
    )
    m = tl.load(means + task * FEATURES + f, mask=f < FEATURES, other=0.0)
    square = (f < FEATURES)[:, None] & (f < FEATURES)[None, :]
    c = tl.load(
        covariance + task * (FEATURES * FEATURES) + f[:, None] * FEATURES + f[None, :],
        mask=square,
        other=0.0,
    )
    cw = tl.dot(c, w, input_precision="ieee")
    mean = tl.sum(w * m[:, None], 0)
    inverse = 1.0 / tl.sqrt(tl.maximum(tl.sum(w * cw, 0), 0.0) + eps)
    scale = tl.load(gamma + row * gamma_stride + co, mask=co < CO, other=0.0) * inverse
    shift = tl.load(beta + row * beta_stride + co, mask=co < CO, other=0.0) - mean * scale
    return w, m, cw, mean, inverse, scale, shift


@triton.jit(do_not_specialize=["tasks", "weight_stride", "gamma_stride", "beta_stride"])
def first_normalisation(
    weight, gamma, beta, means, covariance, coefficients, tasks, weight_stride, gamma_stride,
    beta_stride, eps,
    CO: tl.constexpr, FEATURES: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Scale and shift of the first block's normalisation, `(rows, 2, CO)`."""
    row = tl.program_id(0).to(tl.int64)
    co = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    _, _, _, _, _, scale, shift = _first_normalisation(
        weight,
        gamma,
        beta,
        means,
        covariance,
        row,
        row % tasks,
        co,
        weight_stride,
        gamma_stride,
        beta_stride,
        eps,
        CO,
        FEATURES,
        BLOCK_F,
    )
    tl.store(coefficients + row * 2 * CO + co, scale, mask=co < CO)
    tl.store(coefficients + (row * 2 + 1) * CO + co, shift, mask=co < CO)


@triton.jit
def _first_weights(
    weight, co, n, CO: tl.constexpr, CI: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr,
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
def _larger(best, which, window, weight, none, scale, shift, n, PRECISION: tl.constexpr):
    """The larger of the best so far and the window's n-th normalised convolution (the first of
    equals; NaN wins), and its number.
    """
    value = _product(window, weight, none, PRECISION) * scale + shift
    better = (value > best) | (value != value)
    return tl.where(better, value, best), tl.where(better, n, which)


@triton.jit(do_not_specialize=["tasks", "weight_stride", "pooled", "share"])
def first_forward(
    images, weight, coefficients, out, pick, tasks, weight_stride, pooled, share,
    height: tl.constexpr, width: tl.constexpr, out_height: tl.constexpr, out_width: tl.constexpr,
    CO: tl.constexpr, CI: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The first block from images `(tasks, examples, height, width, CI)` to pooled outputs; nothing
    of full size is written.

    A pooled entry sees a window of (KH + PH − 1) × (KW + PW − 1) pixels, which serves all its PH ×
    PW convolutions.
    """
    ROUND: tl.constexpr = PRECISION == "tf32"
    ROUND_DATA: tl.constexpr = PRECISION != "tf32x3"
    none = tl.zeros((BLOCK_P, BLOCK_N), dtype=tl.float32)
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
        ok = inside[:, None] & (channel < CI)[None, :] & within(y, x, height, width)
        source = ((p // (out_height * out_width) * height)[:, None] + y) * width + x
        window = _rounded(
            tl.load(images + source * CI + channel[None, :], mask=ok, other=0.0), ROUND_DATA
        )
        best = _product(window, w0, none, PRECISION) * scale + shift
        which = tl.zeros((BLOCK_P, BLOCK_N), dtype=tl.int32)
        best, which = _larger(best, which, window, w1, none, scale, shift, 1, PRECISION)
        if PH * PW == 4:
            best, which = _larger(best, which, window, w2, none, scale, shift, 2, PRECISION)
            best, which = _larger(best, which, window, w3, none, scale, shift, 3, PRECISION)
        which = tl.where(best <= 0, DROPPED, which)
        best = tl.where(best <= 0, 0.0, best)  # NaN stays NaN
        kept = inside[:, None] & (co < CO)[None, :]
        place = row * pooled * CO + p[:, None] * CO + co[None, :]
        tl.store(out + place, best.to(out.dtype.element_ty), mask=kept)
        tl.store(pick + place, which.to(tl.uint8), mask=kept)


@triton.jit
def _gathered(
    sums,
    n,
    KH: tl.constexpr,
    KW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """Of sums over windows, those over the patch at the window's n-th place, `(BLOCK_F,
    channels)`.
    """
    f = tl.arange(0, BLOCK_F)
    channel, fy, fx = _patch(f, KH, KW)
    q = (channel * (KH + PH - 1) + fy + n // PW) * (KW + PW - 1) + fx + n % PW
    chosen = (q[:, None] == tl.arange(0, BLOCK_Q)[None, :]).to(tl.float32)
    return tl.dot(chosen, sums, input_precision="ieee")


@triton.jit(do_not_specialize=["tasks", "pooled", "tiles", "share"])
def first_sums_backward(
    images, pick, dy, sums, ones, tasks, pooled, tiles, share,
    height: tl.constexpr, width: tl.constexpr, out_height: tl.constexpr, out_width: tl.constexpr,
    CO: tl.constexpr, CI: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_F: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Σ dy ⊗ chosen patch over a share of the pooled entries, `(rows, tiles, BLOCK_F, CO)`; Σ dy to
    `ones`.
    """
    ROUND: tl.constexpr = PRECISION == "tf32"
    ROUND_DATA: tl.constexpr = PRECISION != "tf32x3"
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
        ok = inside[None, :] & (channel < CI)[:, None] & within(y, x, height, width)
        source = ((p // (out_height * out_width) * height)[None, :] + y) * width + x
        window = _rounded(
            tl.load(images + source * CI + channel[:, None], mask=ok, other=0.0), ROUND_DATA
        )
        place = row * pooled * CO + p[:, None] * CO + co[None, :]
        kept = inside[:, None] & (co < CO)[None, :]
        which = tl.load(pick + place, mask=kept, other=255).to(tl.int32)
        g = tl.load(dy + place, mask=kept, other=0.0).to(tl.float32)
        g = tl.where(which == DROPPED, 0.0, g)
        one += tl.sum(g, 0)
        g = _rounded(g, ROUND)
        t0 = _product(window, tl.where(which == 0, g, 0.0), t0, PRECISION)
        t1 = _product(window, tl.where(which == 1, g, 0.0), t1, PRECISION)
        if PH * PW == 4:
            t2 = _product(window, tl.where(which == 2, g, 0.0), t2, PRECISION)
            t3 = _product(window, tl.where(which == 3, g, 0.0), t3, PRECISION)
    total = _gathered(t0, 0, KH, KW, PH, PW, BLOCK_F, BLOCK_Q) + _gathered(
        t1, 1, KH, KW, PH, PW, BLOCK_F, BLOCK_Q
    )
    if PH * PW == 4:
        total += _gathered(t2, 2, KH, KW, PH, PW, BLOCK_F, BLOCK_Q) + _gathered(
            t3, 3, KH, KW, PH, PW, BLOCK_F, BLOCK_Q
        )
    sums += (row * tiles + tile) * (BLOCK_F * CO)
    tl.store(
        sums + tl.arange(0, BLOCK_F)[:, None] * CO + co[None, :], total, mask=(co < CO)[None, :]
    )
    tl.store(ones + (row * tiles + tile) * CO + co, one, mask=co < CO)


@triton.jit(do_not_specialize=[
    "tasks", "tiles", "weight_stride", "gamma_stride", "beta_stride",
    "dweight_stride", "dgamma_stride", "dbeta_stride", "dbias_stride",
])  # fmt: skip
def first_backward(
    sums, ones, weight, gamma, beta, means, covariance, dweight, dgamma, dbeta, dbias,
    tasks, tiles, weight_stride, gamma_stride, beta_stride, dweight_stride, dgamma_stride,
    dbeta_stride, dbias_stride, eps,
    CO: tl.constexpr, FEATURES: tl.constexpr, BIAS: tl.constexpr, BLOCK_F: tl.constexpr,
    BLOCK_N: tl.constexpr,
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
        total += tl.load(
            sums + tile * (BLOCK_F * CO) + f[:, None] * CO + co[None, :], mask=there, other=0.0
        )
        first += tl.load(ones + tile * CO + co, mask=known, other=0.0)
    w, m, cw, mean, inverse, scale, _ = _first_normalisation(
        weight,
        gamma,
        beta,
        means,
        covariance,
        row,
        row % tasks,
        co,
        weight_stride,
        gamma_stride,
        beta_stride,
        eps,
        CO,
        FEATURES,
        BLOCK_F,
    )
    second = inverse * (tl.sum(w * total, 0) - mean * first)
    dw = scale[None, :] * (total - first[None, :] * m[:, None] - (second * inverse)[None, :] * cw)
    tl.store(dweight + row * dweight_stride + co[None, :] * FEATURES + f[:, None], dw, mask=there)
    tl.store(dbeta + row * dbeta_stride + co, first, mask=known)
    tl.store(dgamma + row * dgamma_stride + co, second, mask=known)
    if BIAS:
        tl.store(
            dbias + row * dbias_stride + co, tl.zeros((BLOCK_N,), dtype=tl.float32), mask=known
        )
