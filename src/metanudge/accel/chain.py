"""A model as a chain of layers that have kernels of their own (see `layers`), for all rows at once.

Where first derivatives are enough, convolution blocks at the beginning run as one operation (see
`trunk`).
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
from torch.func import vmap

from metanudge.accel import twice
from metanudge.accel.layers import (
    ELEMENTWISE,
    TWICE,
    Signal,
    Steps,
    Weights,
    is_watched,
)
from metanudge.accel.toolchain import triton_works
from metanudge.accel.trunk import order_for, trunk_for
from metanudge.accel.trunk.blocks import Block, BlockPlaces, BlockWeights, Tail, Trunk, match
from metanudge.engines.vmapped import repeated
from metanudge.objective import Loss, Objective
from metanudge.params import Params
from metanudge.problem import Problem

# numbers that a first layer sees at once, up to which its convolution is best a matrix product
_SMALL_PATCH = 32


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

    def __init__(self, problem: Problem, steps: Steps) -> None:
        self._steps = steps
        self.has_cross_entropy = is_cross_entropy(problem.objective.loss)
        self._judge = losses_of_rows(problem.objective)
        self._names = {id(p): name for name, p in problem.parameters.items()}
        self._trunk = match([layer for layer, _ in steps])
        self._device = problem.device
        self._uses = Counter(id(p) for layer, _ in steps for p in layer.parameters(recurse=False))

    @property
    def orders(self) -> dict[str, tuple[int, ...]]:
        """In which order the axes of some parameters best lie in memory."""
        found: dict[str, tuple[int, ...]] = {}
        for block in self._trunk.blocks if self._trunk is not None else ():
            name, order = self._names.get(id(block.conv.weight)), order_for(self._device, block)
            if name is not None and order is not None:
                found[name] = order
        return found

    def why_no_blocks(self, inputs: Tensor) -> str | None:
        """Why no layers at the beginning run as one operation on inputs `(tasks, examples, ...)`;
        None where they do.
        """
        if self._trunk is None:
            return "the model does not begin with Conv, BatchNorm in training, ReLU, MaxPool(2)"
        x, trunk = self._with_trunk(inputs)
        if trunk is not None:
            return None
        where = f"{x.dtype}".removeprefix("torch.") + f" on {x.device.type}"
        return f"none for inputs {tuple(x.shape[2:])}, {where}"

    def prepare(self, inputs: Tensor) -> list[Data]:
        """Whatever depends on the inputs `(tasks, examples, ...)` alone: done once, used for all
        steps and nudges.

        In several portions where the activations of all tasks would take much memory.
        """
        tasks = len(inputs)
        x, trunk = self._with_trunk(inputs)
        if trunk is None:
            return [Data(slice(0, tasks), inputs)]
        limit = trunk.rows_at_once(x)
        each = tasks if limit is None else math.ceil(tasks / math.ceil(tasks / limit))
        portions = [slice(first, min(first + each, tasks)) for first in range(0, tasks, each)]
        return [
            Data(portion, inputs[portion], trunk, trunk.prepare(x[portion]), limit)
            for portion in portions
        ]

    def join(self, sets: Sequence[list[Data]], rows: int) -> Data | None:
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
        if not apart or not self.has_cross_entropy:
            return None
        prepared = trunk.join([first.prepared for first in firsts])
        return None if prepared is None else replace(firsts[0], prepared=prepared)

    def losses_of_sets(
        self, data: Data, targets: Tensor, shares: Tensor, phi: Params, into: Params | None = None
    ) -> Tensor:
        """Sums over all sets `(rows,)` of the examples' cross-entropies times their shares; targets
        and shares are `(rows, examples)`.
        """
        return (_cross_entropies(self.outputs(data, phi, into), targets) * shares).sum(1)

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
        self, data: Data, targets: Tensor, phi: Params, into: Params | None = None
    ) -> Tensor:
        """Losses `(rows,)`; targets have a row axis, `into` is as for `outputs`."""
        last = self._steps[-1][0]
        if not self._has_head(last) or targets.ndim != 2 or targets.dtype != torch.long:
            return self._judge(self.outputs(data, phi, into), targets)
        from metanudge.accel.head import cross_entropy

        weight, bias = self._weights(phi)(last, "weight"), self._weights(phi)(last, "bias")
        assert weight is not None
        place = self._places(into)
        x = self._run(data, phi, into, self._steps[:-1]).unfold().float()
        return cross_entropy(x, weight, bias, targets, (place(last, "weight"), place(last, "bias")))

    def losses_layer_by_layer(self, inputs: Tensor, targets: Tensor, phi: Params) -> Tensor:
        """Losses `(rows,)` made of operations that can be differentiated twice; targets have a row
        axis.
        """
        steps = [(layer, TWICE.get(step, step)) for layer, step in self._steps]
        if self._trunk is not None:
            before, blocks, layers = self._trunk.before, self._trunk.blocks, self._trunk.layers
            trunk = self._with_trunk(inputs)[1]
            tail = None if trunk is None else trunk.tail
            if tail is not None:
                middle: Steps = [
                    (block.conv, partial(_block_twice, block, tail)) for block in blocks
                ]
                steps = [*steps[: len(before)], *middle, *steps[layers:]]
        outputs = self._run(Data(slice(0, len(inputs)), inputs), phi, None, steps).unfold()
        return self._judge(outputs, targets)

    def _has_head(self, last: nn.Module) -> bool:
        """Whether the model ends in what `head` does on a CUDA device."""
        if (
            not isinstance(last, nn.Linear)
            or not self.has_cross_entropy
            or last.weight.dtype != torch.float32
        ):
            return False
        if self._device.type != "cuda" or not triton_works():
            return False
        from metanudge.accel.head import MOST_CLASSES

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

    def _run(self, data: Data, phi: Params, into: Params | None, steps: Steps) -> Signal:
        weights, rows = self._weights(phi), next(iter(phi.values())).shape[0]
        if data.trunk is None:
            x = Signal(repeated(data.inputs, rows // len(data.inputs)), rows, False)
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
        # torch leaves examples with this label out
        return _cross_entropies(outputs, targets).sum(1) / (targets != -100).sum(1)

    return cross_entropy if is_cross_entropy(objective.loss) else one_by_one


def _cross_entropies(outputs: Tensor, targets: Tensor) -> Tensor:
    """Of all rows' examples."""
    each = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
    return each.view_as(targets)


def is_cross_entropy(loss: Loss) -> bool:
    """Whether a loss is torch's mean cross-entropy without any options, as a function or a
    module.
    """
    if not isinstance(loss, nn.CrossEntropyLoss) or type(loss) is not nn.CrossEntropyLoss:
        return loss is F.cross_entropy
    options = (loss.weight, loss.ignore_index, loss.reduction, loss.label_smoothing)
    return options == (None, -100, "mean", 0.0) and not is_watched(loss)


def _block_twice(block: Block, tail: Tail, layer: nn.Module, x: Signal, weights: Weights) -> Signal:
    """A whole block where second derivatives will be taken; the convolution's bias cancels in the
    normalisation.
    """
    weight, _, gamma, beta = _of_block(block, weights)
    assert weight is not None
    gamma, beta = (None if leaf is None else leaf.flatten() for leaf in (gamma, beta))
    if weight[0, 0].numel() <= _SMALL_PATCH and not x.value.requires_grad:
        images = x.unfold()
        flat = twice.convolve_patches(twice.patches(images, block.kernel, block.padding), weight)
        z = flat.view(images.shape[1], *block.convolved(images.shape[3:]), -1).permute(0, 3, 1, 2)
    else:
        wide, weight = twice.on_tensor_cores(x.fold(), weight.flatten(0, 1), x.rows)
        z = twice.convolve(block.conv, wide, weight, x.rows, block.padding)
    return Signal(tail(z, gamma, beta, block.eps), x.rows, True)
