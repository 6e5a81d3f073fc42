"""TorchOpt 0.7.3: `MetaSGD` for second order, its in-place `SGD` for first order; one task after
the other.
"""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from metanudge_lab.bench.contender import Contender, Gradient, ReadyContender
from metanudge_lab.bench.rivals import counts
from metanudge_lab.bench.workload import Workload


def prepare_maml(workload: Workload) -> ReadyContender:
    """Second order: the module's weights are replaced by functions of θ, and put back for the next
    task.
    """
    torchopt = importlib.import_module("torchopt")
    model = workload.copy_model()
    theta = dict(model.named_parameters())
    (sx, sy), (qx, qy) = workload.support, workload.query

    def step() -> Gradient:
        model.zero_grad(set_to_none=True)
        start = torchopt.extract_state_dict(model, by="reference", detach_buffers=True)
        for task in range(len(sx)):
            optimizer = torchopt.MetaSGD(model, lr=workload.lr)
            for _ in range(workload.steps):
                optimizer.step(workload.loss(model(sx[task]), sy[task]))
            (workload.loss(model(qx[task]), qy[task]) / len(sx)).backward()
            torchopt.recover_state_dict(model, start)
        return {name: p.grad for name, p in theta.items() if p.grad is not None}

    return ReadyContender(step, lambda: counts.maml(workload))


def prepare_fomaml(workload: Workload) -> ReadyContender:
    """First order: `MetaSGD` always keeps the graph, so the plain in-place optimizer adapts the
    module.
    """
    torchopt = importlib.import_module("torchopt")
    model = workload.copy_model()
    names = [name for name, _ in model.named_parameters()]
    parameters: list[Tensor] = list(model.parameters())
    (sx, sy), (qx, qy) = workload.support, workload.query

    def step() -> Gradient:
        theta = [p.detach().clone() for p in parameters]
        total = [torch.zeros_like(p) for p in parameters]
        for task in range(len(sx)):
            optimizer = torchopt.SGD(parameters, lr=workload.lr)
            for _ in range(workload.steps):
                optimizer.zero_grad()
                workload.loss(model(sx[task]), sy[task]).backward()
                optimizer.step()
            gradients = torch.autograd.grad(workload.loss(model(qx[task]), qy[task]), parameters)
            torch._foreach_add_(total, gradients, alpha=1 / len(sx))
            with torch.no_grad():
                torch._foreach_copy_(parameters, theta)
        model.zero_grad(set_to_none=True)
        return dict(zip(names, total, strict=True))

    return ReadyContender(step, lambda: counts.fomaml(workload))


_INSTALL = "pip install 'metanudge-lab[rivals]'"
CONTENDERS = (
    Contender(
        "torchopt-maml", "MAML, TorchOpt", "torchopt", "MAML", prepare_maml, "torchopt", _INSTALL
    ),
    Contender(
        "torchopt-fomaml",
        "FO-MAML, TorchOpt",
        "torchopt",
        "FO-MAML",
        prepare_fomaml,
        "torchopt",
        _INSTALL,
    ),
)
