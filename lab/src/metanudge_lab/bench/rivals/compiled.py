"""`torch.compile` of all tasks side by side, the best we know to make of it by hand: `vmap`, and
convolutions as matrix products.

Under `vmap` every task has weights of its own. A convolution then becomes one of many groups, which
no library does fast; patches times a matrix are one batched product, and what makes the patches
fuses with what surrounds it. On a GPU the compiled step is recorded as a CUDA graph
(`mode="reduce-overhead"`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from metanudge_lab.bench.contender import Contender, Gradient, ReadyContender, Work
from metanudge_lab.bench.rivals import counts
from metanudge_lab.bench.rivals import vmap as by_vmap
from metanudge_lab.bench.workload import Workload

Params = dict[str, Tensor]
NU = 0.1


class PatchConvolution(nn.Module):
    """A convolution with stride 1 as patches times a matrix; takes over the weights of the one it
    stands for.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self._size, self._padding = (
            layer.kernel_size,
            [p for p in reversed(layer.padding) for _ in range(2)],
        )

    def forward(self, x: Tensor) -> Tensor:
        """Examples × channels × places, as the layer it stands for."""
        x = F.pad(x, self._padding).movedim(1, -1)
        places = [
            range(length - size + 1) for length, size in zip(x.shape[1:-1], self._size, strict=True)
        ]
        shifts = itertools.product(*map(range, self._size))
        patches = [
            x[:, *(slice(s, s + len(p)) for s, p in zip(shift, places, strict=True))]
            for shift in shifts
        ]
        out = torch.cat(patches, -1) @ self.weight.movedim(1, -1).flatten(1).T
        return (out if self.bias is None else out + self.bias).movedim(-1, 1)


def with_patches(model: nn.Module) -> nn.Module:
    """The model with its plain convolutions as matrix products."""
    for name, layer in list(model.named_children()):
        plain = (
            isinstance(layer, nn.Conv1d | nn.Conv2d)
            and layer.groups == 1
            and {*layer.stride, *layer.dilation} == {1}
        )
        if plain and not isinstance(layer.padding, str) and layer.padding_mode == "zeros":
            setattr(model, name, PatchConvolution(layer))
        else:
            with_patches(layer)
    return model


def gradient_nudge(workload: Workload, model: nn.Module) -> Callable[..., Params]:
    """FO-B-MAML's symmetric gradient nudge from θ as a function of θ and the stacked support and
    query sets.
    """
    lam, lr = workload.lam, workload.lr

    def loss(phi: Params, x: Tensor, y: Tensor) -> Tensor:
        return workload.loss(functional_call(model, phi, (x,)), y)

    def solve(theta: Params, pull: Params | None, x: Tensor, y: Tensor) -> Params:
        d = {name: torch.zeros_like(p) for name, p in theta.items()}
        for _ in range(workload.steps):
            g = grad(loss)({name: theta[name] + leaf for name, leaf in d.items()}, x, y)
            g = g if pull is None else {name: leaf + pull[name] for name, leaf in g.items()}
            d = {name: leaf - lr * (g[name] + lam * leaf) for name, leaf in d.items()}
        return d

    def query_gradient(theta: Params, d: Params, x: Tensor, y: Tensor) -> Params:
        return grad(loss)({name: theta[name] + leaf for name, leaf in d.items()}, x, y)

    def mean(theta: Params, sx: Tensor, sy: Tensor, qx: Tensor, qy: Tensor) -> Params:
        d = vmap(solve, in_dims=(None, None, 0, 0))(theta, None, sx, sy)
        f = vmap(query_gradient, in_dims=(None, 0, 0, 0))(theta, d, qx, qy)
        signed = {name: torch.cat([NU * leaf, -NU * leaf]) for name, leaf in f.items()}
        pair = vmap(solve, in_dims=(None, 0, 0, 0))(
            theta, signed, torch.cat([sx, sx]), torch.cat([sy, sy])
        )
        return {
            name: -lam * (plus - minus).mean(0) / (2 * NU)
            for name, leaf in pair.items()
            for plus, minus in [leaf.chunk(2)]
        }

    return mean


def prepare(
    workload: Workload,
    make: Callable[[Workload, nn.Module], Callable[..., Params]],
    work: Callable[[Workload], Work],
) -> ReadyContender:
    """The compiled meta-step."""
    model, theta = by_vmap.model_and_theta(workload)
    with_patches(model)
    cuda = workload.device.type == "cuda"
    compute = torch.compile(
        make(workload, model),
        mode="reduce-overhead" if cuda else "default",
        dynamic=False,
        fullgraph=True,
    )
    data = (*workload.support, *workload.query)

    def step() -> Gradient:
        if cuda:
            torch.compiler.cudagraph_mark_step_begin()
        return compute(theta, *data)

    return ReadyContender(step, lambda: work(workload), engine=lambda: "torch.compile")


def _maml(workload: Workload) -> ReadyContender:
    return prepare(
        workload, lambda w, model: by_vmap.meta_gradient(w, model, second_order=True), counts.maml
    )


def _fomaml(workload: Workload) -> ReadyContender:
    return prepare(
        workload,
        lambda w, model: by_vmap.meta_gradient(w, model, second_order=False),
        counts.fomaml,
    )


def _nudge(workload: Workload) -> ReadyContender:
    return prepare(workload, gradient_nudge, lambda w: Work(3 * w.steps, 1))


CONTENDERS = (
    Contender("compile-maml", "MAML, vmap and torch.compile", "torch", "MAML", _maml),
    Contender("compile-fomaml", "FO-MAML, vmap and torch.compile", "torch", "FO-MAML", _fomaml),
    Contender(
        "compile-gradient",
        "FO-B-MAML gradient nudge, vmap and torch.compile",
        "torch",
        "FO-B-MAML gradient",
        _nudge,
    ),
)
