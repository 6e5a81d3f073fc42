"""Small seeded float64 problems that the tests share: each function returns a model, its loss and a
batch of tasks.

    model, loss, tasks = logistic_regression(seed=1)
    learner = mn.MetaLearner(model, loss, lam=2.0, ...)

Models are in training mode; inputs are standard normal; classification targets follow a random
teacher of each task. The first of them come from `metanudge.testing.problems`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metanudge import TaskBatch
from metanudge.testing.problems import (
    Setup,
    classification_tasks,
    log_slope,
    logistic_regression,
    mlp,
    relative_error,
    seeded,
    vector,
)
from perturbation import perturbed

__all__ = [
    "Quadratic",
    "Setup",
    "classification_tasks",
    "conv_net",
    "log_slope",
    "logistic_regression",
    "mlp",
    "quadratic",
    "quadratic_meta_gradient",
    "quadratic_solutions",
    "relative_error",
    "seeded",
    "transformer",
    "vector",
]


class Quadratic(nn.Module):
    """½ φᵀAφ + φᵀb, where φ is one parameter `theta`, or `theta` and `rest` end to end."""

    def __init__(self, start: Tensor, split: int | None = None) -> None:
        super().__init__()
        head, tail = (start, None) if split is None else (start[:split], start[split:])
        self.theta = nn.Parameter(head.clone())
        self.rest = None if tail is None else nn.Parameter(tail.clone())

    @property
    def vector(self) -> Tensor:
        """φ, whole."""
        return self.theta if self.rest is None else torch.cat([self.theta, self.rest])

    def forward(self, A: Tensor, b: Tensor) -> Tensor:
        """A `(n, dim, dim)`, b `(n, dim)` → `(n,)`."""
        phi = self.vector
        return 0.5 * (A @ phi) @ phi + b @ phi


def quadratic_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The mean objective of a batch `(A, b)`."""
    return model(*batch).mean()


def quadratic(
    condition: float = 10.0,
    *,
    dim: int = 20,
    tasks: int = 3,
    seed: int = 0,
    same: bool = True,
    split: int | None = None,
) -> Setup:
    """Quadratic tasks (paper, App. "Quadratic objective experiment"): f = f̂ unless `same` is
    False.

    The eigenvalues of every A run from 1/condition to 1. With `split` the model has two parameters:
    `theta`, the first `split` entries, and `rest`.
    """
    generator = torch.Generator().manual_seed(seed)
    support = _quadratics(condition, dim, tasks, generator)
    query = support if same else _quadratics(condition, dim, tasks, generator)
    model = Quadratic(perturbed(torch.randn(dim, generator=generator, dtype=torch.float64)), split)
    return Setup(model, quadratic_loss, TaskBatch(support=support, query=query))


def _quadratics(
    condition: float, dim: int, tasks: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    rotation = torch.linalg.qr(
        torch.randn(tasks, dim, dim, generator=generator, dtype=torch.float64)
    ).Q
    eigenvalues = torch.logspace(0, -1, dim, base=condition, dtype=torch.float64)
    A = (rotation * eigenvalues) @ rotation.mT
    b = torch.randn(tasks, 1, dim, generator=generator, dtype=torch.float64)
    return (0.5 * (A + A.mT)).unsqueeze(1), b


def quadratic_solutions(setup: Setup, lam: float | Tensor) -> Tensor:
    """φ* of every task, `(tasks, dim)`: (Â + Λ)φ = Λθ − b̂."""
    theta = setup.model.vector.detach()
    stiffness = torch.as_tensor(lam, dtype=torch.float64).expand_as(theta)
    return torch.stack(
        [
            torch.linalg.solve(A[0] + torch.diag(stiffness), stiffness * theta - b[0])
            for A, b in (task.support for task in setup.tasks)
        ]
    )


def quadratic_meta_gradient(setup: Setup, lam: float | Tensor) -> Tensor:
    """The mean of ∇F_i = Λ(Â + Λ)⁻¹∇f(φ*) over the tasks, `(dim,)`; `lam` is a number or one number
    per entry.

    From (Â + Λ)φ* = Λθ − b̂ it follows that dφ*/dθ = (Â + Λ)⁻¹Λ, whose transpose stands before ∇f.
    """
    stiffness = torch.as_tensor(lam, dtype=torch.float64).expand_as(setup.model.vector)
    rows = []
    for task, phi in zip(setup.tasks, quadratic_solutions(setup, lam), strict=True):
        (A_hat, _), (A, b) = task.support, task.query
        rows.append(
            stiffness * torch.linalg.solve(A_hat[0] + torch.diag(stiffness), A[0] @ phi + b[0])
        )
    return torch.stack(rows).mean(0)


def conv_net(
    activation: Callable[[], nn.Module] = nn.Softplus,
    *,
    channels: int = 3,
    size: int = 6,
    classes: int = 3,
    dropout: float = 0.0,
    tasks: int = 3,
    support: int = 6,
    query: int = 9,
    seed: int = 0,
) -> Setup:
    """Two convolutions with BatchNorm (affine, running statistics) on `size` × `size` images, for
    classification.
    """
    model = seeded(
        seed,
        lambda: nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            activation(),
            nn.AvgPool2d(2),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            activation(),
            *([nn.Dropout(dropout)] if dropout else []),
            nn.Flatten(),
            nn.Linear(channels * (size // 2) ** 2, classes),
        ),
    )
    # away from the neutral weight 1 and bias 0, so that a forgotten affine part would show
    with torch.no_grad():
        for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
            norm.weight.copy_(torch.linspace(0.5, 1.5, channels))
            norm.bias.copy_(torch.linspace(-0.3, 0.3, channels))
    return Setup(
        model,
        F.cross_entropy,
        classification_tasks((1, size, size), classes, tasks, support, query, seed),
    )


class SmallTransformer(nn.Module):
    """One encoder layer, mean over the positions, linear head."""

    def __init__(self, width: int, heads: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(
            width,
            heads,
            dim_feedforward=2 * width,
            dropout=dropout,
            activation="gelu",
            batch_first=True,
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """x `(n, positions, width)` → logits `(n, classes)`."""
        return self.head(self.encoder(x).mean(1))


def transformer(
    *,
    width: int = 4,
    heads: int = 2,
    positions: int = 3,
    classes: int = 3,
    dropout: float = 0.0,
    tasks: int = 3,
    support: int = 6,
    query: int = 9,
    seed: int = 0,
) -> Setup:
    """A small Transformer on sequences of vectors, for classification."""
    model = seeded(seed, lambda: SmallTransformer(width, heads, classes, dropout))
    return Setup(
        model,
        F.cross_entropy,
        classification_tasks((positions, width), classes, tasks, support, query, seed),
    )
