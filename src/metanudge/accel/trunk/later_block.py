"""A block behind the first: convolution, BatchNorm, ReLU and pooling with a derivative of their
own.

With the filters' signs turned so that γ ≥ 0, BatchNorm is an increasing map a·y + β of the centred
convolution y, and the maximum may be taken before it: pool(relu(a y + β)) = relu(a·pool(y) + β), on
a quarter (in one dimension half) of the numbers. Backwards, the gradient behind the maximum lives
on the winners only, so BatchNorm's two sums run over pooled entries:

    dL/dy = a·(scatter(g) − mean(g) − y/σ²·mean(g·pool(y))),  means over all of the convolution.

Where several sets of examples go together, these are sums and means of each set: those of its
groups, put together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metanudge.accel.trunk.blocks import BlockWeights
from metanudge.accel.trunk.convolution import Convolution
from metanudge.accel.trunk.groups import Groups
from metanudge.accel.trunk.padded import Padded, padded
from metanudge.accel.trunk.pooling import add_share, largest, phases, products


@dataclass
class Kept:
    """What a block's backward pass needs from its forward pass."""

    z: Padded  # the inputs, (rows, examples, *spatial, in_channels)
    convolution: Any
    y: Tensor  # (rows, examples, *convolved, out_channels), centred
    pooled: Tensor  # (rows, examples, *pooled, out_channels), the largest of y
    sign: Tensor | None  # of γ, (rows, out_channels); None where all are positive
    scale: Tensor  # a = |γ|/σ, (rows × groups, 1, out_channels)
    deviation: Tensor  # 1/σ, (rows × groups, 1, out_channels)


class LaterBlock:
    """One block, given what convolves and what is normalised together."""

    def __init__(self, convolution: Convolution, eps: float, groups: Groups) -> None:
        self._convolution = convolution
        self._eps = eps
        self._groups = groups

    @property
    def border(self) -> tuple[int, ...]:
        """Zeros it needs around its inputs."""
        return self._convolution.border

    def forward(
        self, z: Padded, weights: BlockWeights, border: tuple[int, ...], *, positive: bool
    ) -> tuple[Padded, Kept]:
        """Outputs `(rows, examples, *pooled, out_channels)` with a border around them; with
        `positive` all γ are known to be.
        """
        weight, _, gamma, beta = weights
        sign = None if gamma is None or positive else torch.copysign(torch.ones_like(gamma), gamma)
        y, kept = self._convolution.forward(z, weight, sign)
        entries = self._entries(y)
        entries.sub_(self._groups.average(entries.mean(1, keepdim=True)))
        deviation = (
            self._groups.average(products(entries, entries) / entries.shape[1])
            .add_(self._eps)
            .rsqrt_()
        )
        scale = (
            deviation
            if gamma is None
            else deviation * self._groups.each(gamma if positive else gamma.abs()).unsqueeze(1)
        )
        windows = phases(y)
        if gamma is not None and not positive and bool((gamma == 0).any()):
            # All entries of a window are equal behind BatchNorm, so that the first wins; a = 0, so
            # that y is felt nowhere else.
            level = (gamma == 0).view(len(weight), *[1] * (y.ndim - 2), -1)
            for other in windows[1:]:
                other.copy_(torch.where(level, windows[0], other))
        pooled = largest(windows)
        flat = self._entries(pooled)
        out = (
            flat * scale
            if beta is None
            else torch.addcmul(self._groups.each(beta).unsqueeze(1), flat, scale)
        )
        return rectified(out.view_as(pooled), border), Kept(
            z, kept, y, pooled, sign, scale, deviation
        )

    def backward(self, g: Tensor, out: Tensor, kept: Kept) -> tuple[Tensor, BlockWeights]:
        """Gradients with respect to the inputs and the weights, from that of the outputs `out`.
        Overwrites what was kept.
        """
        y, deviation = kept.y, kept.deviation
        g = torch.ops.aten.threshold_backward(g, out, 0)
        flat, entries = self._entries(g), self._entries(y)
        scale = kept.scale / -entries.shape[1]
        dbeta = flat.sum(1, keepdim=True)
        dgamma = products(flat, self._entries(kept.pooled)) * deviation
        level, slope = (self._groups.average(sums) * scale for sums in (dbeta, dgamma))
        gradient = torch.addcmul(level, entries, slope * deviation).view_as(y)
        flat.mul_(kept.scale)
        add_share(g, phases(y), phases(gradient))
        dz, dw = self._convolution.backward(gradient, kept.z, kept.convolution)
        dgamma, dbeta = (self._groups.total(sums.squeeze(1)) for sums in (dgamma, dbeta))
        if kept.sign is not None:
            dgamma, dw = (
                dgamma * kept.sign,
                dw * kept.sign.view(*dw.shape[:2], *[1] * (dw.ndim - 2)),
            )
        return dz, BlockWeights(dw, None, dgamma, dbeta)

    def _entries(self, x: Tensor) -> Tensor:
        """`(rows, examples, *spatial, channels)` as `(rows × groups, entries, channels)`."""
        return x.view(len(x) * self._groups.count, -1, x.shape[-1])


def rectified(out: Tensor, border: tuple[int, ...]) -> Padded:
    """ReLU, with a border around it; may overwrite its argument."""
    if not any(border):
        return Padded(out, out.relu_())
    place = padded(out, out.shape, border)
    torch.clamp_min(out, 0, out=place.inside)
    return place
