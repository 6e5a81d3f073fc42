"""Problems on which a ν chooses itself: from a quadratic to a network with kinks."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from metanudge.task import TaskBatch
from metanudge.tasks import Quadratic
from metanudge.testing.problems import Setup, seeded
from metanudge_lab.experiments.problems import conv_net


def quadratic(seed: int, tasks: int) -> Setup:
    """Quadratic tasks in 20 dimensions, condition number 10; query objectives of their own, unlike
    the paper's.
    """
    source = Quadratic(dim=20, condition=10, seed=seed)
    drawn = next(iter(source.batches(size=2 * tasks, count=1))).stacks[0]
    batch = TaskBatch(
        support=tuple(t[:tasks] for t in drawn.support), query=tuple(t[tasks:] for t in drawn.query)
    )
    theta = torch.randn(20, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return Setup(source.model(theta), source.loss, batch)


def logistic(seed: int, tasks: int) -> Setup:
    """Softmax regression on 8 features, 3 classes."""
    return _classification(seed, tasks, (8,), lambda: nn.Linear(8, 3))


def tanh(seed: int, tasks: int) -> Setup:
    """A perceptron with 16 hidden units and tanh."""
    return _classification(
        seed, tasks, (8,), lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    )


def relu(seed: int, tasks: int) -> Setup:
    """A convolutional network with ReLU and max-pooling on 12 × 12 images."""
    return _classification(seed, tasks, (1, 12, 12), lambda: conv_net(smooth=False, size=12))


PROBLEMS: dict[str, Callable[[int, int], Setup]] = {
    "quadratic": quadratic,
    "logistic": logistic,
    "tanh": tanh,
    "relu": relu,
}
TITLES = {
    "quadratic": "quadratic",
    "logistic": "logistic regression",
    "tanh": "tanh perceptron",
    "relu": "ReLU and max-pool conv net",
}


def _classification(
    seed: int, tasks: int, shape: tuple[int, ...], build: Callable[[], nn.Module]
) -> Setup:
    """15 support and 30 query examples a task, normal, labelled by a noisy linear teacher of each
    task.
    """
    generator = torch.Generator().manual_seed(1000 + seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    x = draw(tasks, 45, *shape)
    teachers = draw(tasks, x[0, 0].numel(), 3) / math.sqrt(x[0, 0].numel())
    y = (x.flatten(2) @ teachers + 0.5 * draw(tasks, 45, 3)).argmax(-1)
    batch = TaskBatch(support=(x[:, :15], y[:, :15]), query=(x[:, 15:], y[:, 15:]))
    return Setup(seeded(seed, build), nn.functional.cross_entropy, batch)
