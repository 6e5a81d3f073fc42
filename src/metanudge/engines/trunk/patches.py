"""The first block. Its inputs are data, so that everything about them is prepared once for all steps and nudges.

With the data's windows x centred (Σ x = 0) and C = mean(x xᵀ), a filter w gives outputs of mean 0 and variance wᵀCw: BatchNorm is known
before the convolution and goes into the filters, a = γ/σ. The block is then relu(pool([a w, β] · [x, 1])), and backwards one product

    [S, s] = Σ g_winner [x, 1]

gives all gradients: dβ = s, dγ = wᵀS/σ, dw = a(S − Cw·wᵀS/σ²). Nothing of the convolution's size is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from metanudge.engines.trunk.interface import BlockWeights
from metanudge.engines.trunk.match import Block
from metanudge.engines.trunk.pooling import largest, shares

IN_CACHE = 1 << 18  # numbers of a piece of the convolution: what two passes over it find in a core's cache


@dataclass(frozen=True)
class Patches:
    """The windows of a data set that are pooled, by phase, centred, with a one at the end; and the covariance of all windows."""

    windows: Tensor  # (phases, tasks, examples × pooled, in_channels × kernel + 1)
    covariance: Tensor  # (tasks, in_channels × kernel, in_channels × kernel), float64
    shape: tuple[int, ...]  # (examples, *pooled)

    def __getitem__(self, tasks: slice) -> Patches:
        return Patches(self.windows[:, tasks], self.covariance[tasks], self.shape)


@dataclass
class Kept:
    """What the backward pass needs from the forward pass."""

    filters: Tensor  # (rows, in_channels × kernel + 1, out_channels)
    scale: Tensor  # a = γ/σ, (rows, out_channels), float64
    deviation: Tensor  # 1/σ, (rows, out_channels), float64
    spread: Tensor  # Cw, (rows, out_channels, in_channels × kernel), float64


class FirstBlock:
    """One block on data."""

    def __init__(self, block: Block) -> None:
        self._block = block

    def prepare(self, inputs: Tensor) -> Patches:
        """Windows and their covariance, from inputs `(tasks, examples, channels, *spatial)`."""
        kernel, padding = self._block.kernel, self._block.padding
        x = F.pad(inputs, tuple(p for size in reversed(padding) for p in (size, size)))
        for axis, size in enumerate(kernel, 3):
            x = x.unfold(axis, size, 1)
        axes = len(kernel)
        x = x.movedim(2, 2 + axes).flatten(2 + axes)  # (tasks, examples, *convolved, in_channels × kernel)
        exact = x.flatten(1, -2).double()
        mean = exact.mean(1)
        exact = exact - mean.unsqueeze(1)
        covariance = torch.bmm(exact.transpose(1, 2), exact) / exact.shape[1]
        pooled = [size // 2 for size in x.shape[2:-1]]
        centred = exact.to(inputs.dtype).view_as(x)
        parities = product(*([slice(i, 2 * n, 2) for i in (0, 1)] for n in pooled))
        windows = torch.stack([centred[(slice(None), slice(None), *parity)].flatten(1, -2) for parity in parities])
        return Patches(F.pad(windows, (0, 1), value=1.0), covariance, (x.shape[1], *pooled))

    def forward(self, patches: Patches, weights: BlockWeights) -> tuple[Tensor, Kept]:
        """Outputs `(rows, examples, *pooled, out_channels)`."""
        w = weights.weight.flatten(2).double()
        tasks = len(patches.covariance)
        spread = torch.matmul(w.unflatten(0, (-1, tasks)), patches.covariance).flatten(0, 1)
        deviation = (w * spread).sum(-1).clamp_min_(0).add_(self._block.eps).rsqrt_()
        scale = deviation if weights.gamma is None else deviation * weights.gamma
        beta = torch.zeros_like(scale) if weights.beta is None else weights.beta.double()
        filters = torch.cat([w * scale.unsqueeze(-1), beta.unsqueeze(-1)], -1).to(weights.weight.dtype).transpose(1, 2).contiguous()
        rows, _, channels = filters.shape
        out = filters.new_empty(rows, patches.windows.shape[2], channels)
        for row, task, place in self._pieces(patches, rows, channels):
            piece = out[row, place]
            largest(self._convolved(patches, filters[row], task, place), out=piece)
            piece.relu_()
        return out.unflatten(1, patches.shape), Kept(filters, scale, deviation, spread)

    def backward(self, g: Tensor, out: Tensor, patches: Patches, weights: BlockWeights, kept: Kept) -> BlockWeights:
        """Gradients with respect to the weights, from that of the outputs `out`."""
        rows, size, channels = kept.filters.shape
        g, out = g.reshape(rows, -1, channels), out.flatten(1, -2)
        sums = g.new_zeros(rows, channels, size)
        for row, task, place in self._pieces(patches, rows, channels):
            arriving = torch.ops.aten.threshold_backward(g[row, place], out[row, place], 0)
            parts = shares(arriving, self._convolved(patches, kept.filters[row], task, place))
            for windows, part in zip(patches.windows, parts, strict=True):
                sums[row].baddbmm_(part.transpose(1, 2), windows[task, place])
        exact = sums.double()
        moved, dbeta = exact[..., :-1], exact[..., -1]
        w = weights.weight.flatten(2).double()
        dgamma = (w * moved).sum(-1) * kept.deviation
        dw = (moved - kept.spread * (dgamma * kept.deviation).unsqueeze(-1)) * kept.scale.unsqueeze(-1)
        dtype = weights.weight.dtype
        return BlockWeights(dw.to(dtype).view_as(weights.weight), g.new_zeros(()).expand(rows, channels), dgamma.to(dtype), dbeta.to(dtype))

    @staticmethod
    def _convolved(patches: Patches, filters: Tensor, task: slice, place: slice) -> list[Tensor]:
        return [torch.bmm(windows[task, place], filters) for windows in patches.windows]

    @staticmethod
    def _pieces(patches: Patches, rows: int, channels: int) -> Iterator[tuple[slice, slice, slice]]:
        """Rows, their tasks, and windows, in pieces that stay in the cache."""
        number, tasks, places, _ = patches.windows.shape
        size = number * channels * places
        each = math.ceil(tasks / math.ceil(tasks * size / IN_CACHE)) if size < IN_CACHE else 1
        step = math.ceil(places / math.ceil(size / IN_CACHE))
        for nudge in range(0, rows, tasks):
            for first in range(0, tasks, each):
                last = min(first + each, tasks)
                for place in range(0, places, step):
                    yield slice(nudge + first, nudge + last), slice(first, last), slice(place, place + step)
