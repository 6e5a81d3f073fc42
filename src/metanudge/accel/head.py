"""The usual end of a classifier, a linear layer and the cross-entropy of its outputs, as two Triton
kernels with one program a row.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

MOST_CLASSES = 64
IGNORED = tl.constexpr(-100)  # torch leaves examples with this label out


@triton.jit(
    do_not_specialize=["examples", "row_stride", "example_stride", "weight_stride", "bias_stride"]
)
def _forward(
    x, weight, bias, targets, losses, slopes, examples, row_stride, example_stride, weight_stride,
    bias_stride,
    FEATURES: tl.constexpr, CLASSES: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Mean cross-entropy of a row, and its derivative by the outputs, `(rows, examples, CLASSES)`.
    A label that is no class gives NaN.
    """
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK_C)
    targets += row * examples
    count = 0
    for begin in range(0, examples, BLOCK_E):
        e = begin + tl.arange(0, BLOCK_E)
        count += tl.sum(
            (tl.load(targets + e, mask=e < examples, other=IGNORED) != IGNORED).to(tl.int32), 0
        )
    total = 0.0
    for begin in range(0, examples, BLOCK_E):
        e = begin + tl.arange(0, BLOCK_E)
        z = tl.zeros((BLOCK_E, BLOCK_C), dtype=tl.float32)
        for start in range(0, FEATURES, BLOCK_F):
            f = start + tl.arange(0, BLOCK_F)
            inside = (e < examples)[:, None] & (f < FEATURES)[None, :]
            a = tl.load(
                x + row * row_stride + e[:, None] * example_stride + f[None, :],
                mask=inside,
                other=0.0,
            )
            known = (f < FEATURES)[:, None] & (c < CLASSES)[None, :]
            b = tl.load(
                weight + row * weight_stride + c[None, :] * FEATURES + f[:, None],
                mask=known,
                other=0.0,
            )
            z = tl.dot(a, b, z, input_precision="tf32x3")
        if BIAS:
            z += tl.load(bias + row * bias_stride + c, mask=c < CLASSES, other=0.0)[None, :]
        z = tl.where((c < CLASSES)[None, :], z, float("-inf"))
        z -= tl.max(z, 1)[:, None]
        p = tl.exp(z)
        s = tl.sum(p, 1)
        target = tl.load(targets + e, mask=e < examples, other=IGNORED)
        hit = c[None, :] == target[:, None]
        each = tl.log(s) - tl.sum(tl.where(hit, z, 0.0), 1)
        each = tl.where((target >= 0) & (target < CLASSES), each, float("nan"))
        total += tl.sum(tl.where(target == IGNORED, 0.0, each), 0)
        slope = tl.where(
            (target == IGNORED)[:, None], 0.0, (p / s[:, None] - hit.to(tl.float32)) / count
        )
        place = slopes + (row * examples + e[:, None]) * CLASSES + c[None, :]
        tl.store(place, slope, mask=(e < examples)[:, None] & (c < CLASSES)[None, :])
    tl.store(losses + row, total / count)


@triton.jit(do_not_specialize=[
    "examples", "row_stride", "example_stride", "weight_stride", "dweight_stride", "dbias_stride"
])  # fmt: skip
def _backward(
    outer, slopes, x, weight, dx, dweight, dbias, examples, row_stride, example_stride,
    weight_stride, dweight_stride, dbias_stride,
    FEATURES: tl.constexpr, CLASSES: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Gradients by inputs `(rows, examples, FEATURES)`, weight and bias; `outer` is the derivative
    of each row's loss.
    """
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    c = tl.arange(0, BLOCK_C)
    scale = tl.load(outer + row)
    known = (c < CLASSES)[:, None] & (f < FEATURES)[None, :]
    w = tl.load(
        weight + row * weight_stride + c[:, None] * FEATURES + f[None, :], mask=known, other=0.0
    )
    dw = tl.zeros((BLOCK_C, BLOCK_F), dtype=tl.float32)
    db = tl.zeros((BLOCK_C,), dtype=tl.float32)
    for begin in range(0, examples, BLOCK_E):
        e = begin + tl.arange(0, BLOCK_E)
        seen = (e < examples)[:, None] & (c < CLASSES)[None, :]
        g = (
            tl.load(
                slopes + (row * examples + e[:, None]) * CLASSES + c[None, :], mask=seen, other=0.0
            )
            * scale
        )
        inside = (e < examples)[:, None] & (f < FEATURES)[None, :]
        a = tl.load(
            x + row * row_stride + e[:, None] * example_stride + f[None, :], mask=inside, other=0.0
        )
        tl.store(
            dx + (row * examples + e[:, None]) * FEATURES + f[None, :],
            tl.dot(g, w, input_precision="tf32x3"),
            mask=inside,
        )
        dw = tl.dot(tl.trans(g), a, dw, input_precision="tf32x3")
        db += tl.sum(g, 0)
    tl.store(dweight + row * dweight_stride + c[:, None] * FEATURES + f[None, :], dw, mask=known)
    if BIAS:
        tl.store(dbias + row * dbias_stride + c, db, mask=(c < CLASSES) & (tl.program_id(1) == 0))


def cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    into: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """Mean cross-entropy of each row, `(rows,)`.

    Args:
        x: `(rows, examples, features)`, float32.
        weight: `(rows, classes, features)`.
        bias: `(rows, classes)`.
        targets: `(rows, examples)`, classes; −100 leaves an example out.
        into: where to write the gradients by weight and bias.
    """
    losses: Tensor = _CrossEntropy.apply(x, weight, bias, targets, into)
    return losses


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        into: tuple[Tensor | None, ...],
    ) -> Tensor:
        x = x if x.stride(2) == 1 else x.contiguous()
        weight = weight if weight[0].is_contiguous() else weight.contiguous()
        rows, examples, features = x.shape
        classes = weight.shape[1]
        losses, slopes = x.new_empty(rows), x.new_empty(rows, examples, classes)
        _forward[(rows,)](
            x, weight, weight if bias is None else bias, targets.contiguous(), losses, slopes,
            examples,
            x.stride(0), x.stride(1), weight.stride(0), 0 if bias is None else bias.stride(0),
            BIAS=bias is not None, **_sizes(features, classes),
        )  # fmt: skip
        ctx.save_for_backward(x, weight, slopes)
        ctx.has_bias, ctx.into = bias is not None, into
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> Any:
        x, weight, slopes = ctx.saved_tensors
        rows, examples, features = x.shape
        classes = weight.shape[1]
        dx = x.new_empty(x.shape)
        place, bias_place = ctx.into  # each row dense
        dweight = weight.new_empty(weight.shape) if place is None else place
        dbias = weight.new_empty(rows, classes) if bias_place is None else bias_place
        sizes = _sizes(features, classes)
        _backward[(rows, triton.cdiv(features, sizes["BLOCK_F"]))](
            outer.contiguous(), slopes, x, weight, dx, dweight, dbias, examples,
            x.stride(0), x.stride(1), weight.stride(0), dweight.stride(0), dbias.stride(0),
            BIAS=ctx.has_bias, **sizes,
        )  # fmt: skip
        return dx, dweight, dbias if ctx.has_bias else None, None, None


def _sizes(features: int, classes: int) -> dict[str, int]:
    block = min(64, max(16, triton.next_power_of_2(features)))
    most = max(16, triton.next_power_of_2(classes))
    return {
        "FEATURES": features,
        "CLASSES": classes,
        "BLOCK_E": 32,
        "BLOCK_F": block,
        "BLOCK_C": most,
        "num_warps": 4,
    }
