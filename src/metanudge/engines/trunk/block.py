"""A block behind the first: convolution, BatchNorm, ReLU and pooling with a derivative of their own.

With the filters' signs turned so that γ ≥ 0, BatchNorm is an increasing map a·y + β of the centred convolution y, and the maximum may be
taken before it: pool(relu(a y + β)) = relu(a·pool(y) + β), on a quarter (in one dimension half) of the numbers. Backwards, the gradient
behind the maximum lives on the winners only, so BatchNorm's two sums run over pooled entries:

    dL/dy = a·(scatter(g) − mean(g) − y/σ²·mean(g·pool(y))),    means over all entries of the convolution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metanudge.engines.trunk.convolution import Convolution
from metanudge.engines.trunk.interface import BlockWeights
from metanudge.engines.trunk.padded import Padded, padded
from metanudge.engines.trunk.pooling import add_share, largest, phases, products


@dataclass
class Kept:
    """What a block's backward pass needs from its forward pass."""

    z: Padded  # the inputs, (rows, examples, *spatial, in_channels)
    convolution: Any
    y: Tensor  # (rows, examples, *convolved, out_channels), centred
    pooled: Tensor  # (rows, examples, *pooled, out_channels), the largest of y
    sign: Tensor | None  # of γ, (rows, 1, out_channels); None where all are positive
    scale: Tensor  # a = |γ|/σ, (rows, 1, out_channels)
    deviation: Tensor  # 1/σ, (rows, 1, out_channels)


class LaterBlock:
    """One block, given what convolves."""

    def __init__(self, convolution: Convolution, eps: float) -> None:
        self._convolution = convolution
        self._eps = eps

    @property
    def border(self) -> tuple[int, ...]:
        """Zeros it needs around its inputs."""
        return self._convolution.border

    def forward(self, z: Padded, weights: BlockWeights, border: tuple[int, ...], *, positive: bool) -> tuple[Padded, Kept]:
        """Outputs `(rows, examples, *pooled, out_channels)` with a border around them; with `positive` all γ are known to be."""
        weight, _, gamma, beta = weights
        gamma, beta = (None if leaf is None else leaf.unsqueeze(1) for leaf in (gamma, beta))
        sign = None if gamma is None or positive else torch.copysign(torch.ones_like(gamma), gamma)
        y, kept = self._convolution.forward(z, weight, sign)
        entries = y.view(len(y), -1, y.shape[-1])
        entries.sub_(entries.mean(1, keepdim=True))
        deviation = (products(entries, entries) / entries.shape[1]).add_(self._eps).rsqrt_()
        scale = deviation if gamma is None else deviation * (gamma if positive else gamma.abs())
        windows = phases(y)
        if gamma is not None and not positive and bool((gamma == 0).any()):
            # All entries of a window are equal behind BatchNorm, so that the first wins; a = 0, so that y is felt nowhere else.
            flat = (gamma == 0).view(len(weight), *[1] * (y.ndim - 2), -1)
            for other in windows[1:]:
                other.copy_(torch.where(flat, windows[0], other))
        pooled = largest(windows)
        flat = pooled.view(len(y), -1, y.shape[-1])
        out = flat * scale if beta is None else torch.addcmul(beta, flat, scale)
        return rectified(out.view_as(pooled), border), Kept(z, kept, y, pooled, sign, scale, deviation)

    def backward(self, g: Tensor, out: Tensor, kept: Kept) -> tuple[Tensor, BlockWeights]:
        """Gradients with respect to the inputs and the weights, from that of the outputs `out`. Overwrites what was kept."""
        y, deviation = kept.y, kept.deviation
        g = torch.ops.aten.threshold_backward(g, out, 0)
        flat, entries = g.view(len(y), -1, y.shape[-1]), y.view(len(y), -1, y.shape[-1])
        scale = kept.scale / -entries.shape[1]
        dbeta = flat.sum(1, keepdim=True)
        dgamma = products(flat, kept.pooled.view_as(flat)) * deviation
        gradient = torch.addcmul(dbeta * scale, entries, dgamma * deviation * scale).view_as(y)
        flat.mul_(kept.scale)
        add_share(g, phases(y), phases(gradient))
        dz, dw = self._convolution.backward(gradient, kept.z, kept.convolution)
        if kept.sign is not None:
            dgamma, dw = dgamma * kept.sign, dw * kept.sign.view(*dw.shape[:2], *[1] * (dw.ndim - 2))
        return dz, BlockWeights(dw, None, dgamma.squeeze(1), dbeta.squeeze(1))


def rectified(out: Tensor, border: tuple[int, ...]) -> Padded:
    """ReLU, with a border around it; may overwrite its argument."""
    if not any(border):
        return Padded(out, out.relu_())
    place = padded(out, out.shape, border)
    torch.clamp_min(out, 0, out=place.inside)
    return place
