"""How a meta-gradient reaches `.grad`, or autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from metanudge.params import Params


def add_to_grad(gradient: Params, parameters: dict[str, nn.Parameter]) -> None:
    """Add a meta-gradient to `.grad`, and leave nothing of it in `gradient`; hooks on the
    parameters see it as they would see an ordinary gradient.
    """
    leaves = [gradient.pop(n).to(p.dtype) for n, p in parameters.items()]
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters.values()):
        _Gradients.apply(leaves, *parameters.values()).backward()
    else:
        _add(leaves, list(parameters.values()))


@torch.no_grad()
def _add(gradients: list[Tensor], parameters: list[nn.Parameter]) -> None:
    """What autograd does where no hook is registered, in a fraction of its time: a thread of its
    own and a node for each parameter.

    All are written or none: the first ones can be taken back, the others are written at once.
    """
    pairs = list(zip(parameters, gradients, strict=True))
    known = [(p.grad, g) for p, g in pairs if p.grad is not None]
    new = [
        (p, g if g.stride() == p.stride() else torch.empty_like(p).copy_(g))
        for p, g in pairs
        if p.grad is None
    ]
    try:
        for p, g in new:
            p.grad = g
        if known:
            torch._foreach_add_([grad for grad, _ in known], [g for _, g in known])
    except BaseException:
        for p, _ in new:
            p.grad = None
        raise


class _Gradients(torch.autograd.Function):
    """A zero whose derivative in each tensor is a given one."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        gradients = tuple(ctx.gradients)
        # autograd takes a gradient over that nobody else holds, and copies it otherwise
        ctx.gradients.clear()
        return (None, *gradients)


def meta_loss(
    compute: Callable[[], tuple[Params, float]], parameters: dict[str, nn.Parameter]
) -> Tensor:
    """A query loss whose derivative is a meta-gradient; `compute` makes both."""
    return _MetaLoss.apply(compute, *parameters.values())


class _MetaLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, compute: Callable[[], tuple[Params, float]], *parameters: Tensor
    ) -> Tensor:
        gradient, loss = compute()
        ctx.save_for_backward(
            *(g.to(p) for g, p in zip(gradient.values(), parameters, strict=True))
        )
        return parameters[0].new_tensor(loss)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        return (None, *(g * outputs[0] for g in ctx.saved_tensors))
