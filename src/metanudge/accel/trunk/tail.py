"""What follows a block's convolution, BatchNorm, ReLU and max-pooling by 2, as one operation that
can be differentiated twice (CUDA).

With x̂ = (z − mean) r, r = 1/deviation, and g the gradient of the outputs at the entries that were
chosen (zero elsewhere), all per channel, ⟨·⟩ a mean over examples and pixels:

    first:   dz = γ r (g − ⟨g⟩ − x̂⟨g x̂⟩),   dγ = Σ g x̂,   dβ = Σ g.

Along directions h, h_γ and h_β of these three, the second derivatives are

    of g:    γ r (h − ⟨h⟩ − x̂⟨h x̂⟩) + h_γ x̂ + h_β   at the chosen entries,
    of γ:    Σ h r (g − ⟨g⟩ − x̂⟨g x̂⟩),
    of z:    −γ r² [x̂ (⟨h g⟩ − ⟨h⟩⟨g⟩ − ⟨h x̂⟩⟨g x̂⟩) + ⟨h x̂⟩(g − ⟨g⟩ − x̂⟨g x̂⟩)
             + ⟨g x̂⟩(h − ⟨h⟩ − x̂⟨h x̂⟩)] + h_γ r (g − ⟨g⟩ − x̂⟨g x̂⟩).

Layer by layer torch makes some thirty passes over memory of this, here there are two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from metanudge.accel.trunk import kernels, tail_kernels

_TILE = 64
_MOST = 2**31


def normalise_and_pool(z: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float) -> Tensor:
    """Outputs `(examples, channels, height // 2, width // 2)`; scale and shift are
    `(channels,)`.
    """
    channels = z.shape[1]
    gamma = z.new_ones(channels, dtype=torch.float32) if gamma is None else gamma.contiguous()
    beta = z.new_zeros(channels, dtype=torch.float32) if beta is None else beta.contiguous()
    if z.numel() >= _MOST:  # the kernels count with 32 bits; channels do not mix
        parts = zip(z.chunk(2, 1), gamma.chunk(2), beta.chunk(2), strict=True)
        return torch.cat([normalise_and_pool(*part, eps=eps) for part in parts], 1)
    y: Tensor = _Tail.apply(_last(z), gamma, beta, eps)
    return y


@dataclass(frozen=True)
class _Sizes:
    """Of the entries before and after pooling, all channels apart."""

    examples: int
    channels: int
    before: tuple[int, int]
    after: tuple[int, int]

    @classmethod
    def of(cls, z: Tensor) -> _Sizes:
        examples, channels, height, width = z.shape
        return cls(examples, channels, (height, width), (height // 2, width // 2))

    @property
    def pixels(self) -> int:
        return self.examples * self.before[0] * self.before[1]

    @property
    def entries(self) -> int:
        return self.examples * self.after[0] * self.after[1]

    @property
    def blocks(self) -> dict[str, int]:
        return {"CO": self.channels, "BLOCK_N": kernels.width(self.channels), "num_warps": 4}

    @property
    def columns(self) -> int:
        return triton.cdiv(self.channels, self.blocks["BLOCK_N"])

    def pooled(self, z: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Room for outputs, channels last."""
        shape = (self.examples, self.channels, *self.after)
        return torch.empty(
            shape, dtype=dtype or z.dtype, device=z.device, memory_format=torch.channels_last
        )


def _last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


class _Tail(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
        sizes = _Sizes.of(z)
        tiles = triton.cdiv(sizes.pixels, _TILE)
        stats = z.new_empty((tiles, 2, sizes.channels), dtype=torch.float32)
        tail_kernels.statistics[(tiles, sizes.columns)](
            z, stats, sizes.pixels, BLOCK_M=_TILE, **sizes.blocks
        )
        coefficients = z.new_empty((4, sizes.channels), dtype=torch.float32)
        kernels.normalisation[(1, sizes.columns)](
            stats, gamma, beta, coefficients, sizes.pixels, tiles, 0, 0, eps,
            TILE=_TILE, BLOCK_T=64, **sizes.blocks,
        )  # fmt: skip
        y, pick = sizes.pooled(z), sizes.pooled(z, torch.uint8)
        kernels.normalise_and_pool[(triton.cdiv(sizes.entries, 32), 1, sizes.columns)](
            z, coefficients, y, pick, sizes.entries, *sizes.before, *sizes.after,
            PH=2, PW=2, BLOCK_P=32, **sizes.blocks,
        )  # fmt: skip
        ctx.save_for_backward(z, gamma, coefficients, pick)
        return y

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        z, gamma, coefficients, pick = ctx.saved_tensors
        return *_Back.apply(outputs[0], z, gamma, coefficients, pick), None


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, dy: Tensor, z: Tensor, gamma: Tensor, coefficients: Tensor, pick: Tensor
    ) -> Any:
        dy, sizes = _last(dy), _Sizes.of(z)
        tiles = triton.cdiv(sizes.entries, _TILE)
        sums = z.new_empty((tiles, 3, sizes.channels), dtype=torch.float32)
        kernels.sums_backward[(tiles, 1, sizes.columns)](
            z, coefficients, pick, dy, sums, sizes.entries, *sizes.before, *sizes.after, tiles,
            PH=2, PW=2, BLOCK_P=_TILE, **sizes.blocks,
        )  # fmt: skip
        first = sums[:, :2].sum(0)  # Σ g and Σ g·x̂
        dbeta, dgamma = first
        dz, one = torch.empty_like(z), z.new_ones(1, dtype=torch.float32)
        kernels.spread_backward[(triton.cdiv(sizes.pixels, _TILE), 1, sizes.columns)](
            z, coefficients, pick, dy, dgamma, dbeta, one, dz, 0, 0, sizes.pixels, *sizes.before,
            *sizes.after,
            PH=2, PW=2, BLOCK_M=_TILE, **sizes.blocks,
        )  # fmt: skip
        ctx.save_for_backward(dy, z, coefficients, pick, first)
        return dz, dgamma.clone(), dbeta.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, h: Tensor, along_gamma: Tensor, along_beta: Tensor) -> Any:
        dy, z, coefficients, pick, first = ctx.saved_tensors
        h, sizes = _last(h), _Sizes.of(z)
        tiles, shape = triton.cdiv(sizes.pixels, _TILE), (sizes.pixels, *sizes.before, *sizes.after)
        sums = z.new_empty((tiles, 3, sizes.channels), dtype=torch.float32)
        tail_kernels.sums_twice[(tiles, sizes.columns)](
            z, coefficients, pick, dy, h, sums, *shape, BLOCK_M=_TILE, **sizes.blocks
        )
        factors, dgamma = (
            z.new_empty(s, dtype=torch.float32) for s in ((7, sizes.channels), (sizes.channels,))
        )
        tail_kernels.factors_twice[(sizes.columns,)](
            sums, coefficients, first, along_gamma.contiguous(), along_beta.contiguous(), factors,
            dgamma, sizes.pixels, tiles,
            BLOCK_T=64, **sizes.blocks,
        )  # fmt: skip
        dz, ddy = torch.empty_like(z), torch.empty_like(dy)
        tail_kernels.spread_twice[(tiles, sizes.columns)](
            z, coefficients, pick, dy, h, factors, dz, ddy, *shape, BLOCK_M=_TILE, **sizes.blocks
        )
        return ddy, dz, dgamma, None, None
