"""learn2learn: `MAML` with `clone` and `adapt`, one task after the other."""

from __future__ import annotations

import importlib

from metanudge_lab.bench.contender import Contender, Gradient, ReadyContender
from metanudge_lab.bench.rivals import counts
from metanudge_lab.bench.workload import Workload


def prepare(workload: Workload, *, first_order: bool) -> ReadyContender:
    """A wrapped module; clones of it adapt, and gradients flow back to its weights."""
    algorithms = importlib.import_module("learn2learn.algorithms")
    model = workload.copy_model()
    maml = algorithms.MAML(model, lr=workload.lr, first_order=first_order)
    (sx, sy), (qx, qy) = workload.support, workload.query

    def step() -> Gradient:
        model.zero_grad(set_to_none=True)
        for task in range(len(sx)):
            learner = maml.clone()
            for _ in range(workload.steps):
                learner.adapt(workload.loss(learner(sx[task]), sy[task]))
            (workload.loss(learner(qx[task]), qy[task]) / len(sx)).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    return ReadyContender(
        step, lambda: counts.fomaml(workload) if first_order else counts.maml(workload)
    )


_INSTALL = "pip install learn2learn (from source on recent Pythons)"
CONTENDERS = (
    Contender(
        "l2l-maml",
        "MAML, learn2learn",
        "learn2learn",
        "MAML",
        lambda w: prepare(w, first_order=False),
        "learn2learn",
        _INSTALL,
    ),
    Contender(
        "l2l-fomaml",
        "FO-MAML, learn2learn",
        "learn2learn",
        "FO-MAML",
        lambda w: prepare(w, first_order=True),
        "learn2learn",
        _INSTALL,
    ),
)
