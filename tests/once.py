"""A function with one derivative only."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class Once(torch.autograd.Function):
    """tanh, with a derivative that has none."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * (1 - y * y)


class OnceModule(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Once.apply(x)


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    """Up to a tanh that only large ones see."""
    return 20 * Once.apply(F.mse_loss(output, target) / 20)
