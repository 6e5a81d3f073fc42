"""Convolutions with one weight a row, channels last: `(rows, examples, *spatial, channels)`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from metanudge.accel.trunk.blocks import Block
from metanudge.accel.trunk.padded import Padded

NARROW = 16  # up to so many channels two neighbouring outputs from one window are faster than one


class Convolution(Protocol):
    """A convolution and its derivative."""

    @property
    def border(self) -> tuple[int, ...]:
        """Zeros it needs around its inputs."""

    def held(self, convolved: Sequence[int]) -> int:
        """How many numbers it keeps for one example of a row, besides inputs and outputs."""

    def forward(self, z: Padded, weight: Tensor, sign: Tensor | None) -> tuple[Tensor, Any]:
        """`(rows, examples, *convolved, out_channels)`, which the caller may overwrite, and what
        the derivative needs.

        The outputs are multiplied by `sign`, `(rows, out_channels)`.
        """

    def backward(self, g: Tensor, z: Padded, kept: Any) -> tuple[Tensor, Tensor]:
        """Gradients with respect to the inputs and to weight × sign, from that of the outputs."""


class Columns:
    """Copies every window into a line of a matrix and multiplies: best where a row has little data,
    since all rows go at once.
    """

    def __init__(self, block: Block) -> None:
        self._kernel = block.kernel
        self._channels = block.conv.in_channels
        self.border = block.padding

    def held(self, convolved: Sequence[int]) -> int:
        """The windows."""
        return math.prod(convolved) * math.prod(self._kernel) * self._channels

    def forward(self, z: Padded, weight: Tensor, sign: Tensor | None) -> tuple[Tensor, Any]:
        """The product of windows and filters."""
        rows, examples, *sizes, _ = z.whole.shape
        spatial = [n - k + 1 for n, k in zip(sizes, self._kernel, strict=True)]
        m = self._side_by_side(weight.shape[1], spatial)
        windows, filters = self._windows(z.whole, spatial, m), _filters(weight, sign, m)
        return torch.bmm(windows, filters).view(rows, examples, *spatial, -1), (windows, filters)

    def backward(self, g: Tensor, z: Padded, kept: Any) -> tuple[Tensor, Tensor]:
        """The same two matrices, and the windows' gradients put back where they came from."""
        windows, filters = kept
        rows, examples, *spatial, out = g.shape
        channels, m, (*outer, last) = z.whole.shape[-1], filters.shape[2] // out, self._kernel
        g = g.view(rows, -1, m * out)
        dw = torch.bmm(windows.transpose(1, 2), g).view(
            rows, *outer, last + m - 1, channels, m, out
        )
        taps = [dw[..., i, :].narrow(-3, i, last) for i in range(m)]
        dw = taps[0] if m == 1 else taps[0] + taps[1]
        parts = torch.bmm(g, filters.transpose(1, 2)).view(
            rows, examples, *spatial[:-1], spatial[-1] // m, *outer, -1, m * channels
        )
        return _inside(self._put_back(parts, z.whole, m), self.border), dw.movedim((-1, -2), (1, 2))

    def _put_back(self, parts: Tensor, like: Tensor, m: int) -> Tensor:
        """Every entry of `like` with the sum of what the windows it was copied to have, chunks of m
        entries at a time.
        """
        *outer, _ = self._kernel
        *lines, columns = parts.shape[2 : 3 + len(outer)]
        # a chunk is the second of one window and the first of the next
        if not outer and parts.shape[-2] == 2:
            whole = torch.empty_like(like)
            chunks, (first, second) = (
                whole.view(*parts.shape[:2], columns + 1, -1),
                parts.unbind(-2),
            )
            torch.add(first[:, :, 1:], second[:, :, :-1], out=chunks[:, :, 1:-1])
            chunks[:, :, 0], chunks[:, :, -1] = first[:, :, 0], second[:, :, -1]
            return whole
        whole = torch.zeros_like(like)
        chunks = whole.view(*whole.shape[:-2], -1, parts.shape[-1])
        for place in product(*(range(k) for k in outer), range(parts.shape[-2])):
            target, part = chunks, parts
            for axis, (begin, size) in enumerate(zip(place, (*lines, columns), strict=True), 2):
                target = target.narrow(axis, begin, size)
            for index in reversed(place):
                part = part.select(-2, index)
            target.add_(part)
        return whole

    def _side_by_side(self, channels: int, spatial: Sequence[int]) -> int:
        """How many neighbouring outputs come from one window. Two cost a third more products, but a
        third fewer copies.
        """
        return 2 if channels <= NARROW and spatial[-1] % 2 == 0 and self._kernel[-1] % 2 else 1

    def _windows(self, z: Tensor, spatial: Sequence[int], m: int) -> Tensor:
        """Every window a line, `(rows, examples × *spatial / m, *kernel × channels)`."""
        rows, examples, *_, channels = z.shape
        *lines, columns = spatial
        *outer, last = self._kernel
        *over, along = z.stride()[2:-1]
        # The last kernel axis and the channels lie side by side in memory, so that copies go in
        # long runs.
        windows = z.as_strided(
            (rows, examples, *lines, columns // m, *outer, (last + m - 1) * channels),
            (*z.stride()[:2], *over, along * m, *over, 1),
        )
        return windows.reshape(rows, -1, math.prod(outer) * (last + m - 1) * channels)


def _filters(weight: Tensor, sign: Tensor | None, m: int) -> Tensor:
    """Filters as matrices, `(rows, *kernel × in, m × out)`; for two outputs side by side a second
    time, moved on by one.
    """
    rows, out, channels, *outer, last = weight.shape
    filters = weight.new_empty if m == 1 else weight.new_zeros
    both = filters(rows, *outer, last + m - 1, channels, m, out)
    first = both[..., 0, :].narrow(-3, 0, last)
    first.copy_(weight.movedim((1, 2), (-1, -2)))
    if sign is not None:
        first.mul_(sign.view(rows, *[1] * (len(outer) + 2), out))
    if m == 2:
        both[..., 1, :].narrow(-3, 1, last).copy_(first)
    return both.view(rows, -1, m * out)


def _inside(whole: Tensor, border: tuple[int, ...]) -> Tensor:
    for axis, p in enumerate(border, 2):
        whole = whole.narrow(axis, p, whole.shape[axis] - 2 * p)
    return whole


class Native:
    """torch's own convolution, row by row: best where one row keeps the processor busy. Two spatial
    axes.
    """

    def __init__(self, block: Block) -> None:
        self._padding = list(block.padding)
        self.border = (0, 0)

    def held(self, convolved: Sequence[int]) -> int:
        """Nothing."""
        return 0

    def forward(self, z: Padded, weight: Tensor, sign: Tensor | None) -> tuple[Tensor, Any]:
        """One convolution a row."""
        turned = weight if sign is None else weight * sign.view(*weight.shape[:2], 1, 1, 1)
        return (
            _stacked(
                [
                    F.conv2d(_images(x), w, None, 1, self._padding)
                    for x, w in zip(z.whole, turned, strict=True)
                ]
            ),
            turned,
        )

    def backward(self, g: Tensor, z: Padded, kept: Any) -> tuple[Tensor, Tensor]:
        """One derivative a row."""
        options = (None, [1, 1], self._padding, [1, 1], False, [0, 0], 1, [True, True, False])
        parts = [
            torch.ops.aten.convolution_backward(_images(dy), _images(x), w, *options)
            for dy, x, w in zip(g, z.whole, kept, strict=True)
        ]
        return _stacked([part[0] for part in parts]), torch.stack([part[1] for part in parts])


def _images(x: Tensor) -> Tensor:
    """`(examples, height, width, channels)` as torch's convolutions see images whose channels lie
    last in memory.
    """
    return x.permute(0, 3, 1, 2)


def _stacked(images: list[Tensor]) -> Tensor:
    """The inverse, for a list of rows."""
    if len(images) == 1:
        return images[0].permute(0, 2, 3, 1).contiguous().unsqueeze(0)
    return torch.stack([image.permute(0, 2, 3, 1) for image in images])
