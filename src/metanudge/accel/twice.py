"""Convolutions that can be differentiated twice with native kernels only.

torch takes second derivatives of a grouped convolution group by group, in a loop; here rows are
groups, and there are many. Both passes are convolutions, and so are the derivatives of the way
back. Where the inputs are data and their patches small, all are matrix products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_FEWEST_CHANNELS = 4  # that cuDNN's kernels on tensor cores take


@dataclass(frozen=True)
class _How:
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """The convolution."""
        return torch.ops.aten.convolution(
            x, weight, None, self.stride, self.padding, self.dilation, False, [0], self.groups
        )

    def backward(
        self, g: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """⟨g, ·⟩ differentiated by x and by the weight, where wanted."""
        how = (self.stride, self.padding, self.dilation, False, [0], self.groups)
        dx, dweight, _ = torch.ops.aten.convolution_backward(
            g, x, weight, None, *how, [*wanted, False]
        )
        return dx, dweight


def convolve(
    layer: nn.Conv1d | nn.Conv2d, x: Tensor, weight: Tensor, groups: int, padding: tuple[int, ...]
) -> Tensor:
    """The layer's convolution with other weights, groups and padding, without its bias."""
    if torch.is_autocast_enabled(x.device.type):
        x, weight = (leaf.to(torch.get_autocast_dtype(x.device.type)) for leaf in (x, weight))
    y: Tensor = _Convolution.apply(x, weight, _How(layer.stride, padding, layer.dilation, groups))
    return y


def on_tensor_cores(x: Tensor, weight: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Images and weights as cuDNN's kernels on tensor cores want them: channels last, and not too
    few of them (zeros do no harm).
    """
    missing = _FEWEST_CHANNELS - weight.shape[1]
    if missing > 0:
        x = F.pad(x.unflatten(1, (groups, -1)), (0, 0, 0, 0, 0, missing)).flatten(1, 2)
        weight = F.pad(weight, (0, 0, 0, 0, 0, missing))
    return x.contiguous(memory_format=torch.channels_last), weight


def windows_of(x: Tensor, kernel: tuple[int, ...], padding: tuple[int, ...]) -> Tensor:
    """What a convolution of stride 1 sees of `(rows, examples, channels, *spatial)`: a view with
    `(*convolved, channels, *kernel)`.
    """
    x = F.pad(x, tuple(p for size in reversed(padding) for p in (size, size)))
    for axis, size in enumerate(kernel, 3):
        x = x.unfold(axis, size, 1)
    return x.movedim(2, 2 + len(kernel))


def patches(x: Tensor, kernel: tuple[int, ...], padding: tuple[int, ...]) -> Tensor:
    """The windows of images as matrices `(rows, pixels, features)`.

    Features are as many as tensor cores want, the last ones zero.
    """
    seen = windows_of(x, kernel, padding).flatten(4)
    found = x.new_zeros((*seen.shape[:4], seen.shape[4] + -seen.shape[4] % _FEWEST_CHANNELS))
    found[..., : seen.shape[4]] = seen
    return found.flatten(1, 3)


def convolve_patches(seen: Tensor, weight: Tensor) -> Tensor:
    """Outputs `(pixels, rows, co)` of a convolution with weights `(rows, co, ci, height, width)` on
    patches without a gradient.
    """
    flat = weight.flatten(2)
    flat = F.pad(flat, (0, seen.shape[2] - flat.shape[2]))
    if torch.is_autocast_enabled(seen.device.type):
        seen, flat = (leaf.to(torch.get_autocast_dtype(seen.device.type)) for leaf in (seen, flat))
    y: Tensor = _Product.apply(seen, flat)
    return y


class _Product(torch.autograd.Function):
    """Outputs `(pixels, rows, co)` from patches `(rows, pixels, features)` and weights `(rows, co,
    features)`.
    """

    @staticmethod
    def forward(ctx: Any, seen: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(seen)
        y = seen.new_empty((seen.shape[1], seen.shape[0], weight.shape[1]))
        torch.bmm(seen, weight.transpose(1, 2), out=y.transpose(0, 1))
        return y

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[None, Tensor]:
        (seen,) = ctx.saved_tensors
        return None, _ProductBack.apply(outputs[0], seen)


class _ProductBack(torch.autograd.Function):
    """The gradient of the weights, and its derivative: the product again."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, seen: Tensor) -> Tensor:
        ctx.save_for_backward(seen)
        return torch.bmm(g.permute(1, 2, 0), seen)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, None]:
        (seen,) = ctx.saved_tensors
        return _Product.apply(seen, outputs[0]), None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, how: _How) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = how
        return how.forward(x, weight)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return *_Back.apply(outputs[0], x, weight, ctx.how, ctx.needs_input_grad[:2]), None


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, g: Tensor, x: Tensor, weight: Tensor, how: _How, wanted: tuple[bool, bool]
    ) -> Any:
        ctx.save_for_backward(g, x, weight)
        ctx.set_materialize_grads(False)
        ctx.how = how
        return how.backward(g, x, weight, wanted)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, along_x: Tensor | None, along_weight: Tensor | None) -> Any:
        """What is linear in g, x and the weight, with one of them replaced by a direction."""
        g, x, weight = ctx.saved_tensors
        dg = dx = dweight = None
        if along_x is not None:
            dg = ctx.how.forward(along_x, weight)
            dweight = ctx.how.backward(g, along_x, weight, (False, True))[1]
        if along_weight is not None:
            more = ctx.how.forward(x, along_weight)
            dg = more if dg is None else dg.add_(more)
            dx = (
                ctx.how.backward(g, x, along_weight, (True, False))[0]
                if ctx.needs_input_grad[1]
                else None
            )
        return dg, dx, dweight, None, None
