"""Quadratic tasks, whose inner solution and meta-gradient are known in closed form (the paper,
appendix, § Quadratic objective experiment).

f_i(θ) = f̂_i(θ) = ½ θᵀA_iθ + θᵀb_i with random symmetric positive definite A_i.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from metanudge.task import Batch, Task
from metanudge.tasks.counts import check_count
from metanudge.tasks.draws import Keys, fork, normal, uniform
from metanudge.tasks.episodes import Episodes, Split


class QuadraticModel(nn.Module):
    """A model that is nothing but its parameters: `model(A, b)` is ½ θᵀAθ + θᵀb for every example.

    Args:
        theta: initial value of the one parameter, shape `(dim,)`.
    """

    def __init__(self, theta: Tensor) -> None:
        super().__init__()
        self.theta = nn.Parameter(theta.detach().clone())

    def forward(self, A: Tensor, b: Tensor) -> Tensor:
        """The objectives: A `(n, dim, dim)`, b `(n, dim)` → `(n,)`."""
        return 0.5 * (A @ self.theta) @ self.theta + b @ self.theta


class Quadratic(Episodes):
    """Quadratic objectives of a given condition number; support and query are the same batch `(A,
    b)`.

    A_i = QᵀΛQ with a random orthogonal Q. The extreme eigenvalues are exactly 1 and 1/condition,
    the others are log-uniform between them; b_i ~ N(0, spread²·I). A batch is the pair A `(1, dim,
    dim)`, b `(1, dim)`: one example, which is the whole objective. Train with `loss=source.loss` on
    `source.model()`.

    Args:
        dim: number of parameters.
        condition: largest over smallest eigenvalue of every A_i, at least 1.
        seed: of the stream of tasks.
        spread: standard deviation of the entries of b_i; how far apart the solutions of the tasks
            lie.
        device, dtype: of the tensors.

    Example:
        >>> source = Quadratic(dim=3, condition=10, seed=0)
        >>> task, model = source.task(0), source.model()
        >>> phi = source.solution(task, model.theta, lam=2.0)
        >>> A, b = (t[0] for t in task.support)
        >>> # the inner gradient vanishes
        >>> bool((A @ phi + b + 2.0 * (phi - model.theta)).norm() < 1e-12)
        True
    """

    kind: ClassVar[Literal["classification", "regression"]] = "regression"

    def __init__(
        self,
        dim: int = 20,
        *,
        condition: float = 100.0,
        seed: int = 0,
        spread: float = 1.0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__(ways=1, shots=1, queries=1, seed=seed, device=device, dtype=dtype)
        dim = check_count("dim", dim, why="A quadratic needs at least one parameter.")
        if not 1 <= condition < np.inf or (dim == 1 and condition != 1):
            raise ValueError(
                f"condition={condition} is not a condition number of a {dim}×{dim} matrix: it is"
                " the ratio of the largest to the smallest eigenvalue. Use 1 or more, and exactly"
                " 1 when dim=1."
            )
        if not 0 <= spread < np.inf:
            raise ValueError(
                f"spread={spread} is not a standard deviation. Use 0 or a positive number."
            )
        self.dim = dim
        self.condition = float(condition)
        self.spread = float(spread)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one A: `(dim, dim)`."""
        return (self.dim, self.dim)

    def model(self, theta: Tensor | None = None) -> QuadraticModel:
        """A module with one parameter `theta`, zeros unless a start is given."""
        start = torch.zeros(self.dim) if theta is None else theta
        return QuadraticModel(start.to(self.device, self.dtype))

    @staticmethod
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        """The scalar objective of a batch `(A, b)`."""
        A, b = batch
        value: Tensor = model(A, b).mean()
        return value

    @staticmethod
    def solution(task: Task, theta: Tensor, lam: float | Tensor, nu: float = 0.0) -> Tensor:
        """φ*_ν = (Â + νA + λI)⁻¹(λθ − b̂ − νb), the nudged inner solution, in float64.

        Args:
            task: support (Â, b̂) and query (A, b); the paper has both equal.
            theta: θ, shape `(dim,)`.
            lam: λ, a scalar or one per parameter.
            nu: ν, the size of the nudge by the query loss.
        """
        (A_hat, b_hat), (A, b) = _objective(task.support), _objective(task.query)
        theta, stiffness = _prior(theta, lam)
        phi: Tensor = torch.linalg.solve(
            A_hat + nu * A + torch.diag(stiffness), stiffness * theta - b_hat - nu * b
        )
        return phi

    @staticmethod
    def meta_gradient(task: Task, theta: Tensor, lam: float | Tensor) -> Tensor:
        """∇F_i(θ) = λ(Â + λI)⁻¹(Aφ* + b), the exact meta-gradient, in float64.

        Example:
            >>> source = Quadratic(dim=3, condition=10, seed=0)
            >>> task, theta, nu = source.task(0), torch.ones(3), 1e-5
            >>> plus, minus = (source.solution(task, theta, 2.0, nu=s * nu) for s in (1, -1))
            >>> difference = -2.0 * (plus - minus) / (2 * nu)                # Proposition 1
            >>> bool((difference - source.meta_gradient(task, theta, 2.0)).norm() < 1e-9)
            True
        """
        (A_hat, _), (A, b) = _objective(task.support), _objective(task.query)
        phi = Quadratic.solution(task, theta, lam)
        _, stiffness = _prior(theta, lam)
        gradient: Tensor = stiffness * torch.linalg.solve(
            A_hat + torch.diag(stiffness), A @ phi + b
        )
        return gradient

    def draw(self, keys: Keys, split: Split) -> tuple[Batch, Batch]:
        """One task per key."""
        tasks, dim = len(keys), self.dim
        gaussian = normal(fork(keys, np.array([0])), dim * dim).reshape(tasks, dim, dim)
        rotation, triangle = np.linalg.qr(gaussian)
        # With the diagonal of R made positive, Q is uniform over the orthogonal matrices (Mezzadri
        # 2007).
        rotation *= np.sign(np.diagonal(triangle, axis1=1, axis2=2))[:, None, :]
        exponents = uniform(fork(keys, np.array([1])), dim)
        exponents[:, 0] = 0.0
        exponents[:, -1] = 1.0 if dim > 1 else 0.0
        eigenvalues = self.condition**-exponents
        A = (rotation * eigenvalues[:, None, :]) @ rotation.transpose(0, 2, 1)
        A = 0.5 * (A + A.transpose(0, 2, 1))
        b = self.spread * normal(fork(keys, np.array([2])), dim)
        batch = tuple(torch.from_numpy(t)[:, None].to(self.dtype).to(self.device) for t in (A, b))
        return batch, tuple(t.clone() for t in batch)


def _objective(batch: Batch) -> tuple[Tensor, Tensor]:
    """A and b of a batch; the loss is the mean over its examples."""
    A, b = batch
    return A.double().mean(dim=0), b.double().mean(dim=0)


def _prior(theta: Tensor, lam: float | Tensor) -> tuple[Tensor, Tensor]:
    theta = theta.detach().double()
    return theta, torch.as_tensor(lam, dtype=torch.float64, device=theta.device).expand_as(theta)
