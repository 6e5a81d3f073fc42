"""Small seeded float64 problems that the tests share: each function returns a model, its loss and a batch of tasks.

    model, loss, tasks = logistic_regression(seed=1)
    learner = mn.MetaLearner(model, loss, lam=2.0, ...)

Models are in training mode; inputs are standard normal; classification targets follow a random teacher of each task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from metanudge import TaskBatch


class Setup(NamedTuple):
    """What `MetaLearner` needs, and the tasks to give it."""

    model: nn.Module
    loss: Callable[..., Tensor]
    tasks: TaskBatch


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
    """Quadratic tasks (paper, App. "Quadratic objective experiment"): f = f̂ unless `same` is False.

    The eigenvalues of every A run from 1/condition to 1. With `split` the model has two parameters: `theta`, the first
    `split` entries, and `rest`.
    """
    generator = torch.Generator().manual_seed(seed)
    support = _quadratics(condition, dim, tasks, generator)
    query = support if same else _quadratics(condition, dim, tasks, generator)
    model = Quadratic(torch.randn(dim, generator=generator, dtype=torch.float64), split)
    return Setup(model, quadratic_loss, TaskBatch(support=support, query=query))


def _quadratics(condition: float, dim: int, tasks: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    rotation = torch.linalg.qr(torch.randn(tasks, dim, dim, generator=generator, dtype=torch.float64)).Q
    eigenvalues = torch.logspace(0, -1, dim, base=condition, dtype=torch.float64)
    A = (rotation * eigenvalues) @ rotation.mT
    b = torch.randn(tasks, 1, dim, generator=generator, dtype=torch.float64)
    return (0.5 * (A + A.mT)).unsqueeze(1), b


def quadratic_solutions(setup: Setup, lam: float | Tensor) -> Tensor:
    """φ* of every task, `(tasks, dim)`: (Â + Λ)φ = Λθ − b̂."""
    theta = setup.model.vector.detach()
    stiffness = torch.as_tensor(lam, dtype=torch.float64).expand_as(theta)
    return torch.stack(
        [torch.linalg.solve(A[0] + torch.diag(stiffness), stiffness * theta - b[0]) for A, b in (task.support for task in setup.tasks)]
    )


def quadratic_meta_gradient(setup: Setup, lam: float | Tensor) -> Tensor:
    """The mean of ∇F_i = Λ(Â + Λ)⁻¹∇f(φ*) over the tasks, `(dim,)`; `lam` is a number or one number per entry.

    From (Â + Λ)φ* = Λθ − b̂ it follows that dφ*/dθ = (Â + Λ)⁻¹Λ, whose transpose stands before ∇f.
    """
    stiffness = torch.as_tensor(lam, dtype=torch.float64).expand_as(setup.model.vector)
    rows = []
    for task, phi in zip(setup.tasks, quadratic_solutions(setup, lam), strict=True):
        (A_hat, _), (A, b) = task.support, task.query
        rows.append(stiffness * torch.linalg.solve(A_hat[0] + torch.diag(stiffness), A[0] @ phi + b[0]))
    return torch.stack(rows).mean(0)


def logistic_regression(
    *, features: int = 4, classes: int = 3, tasks: int = 3, support: int = 12, query: int = 15, seed: int = 0
) -> Setup:
    """Linear softmax classification: convex and smooth."""
    model = seeded(seed, lambda: nn.Linear(features, classes))
    return Setup(model, F.cross_entropy, classification_tasks((features,), classes, tasks, support, query, seed))


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
    return Setup(model, F.cross_entropy, classification_tasks((features,), classes, tasks, support, query, seed))


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
    """Two convolutions with BatchNorm (affine, running statistics) on `size` × `size` images, for classification."""
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
    with torch.no_grad():  # away from the neutral weight 1 and bias 0, so that a forgotten affine part would show
        for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
            norm.weight.copy_(torch.linspace(0.5, 1.5, channels))
            norm.bias.copy_(torch.linspace(-0.3, 0.3, channels))
    return Setup(model, F.cross_entropy, classification_tasks((1, size, size), classes, tasks, support, query, seed))


class SmallTransformer(nn.Module):
    """One encoder layer, mean over the positions, linear head."""

    def __init__(self, width: int, heads: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(
            width, heads, dim_feedforward=2 * width, dropout=dropout, activation="gelu", batch_first=True
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
    return Setup(model, F.cross_entropy, classification_tasks((positions, width), classes, tasks, support, query, seed))


def classification_tasks(shape: tuple[int, ...], classes: int, tasks: int, support: int, query: int, seed: int) -> TaskBatch:
    """Normal inputs of a shape, labelled by a noisy linear teacher of each task."""
    generator = torch.Generator().manual_seed(1000 + seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    x = draw(tasks, support + query, *shape)
    teachers = draw(tasks, x[0, 0].numel(), classes)
    y = (x.flatten(2) @ teachers + draw(tasks, support + query, classes)).argmax(-1)
    return TaskBatch(support=(x[:, :support], y[:, :support]), query=(x[:, support:], y[:, support:]))


def seeded(seed: int, build: Callable[[], nn.Module]) -> nn.Module:
    """A float64 module whose initial parameters come from a seed; the global random state stays as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().double()


def vector(gradient: dict[str, Tensor]) -> Tensor:
    """A dict of tensors as one vector."""
    return torch.cat([leaf.flatten() for leaf in gradient.values()])


def relative_error(estimate: dict[str, Tensor] | Tensor, truth: dict[str, Tensor] | Tensor) -> float:
    """‖estimate − truth‖ / ‖truth‖."""
    a, b = (x if isinstance(x, Tensor) else vector(x) for x in (estimate, truth))
    return float((a - b).norm() / b.norm())


def log_slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The slope of the least-squares line through the points (log x, log y)."""
    a, b = (torch.tensor(values, dtype=torch.float64).log() for values in (x, y))
    a, b = a - a.mean(), b - b.mean()
    return float(a @ b / (a @ a))
