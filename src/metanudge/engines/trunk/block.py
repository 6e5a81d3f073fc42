"""A block behind the first: convolution, BatchNorm, ReLU and pooling with a derivative of their own.

With the filters' signs turned so that γ ≥ 0, BatchNorm is an increasing map a·y + β of the centred convolution y, and the maximum may be
taken before it: pool(relu(a y + β)) = relu(a·pool(y) + β), on a quarter (in one dimension half) of the numbers. Backwards, the gradient
behind the maximum lives on the winners only, so BatchNorm's two sums run over pooled entries:

    dL/dy = a·(scatter(g) − mean(g) − y/σ²·mean(g·pool(y))),    means over all entries of the convolution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from metanudge.engines.trunk.convolution import Convolution
from metanudge.engines.trunk.interface import BlockWeights
from metanudge.engines.trunk.pooling import largest, phases, shares


@dataclass
class Kept:
    """What a block's backward pass needs from its forward pass."""

    z: Tensor  # (rows, examples, *spatial, in_channels), the inputs
    y: Tensor  # (rows, examples, *convolved, out_channels), centred
    pooled: Tensor  # (rows, examples, *pooled, out_channels), the largest of y
    sign: Tensor | None  # of γ, (rows, out_channels); None where all are positive
    scale: Tensor  # a = |γ|/σ, (rows, out_channels)
    deviation: Tensor  # 1/σ, (rows, out_channels)


class LaterBlock:
    """One block, given what convolves."""

    def __init__(self, convolution: Convolution, eps: float) -> None:
        self._convolution = convolution
        self._eps = eps

    def forward(self, z: Tensor, weights: BlockWeights) -> tuple[Tensor, Kept]:
        """Outputs `(rows, examples, *pooled, out_channels)`."""
        weight, _, gamma, beta = weights
        sign = None
        if gamma is not None and bool((gamma < 0).any()):
            sign = torch.where(gamma < 0, -torch.ones_like(gamma), 1.0)
            weight = weight * _on_weight(sign, weight)
        y = self._convolution.forward(z, weight)
        entries = y.flatten(1, -2)
        entries.sub_(entries.mean(1, keepdim=True))
        deviation = (entries * entries).mean(1).add_(self._eps).rsqrt_()
        scale = deviation if gamma is None else gamma.abs() * deviation
        windows = phases(y)
        if gamma is not None and bool((gamma == 0).any()):
            # All entries of a window are equal behind BatchNorm, so that the first wins; nothing of y is felt anywhere else.
            for other in windows[1:]:
                other.masked_fill_(_on_entries(gamma == 0, y), torch.finfo(y.dtype).min)
        pooled = largest(windows)
        out = pooled * _on_entries(scale, y) if beta is None else torch.addcmul(_on_entries(beta, y), pooled, _on_entries(scale, y))
        return out.relu_(), Kept(z, y, pooled, sign, scale, deviation)

    def backward(self, g: Tensor, out: Tensor, weights: BlockWeights, kept: Kept) -> tuple[Tensor, BlockWeights]:
        """Gradients with respect to the inputs and the weights, from that of the outputs `out`. Overwrites what was kept."""
        y, scale, deviation = kept.y, kept.scale, kept.deviation
        g = torch.ops.aten.threshold_backward(g, out, 0)
        entries = math.prod(y.shape[1:-1])
        dbeta = g.flatten(1, -2).sum(1)
        moment = kept.pooled.mul_(g).flatten(1, -2).sum(1)
        dgamma = moment * deviation
        if kept.sign is not None:
            dgamma, scale = dgamma * kept.sign, scale * kept.sign
        windows = phases(y)
        parts = shares(g, windows)
        # a stands before the whole of dL/dy, so the filters and their gradient take it over.
        torch.addcmul(_on_entries(dbeta / -entries, y), y, _on_entries(moment * deviation.square() / -entries, y), out=y)
        for window, part in zip(windows, parts, strict=True):
            window.add_(part)
        factor = _on_weight(scale, weights.weight)
        dz, dw = self._convolution.backward(y, kept.z, weights.weight * factor)
        return dz, BlockWeights(dw * factor, dbeta.new_zeros(()).expand_as(dbeta), dgamma, dbeta)


def _on_weight(values: Tensor, weight: Tensor) -> Tensor:
    """`(rows, out_channels)`, to multiply a weight with."""
    return values[(..., *[None] * (weight.ndim - 2))]


def _on_entries(values: Tensor, y: Tensor) -> Tensor:
    """`(rows, out_channels)`, to multiply an activation with."""
    return values[(slice(None), *[None] * (y.ndim - 2))]
