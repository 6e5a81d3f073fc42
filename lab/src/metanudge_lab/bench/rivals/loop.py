"""MAML by hand, one task after the other: `torch.autograd.grad` and `functional_call`, nothing
else.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call

from metanudge_lab.bench.contender import Contender, Gradient, ReadyContender
from metanudge_lab.bench.rivals import counts
from metanudge_lab.bench.workload import Workload


def prepare_maml(workload: Workload) -> ReadyContender:
    """Second order: the graph of every inner step is kept, and one backward pass goes through all
    of them.
    """
    model = workload.copy_model()
    theta: dict[str, Tensor] = dict(model.named_parameters())
    (sx, sy), (qx, qy) = workload.support, workload.query

    def loss(phi: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return workload.loss(functional_call(model, phi, (x,)), y)

    def step() -> Gradient:
        model.zero_grad(set_to_none=True)
        for task in range(len(sx)):
            phi = theta
            for _ in range(workload.steps):
                gradients = torch.autograd.grad(
                    loss(phi, sx[task], sy[task]), list(phi.values()), create_graph=True
                )
                phi = {
                    name: p - workload.lr * g
                    for (name, p), g in zip(phi.items(), gradients, strict=True)
                }
            (loss(phi, qx[task], qy[task]) / len(sx)).backward()
        return {name: p.grad for name, p in theta.items() if p.grad is not None}

    return ReadyContender(step, lambda: counts.maml(workload))


def prepare_fomaml(workload: Workload) -> ReadyContender:
    """First order: plain SGD on the module itself, whose weights are put back for the next task."""
    model = workload.copy_model()
    parameters: list[Tensor] = list(model.parameters())
    (sx, sy), (qx, qy) = workload.support, workload.query

    def step() -> Gradient:
        theta = [p.detach().clone() for p in parameters]
        total = [torch.zeros_like(p) for p in parameters]
        for task in range(len(sx)):
            for _ in range(workload.steps):
                gradients = torch.autograd.grad(
                    workload.loss(model(sx[task]), sy[task]), parameters
                )
                with torch.no_grad():
                    torch._foreach_add_(parameters, gradients, alpha=-workload.lr)
            gradients = torch.autograd.grad(workload.loss(model(qx[task]), qy[task]), parameters)
            torch._foreach_add_(total, gradients, alpha=1 / len(sx))
            with torch.no_grad():
                torch._foreach_copy_(parameters, theta)
        return {name: g for (name, _), g in zip(model.named_parameters(), total, strict=True)}

    return ReadyContender(step, lambda: counts.fomaml(workload))


CONTENDERS = (
    Contender("loop-maml", "MAML, loop over tasks", "torch", "MAML", prepare_maml),
    Contender("loop-fomaml", "FO-MAML, loop over tasks", "torch", "FO-MAML", prepare_fomaml),
)
