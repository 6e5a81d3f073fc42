"""higher 0.2.1: `innerloop_ctx`, one task after the other."""

from __future__ import annotations

import importlib

import torch

from metanudge_lab.bench.contender import Contender, Gradient, ReadyContender
from metanudge_lab.bench.rivals import counts
from metanudge_lab.bench.workload import Workload


def prepare_maml(workload: Workload) -> ReadyContender:
    """Second order: gradients flow back to the module's own weights
    (`copy_initial_weights=False`).
    """
    higher = importlib.import_module("higher")
    model = workload.copy_model()
    inner = torch.optim.SGD(model.parameters(), lr=workload.lr)
    (sx, sy), (qx, qy) = workload.support, workload.query

    def step() -> Gradient:
        model.zero_grad(set_to_none=True)
        for task in range(len(sx)):
            with higher.innerloop_ctx(model, inner, copy_initial_weights=False) as (
                adapted,
                optimizer,
            ):
                for _ in range(workload.steps):
                    optimizer.step(workload.loss(adapted(sx[task]), sy[task]))
                (workload.loss(adapted(qx[task]), qy[task]) / len(sx)).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    return ReadyContender(step, lambda: counts.maml(workload))


def prepare_fomaml(workload: Workload) -> ReadyContender:
    """First order: no graph across steps, the gradient is taken at the adapted weights."""
    higher = importlib.import_module("higher")
    model = workload.copy_model()
    names = [name for name, _ in model.named_parameters()]
    inner = torch.optim.SGD(model.parameters(), lr=workload.lr)
    (sx, sy), (qx, qy) = workload.support, workload.query

    def step() -> Gradient:
        total = [torch.zeros_like(p) for p in model.parameters()]
        for task in range(len(sx)):
            with higher.innerloop_ctx(model, inner, track_higher_grads=False) as (
                adapted,
                optimizer,
            ):
                for _ in range(workload.steps):
                    optimizer.step(workload.loss(adapted(sx[task]), sy[task]))
                loss = workload.loss(adapted(qx[task]), qy[task])
                torch._foreach_add_(
                    total, torch.autograd.grad(loss, list(adapted.parameters())), alpha=1 / len(sx)
                )
        return dict(zip(names, total, strict=True))

    return ReadyContender(step, lambda: counts.fomaml(workload))


_INSTALL = "pip install 'metanudge-lab[rivals]'"
CONTENDERS = (
    Contender("higher-maml", "MAML, higher", "higher", "MAML", prepare_maml, "higher", _INSTALL),
    Contender(
        "higher-fomaml", "FO-MAML, higher", "higher", "FO-MAML", prepare_fomaml, "higher", _INSTALL
    ),
)
