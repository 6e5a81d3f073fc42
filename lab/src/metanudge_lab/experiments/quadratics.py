"""The paper's synthetic problem, and the methods that are compared on it.

The paper gives no sizes. Its § on λ says that the condition number of A + λI falls from about 25 at
λ = 0.1 to 5 at λ = 10, so its eigenvalues lie between about 1.9 and 49; its λ = 2 is λ = 0.04 for
our tasks, whose largest eigenvalue is 1 (only the ratio counts).
"""

from __future__ import annotations

import torch
from torch import Tensor

import metanudge as mn
from metanudge.estimators import Estimator
from metanudge.task import TaskBatch
from metanudge.tasks import Quadratic

CONDITION = 26.0
LAM = 0.04
NU = 0.01

SYMMETRIC, FORWARD, GRADIENT, TANGENT = (
    f"FO-B-MAML {kind}" for kind in ("symmetric", "forward", "gradient nudge", "tangent")
)
IMAML_2, IMAML_5, IMAML_10 = (f"iMAML, {steps} CG steps" for steps in (2, 5, 10))
MAML, FO_MAML, REPTILE, ES_MAML = "MAML", "FO-MAML", "Reptile", "ES-MAML, 20 samples"


def methods(nu: float, *, seed: int = 0) -> dict[str, Estimator]:
    """Every estimator of the comparison; `seed` is that of ES-MAML's random directions."""
    return {
        SYMMETRIC: mn.FOBMAML(nu=nu),
        FORWARD: mn.FOBMAML(nu=nu, stencil="forward"),
        GRADIENT: mn.FOBMAML(nu=nu, nudge="gradient"),
        TANGENT: mn.FOBMAML(stencil="tangent"),
        IMAML_2: mn.IMAML(cg_steps=2),
        IMAML_5: mn.IMAML(cg_steps=5),
        IMAML_10: mn.IMAML(cg_steps=10),
        MAML: mn.MAML(),
        FO_MAML: mn.FOMAML(),
        REPTILE: mn.Reptile(),
        ES_MAML: mn.ESMAML(sigma=1e-3, samples=20, seed=seed),
    }


class Problem:
    """Some quadratic tasks and a θ drawn at random, with everything that is known of them in closed
    form, in float64.

    Args:
        seed: of the tasks and of θ.
        dim: number of parameters.
        tasks: how many.
        lam: λ.
        device: of the tensors.
        condition: of every A_i.
    """

    def __init__(
        self,
        seed: int,
        *,
        dim: int,
        tasks: int,
        lam: float,
        device: torch.device,
        condition: float = CONDITION,
    ) -> None:
        self.source = Quadratic(dim=dim, condition=condition, seed=seed, device=device)
        self.tasks: TaskBatch = next(iter(self.source.batches(size=tasks, count=1)))
        self.lam = lam
        generator = torch.Generator().manual_seed(seed)
        self.theta = torch.randn(dim, dtype=torch.float64, generator=generator).to(device)

    def learner(self, estimator: Estimator, steps: int) -> mn.MetaLearner:
        """A learner at θ whose inner loop is gradient descent with the stable learning rate 1/(L̂ +
        λ).
        """
        solver = mn.GradientDescent(lr=self.rate, steps=steps)
        return mn.MetaLearner(
            self.source.model(self.theta),
            self.source.loss,
            lam=self.lam,
            solver=solver,
            estimator=estimator,
        )

    @property
    def rate(self) -> float:
        """The inner learning rate: the largest eigenvalue of A_i is 1."""
        return 1 / (1 + self.lam)

    @property
    def exact(self) -> Tensor:
        """∇F(θ), the mean of the tasks' exact meta-gradients."""
        return torch.stack(
            [Quadratic.meta_gradient(task, self.theta, self.lam) for task in self.tasks]
        ).mean(0)

    def outer(self, steps: int | None = None) -> OuterLoss:
        """θ ↦ mean_i f_i(φ_i(θ)) with φ_i after so many steps, or the inner solution itself."""
        return OuterLoss(self, steps)


class OuterLoss:
    """The mean query loss after adaptation as the quadratic function of θ that it is:  ½ θᵀHθ + gᵀθ
    + c.

    Gradient descent from θ with step α gives  φ_K = φ* + R^K(θ − φ*)  with  R = I − α(A + λI)  and
    φ* = (A + λI)⁻¹(λθ − b), so φ_K = Pθ + q is affine in θ; for the inner solution R^K is 0.
    """

    def __init__(self, problem: Problem, steps: int | None) -> None:
        dim = problem.theta.shape[0]
        eye = torch.eye(dim, dtype=torch.float64, device=problem.theta.device)
        self.hessian, self.linear, self.constant = (
            torch.zeros_like(eye),
            torch.zeros_like(problem.theta),
            0.0,
        )
        for task in problem.tasks:
            A, b = (t[0].double() for t in task.support)
            inner = A + problem.lam * eye
            power = (
                torch.zeros_like(eye)
                if steps is None
                else torch.linalg.matrix_power(eye - problem.rate * inner, steps)
            )
            P = problem.lam * torch.linalg.inv(inner) @ (eye - power) + power
            q = -(eye - power) @ torch.linalg.solve(inner, b)
            self.hessian += P.T @ A @ P / len(problem.tasks)
            self.linear += P.T @ (A @ q + b) / len(problem.tasks)
            self.constant += float(0.5 * q @ A @ q + b @ q) / len(problem.tasks)
        self.lowest = self(-torch.linalg.solve(self.hessian, self.linear))

    def __call__(self, theta: Tensor) -> float:
        """The loss at θ."""
        return float(0.5 * theta @ self.hessian @ theta + self.linear @ theta) + self.constant

    def excess(self, theta: Tensor) -> float:
        """How far above its lowest value the loss is."""
        return self(theta) - self.lowest

    @property
    def curvature(self) -> float:
        """The largest eigenvalue of its Hessian: gradient descent on it is stable for rates below 2
        / curvature.
        """
        return float(torch.linalg.eigvalsh(self.hessian)[-1])
