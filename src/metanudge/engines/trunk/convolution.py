"""Convolutions with one weight a row, channels last: `(rows, examples, *spatial, channels)`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from metanudge.engines.trunk.match import Block

NARROW = 16  # up to so many channels two neighbouring outputs from one window are faster than one


class Convolution(Protocol):
    """A convolution and its derivative."""

    def forward(self, z: Tensor, weight: Tensor) -> Tensor:
        """`(rows, examples, *convolved, out_channels)`, a tensor that nobody else holds."""

    def backward(self, g: Tensor, z: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients with respect to `z` and to the weight."""


class Columns:
    """Copies every window into a line of a matrix and multiplies: best where a row has little data, since all rows go at once."""

    def __init__(self, block: Block) -> None:
        self._kernel = block.kernel
        self._padding = block.padding

    def forward(self, z: Tensor, weight: Tensor) -> Tensor:
        """The product of windows and filters."""
        spatial = [n + 2 * p - k + 1 for n, p, k in zip(z.shape[2:-1], self._padding, self._kernel, strict=True)]
        side_by_side = self._side_by_side(weight.shape[1], spatial)
        filters = _repeated(weight.movedim((2, 1), (-2, -1)), side_by_side)
        y = torch.bmm(self._windows(z, self._padding, side_by_side), filters)
        return y.view(*z.shape[:2], *spatial, -1)

    def backward(self, g: Tensor, z: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Windows of the gradient serve both: times the mirrored filters, and times the inputs."""
        axes = tuple(range(3, 3 + len(self._kernel)))
        side_by_side = self._side_by_side(weight.shape[2], z.shape[2:-1])
        windows = self._windows(g, tuple(k - 1 - p for k, p in zip(self._kernel, self._padding, strict=True)), side_by_side)
        filters = _repeated(weight.flip(axes).movedim((1, 2), (-2, -1)), side_by_side)
        dz = torch.bmm(windows, filters).view_as(z)
        dw = torch.bmm(z.view(len(z), -1, side_by_side * z.shape[-1]).transpose(1, 2), windows)
        *outer, last = self._kernel
        dw = dw.view(len(z), side_by_side, z.shape[-1], *outer, last + side_by_side - 1, -1)
        taps = [dw[:, i].narrow(-2, i, last) for i in range(side_by_side)]
        return dz, (taps[0] if side_by_side == 1 else taps[0] + taps[1]).movedim(-1, 1).flip(axes)

    @staticmethod
    def _side_by_side(channels: int, spatial: Sequence[int]) -> int:
        """How many neighbouring outputs come from one window. Two cost a third more products, but a third fewer copies."""
        return 2 if channels <= NARROW and spatial[-1] % 2 == 0 else 1

    def _windows(self, z: Tensor, padding: tuple[int, ...], side_by_side: int) -> Tensor:
        """Every window a line, `(rows, examples × *spatial / side_by_side, *kernel × channels)`; negative padding crops."""
        z = _padded(z, padding)
        rows, examples, *sizes, channels = z.shape
        *outer, last = self._kernel
        *lines, columns = (n - k + 1 for n, k in zip(sizes, self._kernel, strict=True))
        *over, along = z.stride()[2:-1]
        # The last kernel axis and the channels lie side by side in memory, so that copies go in long runs.
        windows = z.as_strided(
            (rows, examples, *lines, columns // side_by_side, *outer, (last + side_by_side - 1) * channels),
            (*z.stride()[:2], *over, along * side_by_side, *over, 1),
        )
        return windows.reshape(rows, -1, math.prod(outer) * (last + side_by_side - 1) * channels)


def _padded(z: Tensor, padding: tuple[int, ...]) -> Tensor:
    if min(padding) < 0:
        return F.pad(z, (0, 0, *(p for size in reversed(padding) for p in (size, size))))
    if not any(padding):
        return z
    out = z.new_empty(*z.shape[:2], *(n + 2 * p for n, p in zip(z.shape[2:-1], padding, strict=True)), z.shape[-1])
    inside = out
    for axis, p in enumerate(padding, 2):
        inside.narrow(axis, 0, p).zero_()
        inside.narrow(axis, inside.shape[axis] - p, p).zero_()
        inside = inside.narrow(axis, p, z.shape[axis])
    inside.copy_(z)
    return out


def _repeated(filters: Tensor, side_by_side: int) -> Tensor:
    """Filters `(rows, *kernel, in, out)` as matrices; for two outputs side by side a second time, moved on by one."""
    if side_by_side == 1:
        return filters.flatten(1, -2)
    rows, *outer, last, channels, out = filters.shape
    both = filters.new_zeros(rows, *outer, last + 1, channels, 2, out)
    both[..., :last, :, 0, :] = filters
    both[..., 1:, :, 1, :] = filters
    return both.view(rows, -1, 2 * out)


class Native:
    """torch's own convolution, row by row: best where one row keeps the processor busy. Two spatial axes."""

    def __init__(self, block: Block) -> None:
        self._padding = list(block.padding)

    def forward(self, z: Tensor, weight: Tensor) -> Tensor:
        """One convolution a row."""
        return _stacked([F.conv2d(_images(x), w, None, 1, self._padding) for x, w in zip(z, weight, strict=True)])

    def backward(self, g: Tensor, z: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """One derivative a row."""
        options = (None, [1, 1], self._padding, [1, 1], False, [0, 0], 1, [True, True, False])
        parts = [
            torch.ops.aten.convolution_backward(_images(dy), _images(x), w, *options) for dy, x, w in zip(g, z, weight, strict=True)
        ]
        return _stacked([part[0] for part in parts]), torch.stack([part[1] for part in parts])


def _images(x: Tensor) -> Tensor:
    """`(examples, height, width, channels)` as torch's convolutions see images whose channels lie last in memory."""
    return x.permute(0, 3, 1, 2)


def _stacked(images: list[Tensor]) -> Tensor:
    """The inverse, for a list of rows."""
    if len(images) == 1:
        return images[0].permute(0, 2, 3, 1).contiguous().unsqueeze(0)
    return torch.stack([image.permute(0, 2, 3, 1) for image in images])
