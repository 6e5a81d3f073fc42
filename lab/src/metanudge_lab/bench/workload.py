"""The work that every contender does: a model, a meta-batch, and how to adapt."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from metanudge.task import TaskBatch


@dataclass(frozen=True)
class Shape:
    """The sizes of a case.

    Attributes:
        tasks: tasks in a meta-batch.
        ways: classes of a task; 0 for regression.
        shots, queries: support and query examples, of each class where there are classes.
        features: shape of one example.
        width: channels, hidden units or vector size of the model.
    """

    tasks: int
    ways: int
    shots: int
    queries: int
    features: tuple[int, ...]
    width: int


@dataclass(frozen=True)
class Workload:
    """One meta-step to be done: K steps of gradient descent on every task, then the mean
    meta-gradient of all parameters.

    Attributes:
        case: name of the case.
        shape: its sizes.
        model: in training mode; contenders work on copies.
        loss: `loss(output, target)`.
        tasks: all of one shape, on the model's device.
        steps, lr: of the inner gradient descent.
        lam: stiffness of the proximal term, which only those contenders have whose method needs it.
    """

    case: str
    shape: Shape
    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    tasks: TaskBatch
    steps: int
    lr: float
    lam: float

    @property
    def device(self) -> torch.device:
        """Where the model and the tasks are."""
        return next(self.model.parameters()).device

    @property
    def parameters(self) -> int:
        """Number of trainable numbers of the model."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    @property
    def support(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each `(tasks, examples, ...)`."""
        (stack,) = self.tasks.stacks
        return stack.support[0], stack.support[1]

    @property
    def query(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each `(tasks, examples, ...)`."""
        (stack,) = self.tasks.stacks
        return stack.query[0], stack.query[1]

    def copy_model(self) -> nn.Module:
        """A model of one's own with the same weights."""
        return copy.deepcopy(self.model)

    def describe(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "tasks": len(self.tasks),
            "ways": self.shape.ways,
            "shots": self.shape.shots,
            "queries": self.shape.queries,
            "features": list(self.shape.features),
            "support": self.support[0].shape[1],
            "query": self.query[0].shape[1],
            "parameters": self.parameters,
            "steps": self.steps,
            "lr": self.lr,
            "lam": self.lam,
            "dtype": str(next(self.model.parameters()).dtype).removeprefix("torch."),
        }

    def __str__(self) -> str:
        counts = f"{self.support[0].shape[1]} support and {self.query[0].shape[1]} query examples"
        return (
            f"{len(self.tasks)} tasks of {counts}, {self.steps} inner steps, {self.parameters:,}"
            " parameters"
        )
