"""The layers that have kernels of their own for all rows at once: rows are folded into channels.

`vmap` runs any model, but every operation pays for its way through the transform, and batched
weights shuffle memory around each layer. The layers below need none of that: a convolution with one
weight per row is a grouped convolution over `rows × channels`, BatchNorm normalises those channels
one by one anyway, elementwise layers and pooling do not care, and a linear layer is a batched
matrix product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from metanudge.accel import twice
from metanudge.problem import Problem

ELEMENTWISE = (
    nn.ReLU,
    nn.LeakyReLU,
    nn.ELU,
    nn.GELU,
    nn.SiLU,
    nn.Softplus,
    nn.Sigmoid,
    nn.Tanh,
    nn.Identity,
)
POOLING = (
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)


@dataclass(frozen=True)
class Signal:
    """An activation of all rows: `folded`, `(examples, rows × channels, ...)`, or one matrix a row,
    `(rows, examples, features)`.
    """

    value: Tensor
    rows: int
    folded: bool

    def fold(self) -> Tensor:
        """`(examples, rows × channels, ...)`."""
        return self.value if self.folded else self.value.transpose(0, 1).flatten(1, 2)

    def unfold(self) -> Tensor:
        """`(rows, examples, ...)`."""
        return (
            self.value.unflatten(1, (self.rows, -1)).transpose(0, 1) if self.folded else self.value
        )


Weights = Callable[[nn.Module, str], Tensor | None]
Step = Callable[..., Signal]
"""What runs a layer: the layer, its inputs and what finds its weights → its outputs."""


def _convolve(layer: nn.Conv1d | nn.Conv2d, x: Signal, weights: Weights) -> Signal:
    weight, bias = weights(layer, "weight"), weights(layer, "bias")
    assert weight is not None
    convolve = F.conv1d if isinstance(layer, nn.Conv1d) else F.conv2d
    bias = None if bias is None else bias.flatten(0, 1)
    y = convolve(
        x.fold(), weight.flatten(0, 1), bias, layer.stride, layer.padding, layer.dilation, x.rows
    )
    return Signal(y, x.rows, True)


def _convolve_twice(layer: nn.Conv1d | nn.Conv2d, x: Signal, weights: Weights) -> Signal:
    """`_convolve` where second derivatives will be taken."""
    weight, bias = weights(layer, "weight"), weights(layer, "bias")
    assert weight is not None
    if isinstance(layer.padding, str):
        return _convolve(layer, x, weights)
    y = twice.convolve(layer, x.fold(), weight.flatten(0, 1), x.rows, layer.padding)
    return Signal(
        y if bias is None else y + bias.flatten().view(-1, *[1] * (y.ndim - 2)), x.rows, True
    )


def _normalise(layer: nn.BatchNorm1d | nn.BatchNorm2d, x: Signal, weights: Weights) -> Signal:
    weight, bias = weights(layer, "weight"), weights(layer, "bias")
    weight, bias = (None if t is None else t.flatten() for t in (weight, bias))
    use_batch = layer.training or layer.running_mean is None
    mean, variance = (None, None) if use_batch else (layer.running_mean, layer.running_var)
    mean, variance = (None if t is None else t.repeat(x.rows) for t in (mean, variance))
    y = Signal(
        F.batch_norm(x.fold(), mean, variance, weight, bias, use_batch, 0.0, layer.eps),
        x.rows,
        True,
    )
    return y if x.folded else Signal(y.unfold(), x.rows, False)


def _linear(layer: nn.Linear, x: Signal, weights: Weights) -> Signal:
    weight, bias = weights(layer, "weight"), weights(layer, "bias")
    assert weight is not None
    product = torch.bmm(x.unfold(), weight.transpose(1, 2))
    return Signal(product if bias is None else product + bias.unsqueeze(1), x.rows, False)


def _flatten(layer: nn.Flatten, x: Signal, weights: Weights) -> Signal:
    return Signal(x.unfold().flatten(2), x.rows, False)


class _Halve(torch.autograd.Function):
    """Max-pooling by 2 along one axis: on a CPU four times faster than torch's, which keeps indices
    of a two-dimensional kernel.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        first, second = _pairs(x, dim)
        ctx.save_for_backward(first >= second)  # of equals the first wins, as in torch
        ctx.dim, ctx.shape = dim, x.shape
        return torch.maximum(first, second)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, None]:
        (wins,) = ctx.saved_tensors
        return _Spread.apply(outputs[0], wins, ctx.dim, ctx.shape), None


class _Spread(torch.autograd.Function):
    """The way back of `_Halve`: every entry goes to where it came from, zeros to the others."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, wins: Tensor, dim: int, shape: torch.Size) -> Tensor:
        ctx.save_for_backward(wins)
        ctx.dim = dim
        x = g.new_zeros(shape) if shape[dim] % 2 else g.new_empty(shape)
        first, second = _pairs(x, dim)
        torch.mul(g, wins, out=first)
        torch.sub(g, first, out=second)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, None, None, None]:
        (wins,) = ctx.saved_tensors
        return torch.where(wins, *_pairs(outputs[0], ctx.dim)), None, None, None


def _pairs(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The even and the odd entries along an axis (views); an odd last entry is left out."""
    dim = dim % x.ndim
    x = x.narrow(dim, 0, x.shape[dim] // 2 * 2).unflatten(dim, (-1, 2))
    dim += 1
    return x.select(dim, 0), x.select(dim, 1)


def _pool(layer: nn.MaxPool1d | nn.MaxPool2d, x: Signal, weights: Weights) -> Signal:
    if x.value.device.type != "cpu":
        return _apply(layer, x, weights)
    y = _Halve.apply(x.value, -1)
    return Signal(y if isinstance(layer, nn.MaxPool1d) else _Halve.apply(y, -2), x.rows, x.folded)


def _apply(layer: nn.Module, x: Signal, weights: Weights) -> Signal:
    return Signal(layer(x.value), x.rows, x.folded)


def _per_example(layer: nn.Module, x: Signal, weights: Weights) -> Signal:
    each = x.unfold()
    return Signal(layer(each.flatten(0, 1)).unflatten(0, each.shape[:2]), x.rows, False)


Steps = list[tuple[nn.Module, Step]]
TWICE: dict[Step, Step] = {_convolve: _convolve_twice}
"""What runs a layer where second derivatives will be taken, if that is another step."""


class NoChain(ValueError):
    """Why a model is no chain of layers that have kernels of their own."""


def steps_of_problem(problem: Problem) -> Steps:
    """The layers of a problem's model; `NoChain` where it is no chain, or cannot run as one."""
    if problem.objective.takes_model:
        raise NoChain("the loss runs the model itself")
    if problem.query_objective is not problem.objective:
        raise NoChain("the query set has a loss of its own")
    if len({leaf.dtype for leaf in problem.parameters.values()}) > 1:
        raise NoChain("parameters of several dtypes adapt")
    return steps_of(problem.objective.model)


def steps_of(model: nn.Module, name: str = "the model") -> Steps:
    """The layers of a model one after the other, each with what runs it."""
    if is_watched(model):
        raise NoChain(f"hooks or parametrizations watch {name} ({type(model).__name__})")
    if type(model).forward is nn.Sequential.forward:
        # not `children`, which names a layer once that runs twice
        return [step for n, part in model._modules.items() if part for step in steps_of(part, n)]
    if isinstance(model, nn.Dropout) and (model.p == 0 or not model.training):
        return []
    step = _step_of(model)
    if step is None:
        raise NoChain(f"{name} ({type(model).__name__}) has no kernels of its own")
    return [(model, step)]


def _step_of(layer: nn.Module) -> Step | None:
    kind = type(layer)
    step: Step | None = None
    if isinstance(layer, (nn.Conv1d, nn.Conv2d)) and kind in (nn.Conv1d, nn.Conv2d):
        step = _convolve if layer.groups == 1 and layer.padding_mode == "zeros" else None
    elif kind in NORMS:
        step = _normalise
    elif kind is nn.Linear:
        step = _linear
    elif isinstance(layer, nn.Flatten) and kind is nn.Flatten:
        step = _flatten if (layer.start_dim, layer.end_dim) == (1, -1) else None
    elif isinstance(layer, (nn.MaxPool1d, nn.MaxPool2d)) and halves(layer):
        step = _pool
    elif kind in ELEMENTWISE or (kind in POOLING and not getattr(layer, "return_indices", False)):
        step = _apply
    elif is_per_example(layer):
        step = _per_example
    return step


def is_watched(module: nn.Module) -> bool:
    """Whether somebody's hooks expect to see this module run."""
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(hooks) or "parametrizations" in module._modules


def is_per_example(layer: nn.Module) -> bool:
    """Whether a layer says that what it does to an example does not depend on the others."""
    return getattr(type(layer), "per_example", False)


def halves(layer: nn.MaxPool1d | nn.MaxPool2d) -> bool:
    """Whether a max-pooling layer takes the larger of every two entries (along both axes) and does
    nothing else.
    """
    options = (
        layer.kernel_size,
        layer.stride,
        layer.padding,
        layer.dilation,
        layer.ceil_mode,
        layer.return_indices,
    )
    return type(layer) in (nn.MaxPool1d, nn.MaxPool2d) and options == (2, 2, 0, 1, False, False)
