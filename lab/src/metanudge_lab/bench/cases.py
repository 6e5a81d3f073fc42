"""The cases: models and data shapes of the few-shot literature. The data are random numbers of the
right shape, always the same ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metanudge import models
from metanudge.names import near
from metanudge.task import TaskBatch
from metanudge.training.errors import UserError
from metanudge_lab.bench.workload import Shape, Workload

STEPS, LR, LAM = 5, 0.01, 2.0


@dataclass(frozen=True)
class Case:
    """A model and the shape of its tasks.

    Attributes:
        name, title: on the command line, and for people.
        build: the model of a shape.
        full, quick: the sizes, and small ones for tests.
        cpu_tasks: tasks on a CPU, if fewer.
    """

    name: str
    title: str
    build: Callable[[Shape], nn.Module]
    full: Shape
    quick: Shape
    cpu_tasks: int | None = None

    def make(
        self,
        device: torch.device | str = "cpu",
        *,
        quick: bool = False,
        steps: int = STEPS,
        lam: float = LAM,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        **sizes: Any,
    ) -> Workload:
        """The work of this case, with other sizes where some are named.

        Example:
            >>> print(CASES["sinusoid"].make(tasks=3))
            3 tasks of 10 support and 10 query examples, 5 inner steps, 1,761 parameters
        """
        device = torch.device(device)
        shape = self.quick if quick else self.full
        if self.cpu_tasks is not None and device.type == "cpu" and not quick:
            shape = dataclasses.replace(shape, tasks=self.cpu_tasks)
        shape = dataclasses.replace(shape, **sizes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.build(shape).to(device, dtype).train()
        generator = torch.Generator().manual_seed(seed + 1)
        tasks = TaskBatch(
            _examples(shape, shape.shots, generator, dtype),
            _examples(shape, shape.queries, generator, dtype),
        ).to(device)
        loss = F.cross_entropy if shape.ways else F.mse_loss
        return Workload(self.name, shape, model, loss, tasks, steps, LR, lam)


def _examples(
    shape: Shape, each: int, generator: torch.Generator, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    count = each * max(1, shape.ways)
    x = torch.randn(
        shape.tasks, count, *shape.features, generator=generator, dtype=torch.float64
    ).to(dtype)
    if shape.ways:
        return x, torch.arange(shape.ways).repeat(shape.tasks, each)
    return x, torch.sin(x).flatten(2).sum(-1, keepdim=True)


def _conv1d(shape: Shape) -> nn.Module:
    return models.Conv1D(ways=shape.ways, channels=shape.width, length=shape.features[0])


def _conv4(shape: Shape) -> nn.Module:
    return models.Conv4(ways=shape.ways, channels=shape.width, image_size=shape.features[1])


def _mlp(shape: Shape) -> nn.Module:
    return models.MLP(1, 1, hidden=(shape.width, shape.width))


def _transformer(shape: Shape) -> nn.Module:
    length, d_model = shape.features
    return models.TransformerBlock(
        ways=shape.ways, d_model=d_model, heads=8, hidden=4 * d_model, length=length
    )


_IMAGES = Shape(tasks=2, ways=3, shots=1, queries=2, features=(1, 16, 16), width=4)
CASES = {
    case.name: case
    for case in (
        Case(
            "mnist1d",
            "MNIST-1D, 3-way 5-shot, Conv1D",
            _conv1d,
            Shape(tasks=16, ways=3, shots=5, queries=10, features=(40,), width=16),
            Shape(tasks=2, ways=3, shots=1, queries=2, features=(16,), width=4),
        ),
        Case(
            "omniglot",
            "Omniglot, 5-way 1-shot, Conv4-64",
            _conv4,
            Shape(tasks=32, ways=5, shots=1, queries=15, features=(1, 28, 28), width=64),
            _IMAGES,
            cpu_tasks=16,
        ),
        Case(
            "omniglot-5shot",
            "Omniglot, 5-way 5-shot, Conv4-64",
            _conv4,
            Shape(tasks=32, ways=5, shots=5, queries=15, features=(1, 28, 28), width=64),
            dataclasses.replace(_IMAGES, shots=2),
            cpu_tasks=16,
        ),
        Case(
            "sinusoid",
            "Sinusoids, 10-shot, MLP 40-40",
            _mlp,
            Shape(tasks=25, ways=0, shots=10, queries=10, features=(1,), width=40),
            Shape(tasks=2, ways=0, shots=3, queries=4, features=(1,), width=5),
        ),
        Case(
            "transformer",
            "Sequences of 32 vectors, 5-way 1-shot, Transformer block of size 128",
            _transformer,
            Shape(tasks=16, ways=5, shots=1, queries=15, features=(32, 128), width=128),
            Shape(tasks=2, ways=3, shots=1, queries=2, features=(4, 16), width=16),
        ),
    )
}


def find_cases(names: tuple[str, ...]) -> list[Case]:
    """The cases of these names, all of them for none; `UserError` suggests the nearest for an
    unknown name.
    """
    for name in names:
        if name not in CASES:
            raise UserError(
                f"There is no case {name!r}.{near(name, CASES)} The cases are {', '.join(CASES)}."
            )
    return [CASES[name] for name in dict.fromkeys(names or CASES)]
