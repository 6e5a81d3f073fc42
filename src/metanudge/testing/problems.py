"""Small seeded float64 problems: each function returns a model, its loss and a batch of tasks.

    model, loss, tasks = logistic_regression(seed=1)
    learner = mn.MetaLearner(model, loss, lam=2.0, ...)

Models are in training mode; inputs are standard normal; classification targets follow a random
teacher of each task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metanudge.task import TaskBatch


class Setup(NamedTuple):
    """What `MetaLearner` needs, and the tasks to give it."""

    model: nn.Module
    loss: Callable[..., Tensor]
    tasks: TaskBatch


def logistic_regression(
    *,
    features: int = 4,
    classes: int = 3,
    tasks: int = 3,
    support: int = 12,
    query: int = 15,
    seed: int = 0,
) -> Setup:
    """Linear softmax classification: convex and smooth."""
    model = seeded(seed, lambda: nn.Linear(features, classes))
    return Setup(
        model,
        F.cross_entropy,
        classification_tasks((features,), classes, tasks, support, query, seed),
    )


def mlp(
    activation: Callable[[], nn.Module] = nn.Tanh,
    *,
    features: int = 3,
    hidden: int = 5,
    classes: int = 3,
    dropout: float = 0.0,
    tasks: int = 3,
    support: int = 6,
    query: int = 9,
    seed: int = 0,
) -> Setup:
    """A perceptron with one hidden layer, for classification."""
    model = seeded(
        seed,
        lambda: nn.Sequential(
            nn.Linear(features, hidden),
            activation(),
            *([nn.Dropout(dropout)] if dropout else []),
            nn.Linear(hidden, classes),
        ),
    )
    return Setup(
        model,
        F.cross_entropy,
        classification_tasks((features,), classes, tasks, support, query, seed),
    )


def classification_tasks(
    shape: tuple[int, ...], classes: int, tasks: int, support: int, query: int, seed: int
) -> TaskBatch:
    """Normal inputs of a shape, labelled by a noisy linear teacher of each task."""
    generator = torch.Generator().manual_seed(1000 + seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    x = draw(tasks, support + query, *shape)
    teachers = draw(tasks, x[0, 0].numel(), classes)
    y = (x.flatten(2) @ teachers + draw(tasks, support + query, classes)).argmax(-1)
    return TaskBatch(
        support=(x[:, :support], y[:, :support]), query=(x[:, support:], y[:, support:])
    )


def seeded(seed: int, build: Callable[[], nn.Module]) -> nn.Module:
    """A float64 module whose initial parameters come from a seed; the global random state stays as
    it is.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().double()


def vector(gradient: Mapping[str, Tensor]) -> Tensor:
    """A dict of tensors as one vector."""
    return torch.cat([leaf.flatten() for leaf in gradient.values()])


def relative_error(
    estimate: Mapping[str, Tensor] | Tensor, truth: Mapping[str, Tensor] | Tensor
) -> float:
    """‖estimate − truth‖ / ‖truth‖."""
    a, b = (x if isinstance(x, Tensor) else vector(x) for x in (estimate, truth))
    return float((a - b).norm() / b.norm())


def log_slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The slope of the least-squares line through the points (log x, log y).

    Example:
        >>> round(log_slope([1, 10, 100], [2, 200, 20000]), 6)
        2.0
    """
    a, b = (torch.tensor(values, dtype=torch.float64).log() for values in (x, y))
    a, b = a - a.mean(), b - b.mean()
    return float(a @ b / (a @ a))
