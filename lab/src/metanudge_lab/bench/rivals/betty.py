"""betty 0.1.1: iMAML as two `ImplicitProblem`s, the linear system by its conjugate gradient.

Its conjugate gradient is exact for one iteration only: later search directions are made from the
old residual instead of the new one, so with five iterations it does the work of iMAML and returns
another vector. What is compared here is the time.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

import torch
from torch import Tensor

from metanudge_lab.bench.contender import Contender, Gradient, ReadyContender, Work
from metanudge_lab.bench.workload import Workload

Batch = tuple[Tensor, Tensor]


def problems(workload: Workload, result: dict[str, Tensor]) -> tuple[Any, Any]:
    """The classes of the outer problem, which leaves the meta-gradient in `result`, and of the
    inner one.
    """
    base: Any = importlib.import_module("betty.problems").ImplicitProblem
    tasks, steps = len(workload.tasks), workload.steps
    (sx, sy), (qx, qy) = workload.support, workload.query

    class Outer(base):
        def get_batch(self) -> Batch:
            task = (self.count - 1) % tasks
            return qx[task], qy[task]

        def training_step(self, batch: Batch) -> Tensor:
            return workload.loss(self.inner(batch[0]), batch[1])

        def custom_optimizer_step(self) -> None:
            result.update(
                {name: p.grad for name, p in self.module.named_parameters() if p.grad is not None}
            )

    class Inner(base):
        def get_batch(self) -> Batch:
            task = (self.count - 1) // steps % tasks
            return sx[task], sy[task]

        def training_step(self, batch: Batch) -> Tensor:
            pairs = zip(self.trainable_parameters(), self.outer.trainable_parameters(), strict=True)
            distance = sum((phi - theta).square().sum() for phi, theta in pairs)
            return workload.loss(self.module(batch[0]), batch[1]) + 0.5 * workload.lam * distance

        def on_inner_loop_start(self) -> None:
            self.module.load_state_dict(self.outer.module.state_dict())

    return Outer, Inner


def prepare(workload: Workload, *, cg_steps: int = 5) -> ReadyContender:
    """An engine whose run is one meta-step: K inner steps for each task, the outer problem
    accumulating their gradients.
    """
    configs = importlib.import_module("betty.configs")
    engine = importlib.import_module("betty.engine").Engine
    importlib.import_module("betty.logging.logger_base").get_logger().setLevel(logging.WARNING)
    tasks, steps = len(workload.tasks), workload.steps
    result: dict[str, Tensor] = {}
    make_outer, make_inner = problems(workload, result)
    device = str(workload.device)
    outer = make_outer(
        "outer",
        configs.Config(gradient_accumulation=tasks, retain_graph=True, first_order=True),
        workload.copy_model(),
        device=device,
    )
    module = workload.copy_model()
    inner = make_inner(
        "inner",
        configs.Config(type="cg", cg_iterations=cg_steps, cg_alpha=1.0, unroll_steps=steps),
        module,
        torch.optim.SGD(module.parameters(), lr=workload.lr),
        device=device,
    )
    run = engine(
        config=configs.EngineConfig(train_iters=steps * tasks),
        problems=[outer, inner],
        dependencies={"u2l": {outer: [inner]}, "l2u": {inner: [outer]}},
    )

    def step() -> Gradient:
        run.run()
        return dict(result)

    return ReadyContender(step, lambda: Work(steps, 1, cg_steps))


CONTENDERS = (
    Contender(
        "betty-imaml",
        "iMAML, 5 CG steps, betty",
        "betty-ml",
        "iMAML",
        prepare,
        "betty",
        "pip install 'metanudge-lab[rivals]'",
    ),
)
