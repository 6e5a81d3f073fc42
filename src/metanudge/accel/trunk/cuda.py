"""The trunk on a CUDA device, in Triton kernels (see `kernels` and `first_kernels`).

What it leaves out makes it fast: the first layer's full-size activations are never written (its
statistics follow from moments of the data, its outputs are cheap to make again), every other
full-size activation is written once and read by fused kernels only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
from torch import Tensor

from metanudge.accel.trunk import first_kernels, kernels
from metanudge.accel.trunk.blocks import Block, BlockWeights, Places, Tail, Trunk
from metanudge.accel.trunk.launches import (
    ENOUGH_PROGRAMS,
    Gradients,
    Shape,
    affine,
    scale_and_shift,
    shapes_of,
    shares_of,
    tile_of,
)
from metanudge.accel.trunk.tail import normalise_and_pool

_LARGEST_PATCH = 31  # numbers in a first layer's patch: with a 1 after it, two tensor-core tiles


@dataclass(frozen=True)
class _Prepared:
    images: Tensor  # (tasks, examples, height, width, channels)
    means: Tensor | None  # moments of the first layer's patches, where that layer is small enough
    covariance: Tensor | None
    shapes: tuple[Shape, ...]
    spatial: int


@dataclass(frozen=True)
class _Kept:
    """What the way back needs of one block."""

    x: Tensor
    weight: Tensor
    z: Tensor
    coefficients: Tensor
    pick: Tensor


class CUDATrunk(Trunk):
    """All blocks as one operation on a CUDA device.

    Args:
        blocks: what to run.
        precision: `"full"`: float32 throughout. `"tf32"`: factors of matrix products are kept in
            float16, gradients scaled row by row; that is TF32's precision at half its size. Of a
            small first layer's factors only the data are rounded (all other errors would go through
            all layers). `"bf16"`: all activations in bfloat16. Sums and statistics are float32
            always.
    """

    def __init__(
        self, blocks: Sequence[Block], *, precision: Literal["full", "tf32", "bf16"] = "full"
    ) -> None:
        self._blocks = tuple(blocks)
        self._factors = {"full": torch.float32, "tf32": torch.float16, "bf16": torch.bfloat16}[
            precision
        ]
        self._between = torch.bfloat16 if precision == "bf16" else torch.float32
        self._first_precision = {"full": "tf32x3", "tf32": "tf32x2", "bf16": "tf32"}[precision]
        self._scaled = precision == "tf32"

    def prepare(self, inputs: Tensor) -> _Prepared:
        """Channels last, and the moments of the first layer's patches."""
        spatial = inputs.ndim - 3
        x = inputs if spatial == 2 else inputs.unsqueeze(-2)
        shapes = tuple(shapes_of(self._blocks, x.shape[1], (x.shape[3], x.shape[4])))
        images = x.permute(0, 1, 3, 4, 2).float().contiguous()
        first = shapes[0]
        if first.patch > _LARGEST_PATCH:
            return _Prepared(images.to(self._factors), None, None, shapes, spatial)
        return _Prepared(images, *_moments(images, first), shapes, spatial)

    @property
    def tail(self) -> Tail | None:
        """One operation for images."""
        return normalise_and_pool if len(self._blocks[0].kernel) == 2 else None

    @staticmethod
    def order(block: Block) -> tuple[int, ...] | None:
        """How this block's weights best lie in memory: a matrix for every place in the kernel,
        except in a small first layer.
        """
        if block.conv.in_channels * math.prod(block.kernel) <= _LARGEST_PATCH:
            return None
        return (*range(2, 2 + len(block.kernel)), 0, 1)

    def outputs(
        self,
        prepared: _Prepared,
        weights: Sequence[BlockWeights],
        into: Sequence[Places] | None = None,
    ) -> Tensor:
        """Outputs `(rows, examples, channels, *spatial)`."""
        y: Tensor = _Run.apply(self, prepared, into, *(leaf for block in weights for leaf in block))
        y = y.permute(0, 1, 4, 2, 3)
        return y if prepared.spatial == 2 else y.squeeze(-2)

    def forward(
        self, prepared: _Prepared, weights: list[BlockWeights]
    ) -> tuple[Tensor, list[_Kept], Tensor | None]:
        """The outputs, channels last, and what the way back needs: of each later block, and the
        first block's choices.
        """
        kept: list[_Kept] = []
        pick: Tensor | None = None
        x = prepared.images
        for n, (shape, block) in enumerate(zip(prepared.shapes, weights, strict=True)):
            dtype = self._factors if n + 1 < len(weights) else torch.float32
            if n == 0 and prepared.means is not None:
                x, pick = self._first(prepared, shape, block, dtype)
            else:
                x, memory = self._later(shape, x, block, dtype)
                kept.append(memory)
        return x, kept, pick

    def backward(
        self,
        prepared: _Prepared,
        weights: list[BlockWeights],
        into: Sequence[Places] | None,
        kept: list[_Kept],
        pick: Tensor | None,
        dy: Tensor,
    ) -> list[Tensor | None]:
        """Gradients of all weights in the order of the blocks."""
        gradients = [
            Gradients.of(block, None if into is None else into[n])
            for n, block in enumerate(weights)
        ]
        offset = len(weights) - len(kept)
        for n in reversed(range(len(kept))):
            shape, block, memory = prepared.shapes[n + offset], weights[n + offset], kept.pop()
            dx = self._later_backward(
                shape, block, gradients[n + offset], memory, dy, inputs=n + offset > 0
            )
            del memory
            if dx is not None:
                dy = dx
        if pick is not None:
            self._first_backward(prepared, weights[0], gradients[0], pick, dy)
        return [
            leaf
            for block, found in zip(weights, gradients, strict=True)
            for leaf in found.wanted(block)
        ]

    def _first(
        self, prepared: _Prepared, shape: Shape, block: BlockWeights, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        weight, gamma, beta = affine(block)
        rows, width = weight.shape[0], kernels.width(shape.co)
        columns = triton.cdiv(shape.co, width)
        coefficients = weight.new_empty((rows, 2, shape.co))
        first_kernels.first_normalisation[(rows, columns)](
            weight, gamma, beta, prepared.means, prepared.covariance, coefficients,
            len(prepared.images), weight.stride(0), gamma.stride(0), beta.stride(0), shape.eps,
            CO=shape.co, FEATURES=shape.patch, BLOCK_F=shape.padded_patch, BLOCK_N=width,
            num_warps=4,
        )  # fmt: skip
        out = weight.new_empty((rows, shape.examples, *shape.pooled, shape.co), dtype=dtype)
        pick = weight.new_empty(out.shape, dtype=torch.uint8)
        tiles, share = shares_of(shape.entries, 64, rows * columns)
        first_kernels.first_forward[(tiles, rows, columns)](
            prepared.images, weight, coefficients, out, pick, len(prepared.images),
            weight.stride(0), shape.entries, share,
            *shape.before, *shape.pooled, CO=shape.co, CI=shape.ci, KH=shape.kernel[0],
            KW=shape.kernel[1],
            PAD_H=shape.padding[0], PAD_W=shape.padding[1], PH=shape.pool[0], PW=shape.pool[1],
            PRECISION=self._first_precision,
            BLOCK_Q=shape.padded_window, BLOCK_P=64, BLOCK_N=width, num_warps=4,
        )  # fmt: skip
        return out, pick

    def _first_backward(
        self, prepared: _Prepared, block: BlockWeights, found: Gradients, pick: Tensor, dy: Tensor
    ) -> None:
        shape = prepared.shapes[0]
        weight, gamma, beta = affine(block)
        rows, tasks, width = weight.shape[0], len(prepared.images), kernels.width(shape.co)
        columns = triton.cdiv(shape.co, width)
        tiles, share = shares_of(shape.entries, 64, rows * columns, programs=2 * ENOUGH_PROGRAMS)
        sums = weight.new_empty((rows, tiles, shape.padded_patch, shape.co))
        ones = weight.new_empty((rows, tiles, shape.co))
        first_kernels.first_sums_backward[(tiles, rows, columns)](
            prepared.images, pick, dy, sums, ones, tasks, shape.entries, tiles, share,
            *shape.before, *shape.pooled, CO=shape.co, CI=shape.ci, KH=shape.kernel[0],
            KW=shape.kernel[1],
            PAD_H=shape.padding[0], PAD_W=shape.padding[1], PH=shape.pool[0], PW=shape.pool[1],
            PRECISION=self._first_precision,
            BLOCK_F=shape.padded_patch, BLOCK_Q=shape.padded_window, BLOCK_P=64, BLOCK_N=width,
            num_warps=4,
        )  # fmt: skip
        assert found.weight[0].is_contiguous()  # see `order`
        first_kernels.first_backward[(rows, columns)](
            sums, ones, weight, gamma, beta, prepared.means, prepared.covariance, found.weight,
            found.gamma, found.beta, found.bias,
            tasks, tiles, weight.stride(0), gamma.stride(0), beta.stride(0),
            found.weight.stride(0), found.gamma.stride(0), found.beta.stride(0),
            found.bias.stride(0),
            shape.eps,
            CO=shape.co, FEATURES=shape.patch, BIAS=block.bias is not None,
            BLOCK_F=shape.padded_patch, BLOCK_N=width, num_warps=4,
        )  # fmt: skip

    def _later(
        self, shape: Shape, x: Tensor, block: BlockWeights, dtype: torch.dtype
    ) -> tuple[Tensor, _Kept]:
        weight, (gamma, beta) = block.weight, scale_and_shift(block)
        rows, width = weight.shape[0], kernels.width(shape.co)
        columns = triton.cdiv(shape.co, width)
        packed = self._packed(shape, weight)
        tile = tile_of(shape.pixels)
        tiles = triton.cdiv(shape.pixels, tile)
        z = weight.new_empty((rows, shape.examples, *shape.after, shape.co), dtype=self._between)
        stats = weight.new_empty((rows, tiles, 2, shape.co))
        self._convolve(shape, x, packed, z, stats, back=False)
        coefficients = weight.new_empty((rows, 4, shape.co))
        kernels.normalisation[(rows, columns)](
            stats, gamma, beta, coefficients, shape.pixels, tiles, gamma.stride(0), beta.stride(0),
            shape.eps,
            CO=shape.co, TILE=tile, BLOCK_T=16, BLOCK_N=width, num_warps=4,
        )  # fmt: skip
        out = weight.new_empty((rows, shape.examples, *shape.pooled, shape.co), dtype=dtype)
        pick = weight.new_empty(out.shape, dtype=torch.uint8)
        kernels.normalise_and_pool[(triton.cdiv(shape.entries, 32), rows, columns)](
            z, coefficients, out, pick, shape.entries, *shape.after, *shape.pooled,
            CO=shape.co, PH=shape.pool[0], PW=shape.pool[1], BLOCK_P=32, BLOCK_N=width, num_warps=4,
        )  # fmt: skip
        return out, _Kept(x, packed, z, coefficients, pick)

    def _later_backward(
        self,
        shape: Shape,
        block: BlockWeights,
        found: Gradients,
        kept: _Kept,
        dy: Tensor,
        *,
        inputs: bool,
    ) -> Tensor | None:
        weight = block.weight
        rows, width = weight.shape[0], kernels.width(shape.co)
        columns, tiles = triton.cdiv(shape.co, width), triton.cdiv(shape.entries, 64)
        sums = weight.new_empty((rows, tiles, 3, shape.co), dtype=torch.float32)
        sizes = (*shape.after, *shape.pooled)
        kernels.sums_backward[(tiles, rows, columns)](
            kept.z, kept.coefficients, kept.pick, dy, sums, shape.entries, *sizes, tiles,
            CO=shape.co, PH=shape.pool[0], PW=shape.pool[1], BLOCK_P=64, BLOCK_N=width, num_warps=4,
        )  # fmt: skip
        factor = weight.new_empty((rows,), dtype=torch.float32)
        kernels.normalisation_backward[(rows,)](
            sums, kept.coefficients, found.gamma, found.beta, found.bias, factor,
            tiles, found.gamma.stride(0), found.beta.stride(0), found.bias.stride(0),
            CO=shape.co, BIAS=block.bias is not None, SCALED=self._scaled, BLOCK_T=16,
            BLOCK_N=width, num_warps=4,
        )  # fmt: skip
        dz = torch.empty_like(kept.z, dtype=self._factors)
        kernels.spread_backward[(triton.cdiv(shape.pixels, 64), rows, columns)](
            kept.z, kept.coefficients, kept.pick, dy, found.gamma, found.beta, factor, dz,
            found.gamma.stride(0), found.beta.stride(0), shape.pixels, *sizes,
            CO=shape.co, PH=shape.pool[0], PW=shape.pool[1], BLOCK_M=64, BLOCK_N=width, num_warps=4,
        )  # fmt: skip
        self._weight_backward(shape, kept.x, dz, factor, found.weight)
        if not inputs:
            return None
        dx = kept.x.new_empty((rows, *kept.x.shape[1:]), dtype=self._between)
        self._convolve(shape, dz, kept.weight, dx, factor, back=True)
        return dx

    def _packed(self, shape: Shape, weight: Tensor) -> Tensor:
        weight = weight.flatten(3)
        packed = weight.new_empty(
            (weight.shape[0], shape.taps, shape.co, shape.ci), dtype=self._factors
        )
        tall, wide = kernels.width(shape.co), kernels.width(shape.ci)
        grid = (
            shape.taps * triton.cdiv(shape.co, tall),
            weight.shape[0],
            triton.cdiv(shape.ci, wide),
        )
        kernels.pack_weights[grid](
            weight, packed, *weight.stride(),
            CO=shape.co, CI=shape.ci, TAPS=shape.taps, BLOCK_CO=tall, BLOCK_CI=wide, num_warps=4,
        )  # fmt: skip
        return packed

    def _convolve(
        self, shape: Shape, x: Tensor, weight: Tensor, out: Tensor, beside: Tensor, *, back: bool
    ) -> None:
        ci, co = (shape.co, shape.ci) if back else (shape.ci, shape.co)
        before, after = (shape.after, shape.before) if back else (shape.before, shape.after)
        pads = tuple(
            k - 1 - p if back else p for k, p in zip(shape.kernel, shape.padding, strict=True)
        )
        pixels = shape.examples * after[0] * after[1]
        tile = tile_of(pixels)
        tiles = triton.cdiv(pixels, tile)
        kernels.convolve[(tiles, weight.shape[0], triton.cdiv(co, kernels.width(co)))](
            x, weight, out, beside, x.shape[0], pixels, *before, *after, tiles,
            CI=ci, CO=co, KH=shape.kernel[0], KW=shape.kernel[1], PAD_H=pads[0], PAD_W=pads[1],
            BACK=back, STATS=not back, PRECISION="tf32x3",
            BLOCK_M=tile, BLOCK_N=kernels.width(co), BLOCK_K=kernels.width(ci), num_warps=4,
            num_stages=3,
        )  # fmt: skip

    def _weight_backward(
        self, shape: Shape, x: Tensor, dz: Tensor, factor: Tensor, found: Tensor
    ) -> None:
        rows, wide, tall = found.shape[0], kernels.width(shape.ci), kernels.width(shape.co)
        blocks = triton.cdiv(shape.ci, wide) * triton.cdiv(shape.co, tall)
        step = 64 if shape.pixels >= 64 else 32
        enough = triton.cdiv(ENOUGH_PROGRAMS, rows * shape.taps * blocks)
        shares = max(1, min(triton.cdiv(shape.pixels, 4 * step), enough))
        share = triton.cdiv(triton.cdiv(shape.pixels, shares), step) * step
        shares = triton.cdiv(shape.pixels, share)
        target = found.flatten(3)  # a view wherever the kernel's axes lie one after the other
        direct = shares == 1 and target.data_ptr() == found.data_ptr()
        out = (
            target.unsqueeze(0)
            if direct
            else found.new_empty((shares, rows, shape.taps, shape.co, shape.ci)).permute(
                0, 1, 3, 4, 2
            )
        )
        kernels.weight_backward[(shape.taps * shares, rows, blocks)](
            x, dz, factor, out, x.shape[0], shape.pixels, *shape.before, *shape.after, share,
            *out.stride(),
            CI=shape.ci, CO=shape.co, KH=shape.kernel[0], KW=shape.kernel[1],
            PAD_H=shape.padding[0], PAD_W=shape.padding[1],
            PRECISION="tf32x3", BLOCK_CI=wide, BLOCK_CO=tall, BLOCK_K=step, num_warps=4,
            num_stages=3,
        )  # fmt: skip
        if not direct:
            found.copy_(out.sum(0).view(found.shape) if shares > 1 else out[0].reshape(found.shape))


class _Run(torch.autograd.Function):
    """The trunk in autograd's terms."""

    @staticmethod
    def forward(
        ctx: Any,
        trunk: CUDATrunk,
        prepared: _Prepared,
        into: Sequence[Places] | None,
        *leaves: Tensor | None,
    ) -> Tensor:
        weights = [BlockWeights(*leaves[n : n + 4]) for n in range(0, len(leaves), 4)]  # type: ignore[arg-type]
        y, ctx.kept, ctx.pick = trunk.forward(prepared, weights)
        ctx.trunk, ctx.prepared, ctx.weights, ctx.into = trunk, prepared, weights, into
        return y

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        found = ctx.trunk.backward(
            ctx.prepared, ctx.weights, ctx.into, ctx.kept, ctx.pick, outputs[0].contiguous()
        )
        ctx.pick = ctx.weights = ctx.into = None
        return (None, None, None, *found)


def _moments(images: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Means `(tasks, features)` and covariances `(tasks, features, features)` of the patches that a
    first layer sees.
    """
    tasks, block, features = len(images), shape.padded_patch, shape.patch
    tiles, share = shares_of(shape.pixels, 32, tasks, programs=16 * ENOUGH_PROGRAMS)
    centre = images.flatten(1).mean(1)
    parts = images.new_empty((tasks, tiles, block, block))
    first_kernels.patch_moments[(tiles, tasks)](
        images, centre, parts, shape.pixels, tiles, share, *shape.before, *shape.after,
        CI=shape.ci, KH=shape.kernel[0], KW=shape.kernel[1], PAD_H=shape.padding[0],
        PAD_W=shape.padding[1],
        BLOCK_F=block, BLOCK_P=32, num_warps=1,
    )  # fmt: skip
    moments = parts.double().sum(1) / shape.pixels
    mean = moments[:, features, :features]
    covariance = moments[:, :features, :features] - mean.unsqueeze(2) * mean.unsqueeze(1)
    mean = mean + centre.double().unsqueeze(1)
    return mean.float().contiguous(), covariance.float().contiguous()
