"""The first block. Its inputs are data, so that everything about them is prepared once for all
steps and nudges.

With the data's windows x centred (Σ x = 0) and C = mean(x xᵀ), a filter w gives outputs of mean 0
and variance wᵀCw: BatchNorm is known before the convolution and goes into the filters, a = γ/σ. The
block is then relu(pool([a w, β] · [x, 1])), and backwards one product

    [S, s] = Σ g_winner [x, 1]

gives all gradients: dβ = s, dγ = wᵀS/σ, dw = a(S − Cw·wᵀS/σ²). The convolution is made piece by
piece, and again on the way back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from metanudge.accel.trunk.blocks import Block, BlockWeights
from metanudge.accel.trunk.groups import Groups
from metanudge.accel.trunk.later_block import rectified
from metanudge.accel.trunk.padded import Padded
from metanudge.accel.trunk.pooling import largest, parities, share
from metanudge.accel.twice import windows_of

# numbers of a piece of the convolution: what the passes over it find in a core's cache
IN_CACHE = 1 << 19
# bytes of one task's windows that are kept for all steps instead of being made anew in each
LARGEST_KEPT = 1 << 20


@dataclass(frozen=True)
class Patches:
    """The windows of a data set, or of several, and their covariances; one line for each group of
    each task.
    """

    # those that are pooled, centred, by phase, with a one at the end:
    windows: Callable[[], Tensor]
    # (tasks × groups, phases, examples of a group × pooled, in_channels × kernel + 1)
    covariance: Tensor  # (tasks × groups, in_channels × kernel, in_channels × kernel), float64
    shape: tuple[int, ...]  # (examples, *pooled)
    groups: Groups

    @staticmethod
    def joined(parts: Sequence[Patches]) -> Patches:
        """Several sets of the same tasks as one, group by group."""
        found = [part.windows() for part in parts]
        groups = Groups.of([part.shape[0] for part in parts], found[0])
        cut = [
            windows.unflatten(2, (k, -1)).transpose(1, 2)
            for windows, k in zip(found, groups.sizes, strict=True)
        ]
        spread = [
            part.covariance.unsqueeze(1).expand(-1, k, -1, -1)
            for part, k in zip(parts, groups.sizes, strict=True)
        ]
        windows, covariance = (torch.cat(each, 1).flatten(0, 1) for each in (cut, spread))
        return Patches(
            lambda: windows,
            covariance,
            (sum(part.shape[0] for part in parts), *parts[0].shape[1:]),
            groups,
        )


@dataclass
class Kept:
    """What the backward pass needs from the forward pass."""

    groups: Groups
    windows: Tensor  # as in `Patches`; tasks and rows are from here on those of each group
    # piece by piece, phase by phase, (tasks, places, out_channels); empty where that is much
    convolved: list[list[Tensor]]
    w: Tensor  # the filters as they are, (rows, out_channels, in_channels × kernel)
    filters: Tensor  # [a w, β], (rows, in_channels × kernel + 1, out_channels)
    scale: Tensor  # a = γ/σ, (rows, out_channels, 1)
    deviation: Tensor  # 1/σ, (rows, out_channels, 1)
    spread: Tensor  # Cw, (rows, out_channels, in_channels × kernel)


class FirstBlock:
    """One block on data."""

    def __init__(self, block: Block) -> None:
        self._block = block

    def prepare(self, inputs: Tensor) -> Patches:
        """Windows and their covariance, from inputs `(tasks, examples, channels, *spatial)`."""
        kernel, padding = self._block.kernel, self._block.padding
        x = windows_of(inputs, kernel, padding)  # (tasks, examples, *convolved, channels, *kernel)
        tasks, examples, *convolved = x.shape[: 2 + len(kernel)]
        size = x[0, 0].numel() // math.prod(convolved)
        number = examples * math.prod(convolved)
        # Moments about the channel's mean, which is nearly that of each entry (zeros at the border
        # apart), so that nothing cancels.
        centre = (
            inputs.flatten(3)
            .mean((1, 3), dtype=torch.float64)
            .repeat_interleave(math.prod(kernel), 1)
            .unsqueeze(1)
        )
        rest, products = centre.new_zeros(tasks, 1, size), centre.new_zeros(tasks, size, size)
        for part in x.split(math.ceil(IN_CACHE / (tasks * math.prod(convolved) * size)), 1):
            shifted = part.reshape(tasks, -1, size) - centre
            rest += shifted.sum(1, keepdim=True) / number
            products.baddbmm_(shifted.transpose(1, 2), shifted, alpha=1 / number)
        covariance = products.baddbmm_(rest.transpose(1, 2), rest, alpha=-1)
        mean = (centre + rest).to(x.dtype)
        shape = (examples, *(n // 2 for n in convolved))
        make = partial(_windows, x, mean, shape)
        kept = make() if math.prod(x.shape[1:]) * x.element_size() <= LARGEST_KEPT else None
        return Patches(
            make if kept is None else lambda: kept, covariance, shape, Groups((1,), None)
        )

    def forward(
        self, patches: Patches, weights: BlockWeights, border: tuple[int, ...]
    ) -> tuple[Padded, Kept]:
        """Outputs `(rows, examples, *pooled, out_channels)`, with a border around them."""
        weight, _, gamma, beta = weights
        groups = patches.groups
        w, gamma, beta = (
            None if leaf is None else groups.each(leaf) for leaf in (weight.flatten(2), gamma, beta)
        )
        assert w is not None
        exact = w.double()
        spread = torch.matmul(
            exact.unflatten(0, (-1, len(patches.covariance))), patches.covariance
        ).flatten(0, 1)
        variance = torch.linalg.vecdot(exact, spread).clamp_min_(0)
        deviation = variance.add_(self._block.eps).rsqrt_().to(w.dtype).unsqueeze(-1)
        scale = deviation if gamma is None else deviation * gamma.unsqueeze(-1)
        shift = torch.zeros_like(scale) if beta is None else beta.unsqueeze(-1)
        filters = torch.cat([w * scale, shift], -1).transpose(1, 2).contiguous()
        windows = patches.windows()
        out = filters.new_empty(len(filters), windows.shape[2], filters.shape[2])
        pieces: list[list[Tensor]] = []
        for rows, tasks, place in _pieces(windows, filters):
            convolved = _convolved(windows[tasks, :, place], filters[rows])
            largest(convolved, out=out[rows, place])
            if out.numel() <= IN_CACHE:
                pieces.append(convolved)
        kept = Kept(groups, windows, pieces, w, filters, scale, deviation, spread.to(w.dtype))
        return rectified(out.view(len(weight), *patches.shape, -1), border), kept

    def backward(self, g: Tensor, out: Tensor, kept: Kept) -> BlockWeights:
        """Gradients with respect to the weights, from that of the outputs `out`. Overwrites what
        was kept.
        """
        filters = kept.filters
        g = torch.ops.aten.threshold_backward(g, out, 0).view(len(filters), -1, filters.shape[2])
        sums = torch.zeros_like(filters)
        for at, (rows, tasks, place) in enumerate(_pieces(kept.windows, filters)):
            windows = kept.windows[tasks, :, place]
            convolved = kept.convolved[at] if kept.convolved else _convolved(windows, filters[rows])
            share(g[rows, place], convolved)
            for phase, part in zip(windows.unbind(1), convolved, strict=True):
                # this way round it is twice as fast
                sums[rows].baddbmm_(phase.transpose(1, 2), part)
        moved, dbeta = sums[:, :-1].transpose(1, 2), sums[:, -1]
        dgamma = torch.linalg.vecdot(kept.w, moved).unsqueeze(-1) * kept.deviation
        dw = torch.addcmul(moved, kept.spread, dgamma * kept.deviation, value=-1).mul_(kept.scale)
        dw, dgamma, dbeta = (kept.groups.total(leaf) for leaf in (dw, dgamma.squeeze(-1), dbeta))
        return BlockWeights(dw.unflatten(2, (-1, *self._block.kernel)), None, dgamma, dbeta)


def _windows(x: Tensor, mean: Tensor, shape: tuple[int, ...]) -> Tensor:
    """From all windows `(tasks, examples, *convolved, in_channels, *kernel)` and their mean
    `(tasks, 1, in_channels × kernel)`.
    """
    tasks, _, size = mean.shape
    examples, *pooled = shape
    windows = mean.new_empty(tasks, 2 ** len(pooled), examples * math.prod(pooled), size + 1)
    for phase, parity in zip(windows.unbind(1), parities(tuple(pooled)), strict=True):
        torch.sub(x[parity].reshape(tasks, -1, size), mean, out=phase[..., :-1])
    windows[..., -1] = 1.0
    return windows


def _convolved(windows: Tensor, filters: Tensor) -> list[Tensor]:
    """The phases, `(tasks, places, out_channels)` each."""
    return [torch.bmm(phase, filters) for phase in windows.unbind(1)]


def _pieces(windows: Tensor, filters: Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """Rows, their tasks, and windows, in pieces that stay in the cache."""
    tasks, number, places, _ = windows.shape
    size = number * filters.shape[2] * places
    each = math.ceil(tasks / math.ceil(tasks * size / IN_CACHE)) if size < IN_CACHE else 1
    step = math.ceil(places / math.ceil(size / IN_CACHE))
    for nudge in range(0, len(filters), tasks):
        for first in range(0, tasks, each):
            last = min(first + each, tasks)
            for place in range(0, places, step):
                yield (
                    slice(nudge + first, nudge + last),
                    slice(first, last),
                    slice(place, place + step),
                )
