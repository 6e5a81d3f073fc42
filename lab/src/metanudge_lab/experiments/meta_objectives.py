"""Meta-objectives in closed form whose smoothness grows with their gradient, or does not.

Regression tasks: the inner loss is ½r² on a support set, so that φ_i*(θ) is affine in θ; the outer
loss ℓ(r) on a query set grows like r⁴, like e^|r|, or (a control) like |r|. And the case of
Proposition 3: a rippled inner loss under a quadratic outer one, where the growth comes from the
inner problem.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from metanudge.task import Batch, TaskBatch
from metanudge.testing.problems import Setup


class Values(NamedTuple):
    """F, ∇F and ∇²F, means over the tasks."""

    value: float
    gradient: Tensor
    hessian: Tensor


class MetaObjective(ABC):
    """F(θ) = mean_i f_i(φ_i*(θ)), in float64.

    Attributes:
        start: a θ far out.
        tasks: how many.
    """

    start: Tensor
    tasks: int

    @abstractmethod
    def gradients(self, theta: Tensor) -> Tensor:
        """∇F_i(θ) of every task, `(tasks, dim)`."""

    @abstractmethod
    def hessians(self, theta: Tensor) -> Tensor:
        """∇²F_i(θ) of every task, `(tasks, dim, dim)`."""

    @abstractmethod
    def values(self, theta: Tensor) -> Tensor:
        """F_i(θ) of every task."""

    def gradient(self, theta: Tensor) -> Tensor:
        """∇F(θ)."""
        return self.gradients(theta).mean(0)

    def all(self, theta: Tensor) -> Values:
        """Everything at θ."""
        return Values(
            float(self.values(theta).mean()), self.gradient(theta), self.hessians(theta).mean(0)
        )

    def minimiser(self) -> Tensor:
        """θ* by damped Newton steps."""
        theta = self.start.clone()
        for _ in range(200):
            here = self.all(theta)
            curvature = torch.linalg.eigvalsh(here.hessian)[0].clamp(max=0)
            system = here.hessian - (2 * curvature - 1e-12) * torch.eye(
                len(theta), dtype=theta.dtype, device=theta.device
            )
            step = torch.linalg.solve(system, here.gradient)
            scale = 1.0
            while float(self.values(theta - scale * step).mean()) > here.value and scale > 1e-12:
                scale /= 2
            theta = theta - scale * step
            if float(here.gradient.norm()) < 1e-12:
                break
        return theta


class Regression(MetaObjective):
    """Linear regression tasks, inner loss ½r² on the support set, outer loss ℓ(r) on the query set.

    Args:
        growth: of ℓ: "quartic" r⁴/4, "exponential" cosh r − 1, "linear" log cosh r.
        seed: of tasks and start.
        radius: ‖θ‖ at the start.
    """

    def __init__(
        self,
        growth: str,
        seed: int,
        *,
        dim: int,
        tasks: int,
        lam: float,
        radius: float,
        device: torch.device,
        examples: int = 20,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator, dtype=torch.float64).to(device)

        self.growth, self.tasks, self.lam = growth, tasks, lam
        self.x_hat, self.x = draw(tasks, examples, dim), draw(tasks, examples, dim)
        teachers = 0.5 * draw(tasks, dim)
        self.y_hat, self.y = (
            (x @ teachers[:, :, None])[..., 0] + 0.3 * draw(tasks, examples)
            for x in (self.x_hat, self.x)
        )
        direction = draw(dim)
        self.start = radius * direction / direction.norm()
        system = self.x_hat.mT @ self.x_hat / examples + lam * torch.eye(
            dim, dtype=torch.float64, device=device
        )
        self._jacobian = lam * torch.linalg.inv(system)
        self._offset = torch.linalg.solve(
            system, (self.x_hat.mT @ self.y_hat[..., None])[..., 0] / examples
        )

    def solutions(self, theta: Tensor) -> Tensor:
        """φ_i*(θ), `(tasks, dim)`."""
        return self._jacobian @ theta + self._offset

    def gradients(self, theta: Tensor) -> Tensor:
        """J_iᵀ ∇f_i(φ_i*)."""
        r = self._residuals(theta)
        weights = (
            r**3
            if self.growth == "quartic"
            else r.sinh()
            if self.growth == "exponential"
            else r.tanh()
        )
        return (self._jacobian @ (self.x.mT @ weights[..., None] / self.x.shape[1]))[..., 0]

    def hessians(self, theta: Tensor) -> Tensor:
        """J_iᵀ ∇²f_i(φ_i*) J_i."""
        r = self._residuals(theta)
        curvature = (
            3 * r**2
            if self.growth == "quartic"
            else r.cosh()
            if self.growth == "exponential"
            else 1 - r.tanh() ** 2
        )
        inner = (self.x.mT * curvature[:, None]) @ self.x / self.x.shape[1]
        return self._jacobian @ inner @ self._jacobian

    def values(self, theta: Tensor) -> Tensor:
        """f_i(φ_i*)."""
        return growing(self._residuals(theta), self.growth).mean(1)

    def _residuals(self, theta: Tensor) -> Tensor:
        return (self.x @ self.solutions(theta)[..., None])[..., 0] - self.y

    def setup(self, theta: Tensor) -> Setup:
        """The same problem for a `MetaLearner`."""
        growth = self.growth

        def loss(model: nn.Module, batch: Batch) -> Tensor:
            x, y, outer = batch
            r = model(x)[..., 0] - y
            return torch.where(outer > 0, growing(r, growth), r**2 / 2).mean()

        model = nn.Linear(len(theta), 1, bias=False, dtype=torch.float64, device=theta.device)
        with torch.no_grad():
            model.weight.copy_(theta)
        tasks = TaskBatch(
            (self.x_hat, self.y_hat, torch.zeros_like(self.y_hat)),
            (self.x, self.y, torch.ones_like(self.y)),
        )
        return Setup(model, loss, tasks)


def growing(r: Tensor, growth: str) -> Tensor:
    """ℓ(r)."""
    if growth == "quartic":
        return r**4 / 4
    if growth == "exponential":
        return r.cosh() - 1
    return (
        r.abs()
        + torch.nn.functional.softplus(-2 * r.abs())
        - torch.log(torch.tensor(2.0, dtype=r.dtype))
    )  # log cosh, without overflow


class Rippled(MetaObjective):
    """f̂_i(φ) = s Σ_j cos(ωφ_j) and f_i(φ) = ½‖φ − c_i‖²: the assumptions of Proposition 3, with λ
    = 2L̂₁.

    L̂₁ = sω², L̂₂ = sω³, L₁ = 1. Every coordinate is a problem of its own: φ_j solves  λ(φ − θ) =
    sω sin(ωφ).
    """

    def __init__(
        self,
        seed: int,
        *,
        dim: int,
        tasks: int,
        lam: float,
        radius: float,
        device: torch.device,
        frequency: float = 5.0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tasks, self.lam, self.frequency = tasks, lam, frequency
        self.size = lam / (2 * frequency**2)
        self.centres = 0.5 * torch.randn(tasks, dim, generator=generator, dtype=torch.float64).to(
            device
        )
        direction = torch.randn(dim, generator=generator, dtype=torch.float64).to(device)
        self.start = radius * direction / direction.norm()

    @property
    def constants(self) -> tuple[float, float, float]:
        """L₁, L̂₁ and L̂₂."""
        return 1.0, self.size * self.frequency**2, self.size * self.frequency**3

    def solution(self, theta: Tensor) -> Tensor:
        """φ*(θ), the same for all tasks."""
        s, w, phi = self.size, self.frequency, theta.clone()
        for _ in range(60):  # the map has slope below ½, Newton's method then squares the error
            residual = self.lam * (phi - theta) - s * w * torch.sin(w * phi)
            phi = (
                phi - residual / (self.lam - s * w**2 * torch.cos(w * phi))
                if float(residual.norm()) < 1e-2
                else phi - residual / self.lam
            )
            if float(residual.norm()) < 1e-14 * self.lam * (1 + float(theta.norm())):
                break
        return phi

    def gradients(self, theta: Tensor) -> Tensor:
        """φ'(θ) (φ − c_i)."""
        phi = self.solution(theta)
        return self._slope(phi) * (phi - self.centres)

    def hessians(self, theta: Tensor) -> Tensor:
        """φ'² + φ''(φ − c_i) on the diagonal."""
        phi = self.solution(theta)
        slope = self._slope(phi)
        bend = (
            -self.size * self.frequency**3 * torch.sin(self.frequency * phi) * slope**3 / self.lam
        )
        return torch.diag_embed(slope**2 + bend * (phi - self.centres))

    def values(self, theta: Tensor) -> Tensor:
        """½‖φ − c_i‖²."""
        return ((self.solution(theta) - self.centres) ** 2).sum(1) / 2

    def _slope(self, phi: Tensor) -> Tensor:
        """φ'(θ) = λ / (λ − sω² cos ωφ)."""
        return self.lam / (
            self.lam - self.size * self.frequency**2 * torch.cos(self.frequency * phi)
        )
