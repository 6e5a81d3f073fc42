"""Plain chains of common layers, for all rows at once with native kernels: rows are folded into
channels.

`vmap` runs any model, but every operation pays for its way through the transform, and batched
weights shuffle memory around each layer. A model that is an `nn.Sequential` (nested or not) of the
layers below needs none of that: a convolution with one weight per row is a grouped convolution over
`rows × channels`, BatchNorm normalises those channels one by one anyway, elementwise layers and
pooling do not care, and a linear layer is a batched matrix product. Where first derivatives are
enough, convolution blocks at the beginning run as one operation (see `trunk`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import vmap

from metanudge.engines import convolution
from metanudge.engines.compiled import triton_works
from metanudge.engines.trunk import (
    Block,
    BlockPlaces,
    BlockWeights,
    Tail,
    Trunk,
    join,
    match,
    order_for,
    rows_at_once,
    tail_for,
    trunk_for,
)
from metanudge.engines.trunk.match import halves
from metanudge.params import Params
from metanudge.problem import Objective, Problem

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

# numbers that a first layer sees at once, up to which its convolution is best a matrix product
_SMALL_PATCH = 32


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
    y = convolution.convolve(layer, x.fold(), weight.flatten(0, 1), x.rows, layer.padding)
    return Signal(
        y if bias is None else y + bias.flatten().view(-1, *[1] * (y.ndim - 2)), x.rows, True
    )


def _block_twice(block: Block, tail: Tail, layer: nn.Module, x: Signal, weights: Weights) -> Signal:
    """A whole block where second derivatives will be taken; the convolution's bias cancels in the
    normalisation.
    """
    weight, _, gamma, beta = _of_block(block, weights)
    assert weight is not None
    gamma, beta = (None if leaf is None else leaf.flatten() for leaf in (gamma, beta))
    if weight[0, 0].numel() <= _SMALL_PATCH and not x.value.requires_grad:
        images = x.unfold()
        flat = convolution.convolve_patches(
            convolution.patches(images, block.kernel, block.padding), weight
        )
        z = flat.view(images.shape[1], *block.convolved(images.shape[3:]), -1).permute(0, 3, 1, 2)
    else:
        wide, weight = convolution.on_tensor_cores(x.fold(), weight.flatten(0, 1), x.rows)
        z = convolution.convolve(block.conv, wide, weight, x.rows, block.padding)
    return Signal(tail(z, gamma, beta, block.eps), x.rows, True)


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


Step = Callable[..., Signal]
"""What runs a layer: the layer, its inputs and what finds its weights → its outputs."""

_TWICE: dict[Step, Step] = {_convolve: _convolve_twice}


@dataclass(frozen=True)
class Data:
    """Inputs of some tasks of a group, and what a trunk has made of them, if one runs."""

    tasks: slice  # their places in the group
    inputs: Tensor  # (tasks, examples, ...)
    trunk: Trunk | None = None
    prepared: Any = None
    rows_at_once: int | None = None


class Chain:
    """A model as a list of layers, each with what runs it for all rows."""

    def __init__(self, problem: Problem, steps: list[tuple[nn.Module, Step]]) -> None:
        self._steps = steps
        self._names = {id(p): name for name, p in problem.parameters.items()}
        self._trunk = match([layer for layer, _ in steps])
        self._device = problem.device
        self._uses = Counter(id(p) for layer, _ in steps for p in layer.parameters(recurse=False))

    @classmethod
    def of(cls, problem: Problem) -> Chain | None:
        """The problem's model as a chain, or None where it is anything else."""
        model = problem.objective.model
        if problem.objective.takes_model or any(_watched(module) for module in model.modules()):
            return None
        steps: list[tuple[nn.Module, Step]] = []
        return cls(problem, steps) if _collect(model, steps) else None

    @property
    def orders(self) -> dict[str, tuple[int, ...]]:
        """In which order the axes of some parameters best lie in memory."""
        found: dict[str, tuple[int, ...]] = {}
        for block in self._trunk.blocks if self._trunk is not None else ():
            name, order = self._names.get(id(block.conv.weight)), order_for(self._device, block)
            if name is not None and order is not None:
                found[name] = order
        return found

    def runs_trunk(self, inputs: Tensor) -> bool:
        """Whether layers at the beginning run as one operation on inputs `(tasks, examples,
        ...)`.
        """
        return self._with_trunk(inputs)[1] is not None

    def prepare(self, inputs: Tensor) -> list[Data]:
        """Whatever depends on the inputs `(tasks, examples, ...)` alone: done once, used for all
        steps and nudges.

        In several portions where the activations of all tasks would take much memory.
        """
        tasks = len(inputs)
        x, trunk = self._with_trunk(inputs)
        if trunk is None:
            return [Data(slice(0, tasks), inputs)]
        limit = rows_at_once(trunk, x)
        each = tasks if limit is None else math.ceil(tasks / math.ceil(tasks / limit))
        portions = [slice(first, min(first + each, tasks)) for first in range(0, tasks, each)]
        return [
            Data(portion, inputs[portion], trunk, trunk.prepare(x[portion]), limit)
            for portion in portions
        ]

    def join(self, sets: Sequence[list[Data]], rows: int, objective: Objective) -> Data | None:
        """Prepared sets of examples of the same tasks for `losses_of_sets`, or None where they are
        better taken one by one.
        """
        firsts = [portions[0] for portions in sets]
        trunk = firsts[0].trunk
        if (
            self._trunk is None
            or trunk is None
            or any(len(portions) > 1 or portions[0].trunk is None for portions in sets)
        ):
            return None
        if sum(rows / first.rows_at_once for first in firsts if first.rows_at_once is not None) > 1:
            return None
        behind = [type(layer) for layer, _ in self._steps[self._trunk.layers :]]
        apart = behind[-1:] == [nn.Linear] and all(
            kind in (nn.Flatten, nn.Linear, *ELEMENTWISE) for kind in behind
        )
        # else examples might meet elsewhere than in the blocks
        if not apart or objective.loss is not F.cross_entropy:
            return None
        prepared = join(trunk, [first.prepared for first in firsts])
        return None if prepared is None else replace(firsts[0], prepared=prepared)

    def losses_of_sets(
        self, data: Data, targets: Tensor, shares: Tensor, phi: Params, into: Params | None = None
    ) -> Tensor:
        """Sums over all sets `(rows,)` of the examples' cross-entropies times their shares; targets
        and shares are `(rows, examples)`.
        """
        outputs = self.outputs(data, phi, into)
        return (
            F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none").view_as(
                targets
            )
            * shares
        ).sum(1)

    def _with_trunk(self, inputs: Tensor) -> tuple[Tensor, Trunk | None]:
        """What the layers before the trunk make of the inputs, and the trunk, if there is one for
        them.
        """
        if self._trunk is None:
            return inputs, None
        x = inputs
        for layer in self._trunk.before:
            x = layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return x, trunk_for(x.device, x.dtype, self._trunk.blocks) if self._trunk.fits(x) else None

    def outputs(self, data: Data, phi: Params, into: Params | None = None) -> Tensor:
        """The model's outputs `(rows, examples, ...)` for parameters with a row axis; rows are
        nudges × tasks, nudge by nudge.

        Gradients by some of the parameters may be written to `into` as they are made, and are then
        the same memory.
        """
        return self._run(data, phi, into, self._steps).unfold()

    def losses(
        self,
        data: Data,
        targets: Tensor,
        phi: Params,
        objective: Objective,
        into: Params | None = None,
    ) -> Tensor:
        """Losses `(rows,)`; targets have a row axis, `into` is as for `outputs`."""
        last = self._steps[-1][0]
        if not self._has_head(last, objective) or targets.ndim != 2 or targets.dtype != torch.long:
            return losses_of_rows(objective)(self.outputs(data, phi, into), targets)
        from metanudge.engines.head import cross_entropy

        weight, bias = self._weights(phi)(last, "weight"), self._weights(phi)(last, "bias")
        assert weight is not None
        place = self._places(into)
        x = self._run(data, phi, into, self._steps[:-1]).unfold().float()
        return cross_entropy(x, weight, bias, targets, (place(last, "weight"), place(last, "bias")))

    def losses_layer_by_layer(
        self, inputs: Tensor, targets: Tensor, phi: Params, objective: Objective
    ) -> Tensor:
        """Losses `(rows,)` made of operations that can be differentiated twice; targets have a row
        axis.
        """
        steps = [(layer, _TWICE.get(step, step)) for layer, step in self._steps]
        if self._trunk is not None:
            before, blocks, layers = self._trunk.before, self._trunk.blocks, self._trunk.layers
            tail = tail_for(self._with_trunk(inputs)[1], blocks)
            if tail is not None:
                middle: list[tuple[nn.Module, Step]] = [
                    (block.conv, partial(_block_twice, block, tail)) for block in blocks
                ]
                steps = [*steps[: len(before)], *middle, *steps[layers:]]
        outputs = self._run(Data(slice(0, len(inputs)), inputs), phi, None, steps).unfold()
        return losses_of_rows(objective)(outputs, targets)

    def _has_head(self, last: nn.Module, objective: Objective) -> bool:
        """Whether the model ends in what `head` does on a CUDA device."""
        if (
            not isinstance(last, nn.Linear)
            or objective.loss is not F.cross_entropy
            or last.weight.dtype != torch.float32
        ):
            return False
        if self._device.type != "cuda" or not triton_works():
            return False
        from metanudge.engines.head import MOST_CLASSES

        return last.out_features <= MOST_CLASSES

    def _weights(self, phi: Params) -> Weights:
        """What finds the parameters of a layer, with a row axis."""
        rows = next(iter(phi.values())).shape[0]

        def weights(layer: nn.Module, name: str) -> Tensor | None:
            parameter = getattr(layer, name)
            if parameter is None:
                return None
            known = self._names.get(id(parameter))
            return (
                phi[known]
                if known is not None
                else parameter.detach().expand(rows, *parameter.shape)
            )

        return weights

    def _places(self, into: Params | None) -> Weights:
        """What finds the places for gradients by the parameters of a layer."""

        def place(layer: nn.Module, name: str) -> Tensor | None:
            parameter = getattr(layer, name)
            # else what autograd sums up would be one memory
            once = parameter is not None and self._uses[id(parameter)] == 1
            known = self._names.get(id(parameter)) if once else None
            return None if known is None or into is None else into[known]

        return place

    def _run(
        self, data: Data, phi: Params, into: Params | None, steps: list[tuple[nn.Module, Step]]
    ) -> Signal:
        weights, rows = self._weights(phi), next(iter(phi.values())).shape[0]
        if data.trunk is None:
            times = rows // data.inputs.shape[0]
            x = Signal(
                (
                    data.inputs.repeat(times, *[1] * (data.inputs.ndim - 1))
                    if times > 1
                    else data.inputs
                ),
                rows,
                False,
            )
        else:
            assert self._trunk is not None
            blocks, place = self._trunk.blocks, self._places(into)
            places = [BlockPlaces(*_of_block(block, place)) for block in blocks]
            outputs = data.trunk.outputs(
                data.prepared, [_block_weights(block, weights) for block in blocks], places
            )
            x = Signal(outputs, rows, False)
            steps = steps[self._trunk.layers :]
        for layer, step in steps:
            x = step(layer, x, weights)
        return x


def _of_block(block: Block, get: Weights) -> tuple[Tensor | None, ...]:
    return (
        get(block.conv, "weight"),
        get(block.conv, "bias"),
        get(block.norm, "weight"),
        get(block.norm, "bias"),
    )


def _block_weights(block: Block, weights: Weights) -> BlockWeights:
    weight, *others = _of_block(block, weights)
    assert weight is not None
    return BlockWeights(weight, *others)


def losses_of_rows(objective: Objective) -> Callable[[Tensor, Tensor], Tensor]:
    """Losses `(rows,)` of outputs and targets with a row axis; the usual one of classifiers without
    the way through `vmap`.
    """
    one_by_one: Callable[[Tensor, Tensor], Tensor] = vmap(objective.judge_loss, randomness="same")

    def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.ndim != 3 or targets.ndim != 2 or targets.dtype != torch.long:
            return one_by_one(outputs, targets)
        each = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none").view_as(
            targets
        )
        return each.sum(1) / (targets != -100).sum(1)  # torch leaves examples with this label out

    return cross_entropy if objective.loss is F.cross_entropy else one_by_one


def _watched(module: nn.Module) -> bool:
    """Whether somebody's hooks expect to see this module run."""
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(hooks) or "parametrizations" in module._modules


def _collect(module: nn.Module, steps: list[tuple[nn.Module, Step]]) -> bool:
    kind = type(module)
    if kind.forward is nn.Sequential.forward:
        return all(_collect(child, steps) for child in module.children())
    step: Step | None = None
    if isinstance(module, (nn.Conv1d, nn.Conv2d)) and kind in (nn.Conv1d, nn.Conv2d):
        step = _convolve if module.groups == 1 and module.padding_mode == "zeros" else None
    elif kind in NORMS:
        step = _normalise
    elif kind is nn.Linear:
        step = _linear
    elif isinstance(module, nn.Flatten) and kind is nn.Flatten:
        step = _flatten if (module.start_dim, module.end_dim) == (1, -1) else None
    elif isinstance(module, (nn.MaxPool1d, nn.MaxPool2d)) and halves(module):
        step = _pool
    elif kind in ELEMENTWISE or (kind in POOLING and not getattr(module, "return_indices", False)):
        step = _apply
    elif isinstance(module, nn.Dropout) and (module.p == 0 or not module.training):
        return True
    elif getattr(kind, "per_example", False):
        step = _per_example
    if step is None:
        return False
    steps.append((module, step))
    return True
