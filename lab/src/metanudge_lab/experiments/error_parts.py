"""Where the error of a meta-gradient comes from, on the quadratic problem: the unfinished inner
solve, the linear system, or ν.

The exact meta-gradient is λv* with (A + λI) v* = ∇f(φ*) at the inner solution φ*. The error of an
estimate is the sum of three vectors:

- linear: the system is solved by K steps of gradient descent (FO-B-MAML) or n of conjugate gradient
  (iMAML), and everything else exactly;
- inner: query gradients are taken where the inner steps are, at φ_k, instead of at φ*;
- ν: a difference of two solves stands for a derivative in ν.

They may cancel in part: their norms need not add up to that of the error.
"""

from __future__ import annotations

import torch
from torch import Tensor

import metanudge as mn
from metanudge.estimators import Estimator
from metanudge_lab.experiments.quadratics import Problem

PARTS = {"inner": "unfinished inner solve", "linear": "linear system", "nu": "ν"}


class ErrorParts:
    """The parts of the error of one estimator on one problem; nothing for estimators that solve no
    linear system.

    Args:
        problem: tasks, θ and λ.
        estimator: whose error is split.
    """

    def __init__(self, problem: Problem, estimator: Estimator) -> None:
        self.problem, self.estimator, self.exact = problem, estimator, problem.exact
        self.A, self.b = (
            torch.cat([task.support[i] for task in problem.tasks]).double() for i in (0, 1)
        )
        self.inner = self.A + problem.lam * torch.eye(
            self.A.shape[-1], dtype=self.A.dtype, device=self.A.device
        )
        self.solution = torch.linalg.solve(self.inner, problem.lam * problem.theta - self.b)
        self._with_exact_solve = self._implicit() if isinstance(estimator, mn.IMAML) else None

    def __call__(self, steps: int, estimate: Tensor) -> dict[str, float]:
        """Norms of the parts, relative to that of the exact meta-gradient, for an estimate with so
        many inner steps.
        """
        if isinstance(self.estimator, mn.IMAML):
            assert self._with_exact_solve is not None
            linear, nu = self._with_exact_solve - self.exact, torch.zeros_like(estimate)
        elif isinstance(self.estimator, mn.FOBMAML) and self.estimator.start != "shifted":
            query = self._query(self.solution)
            linear = self._mean(self._response([query] * steps)) - self.exact
            nu = estimate - self._mean(self._response(self._pulls(steps)))
        else:
            return {}
        parts = {"inner": estimate - self.exact - linear - nu, "linear": linear, "nu": nu}
        return {
            f"part_{name}": float(part.norm() / self.exact.norm()) for name, part in parts.items()
        }

    def _pulls(self, steps: int) -> list[Tensor]:
        """The query gradients that drive dφ/dν in each step, `(tasks, dim)` each."""
        assert isinstance(self.estimator, mn.FOBMAML)
        path = self._path(2 * steps)
        if self.estimator.nudge == "gradient":
            return [self._query(path[steps])] * steps
        first = steps if self.estimator.start == "solution" else 0
        return [self._query(phi) for phi in path[first : first + steps]]

    def _path(self, steps: int) -> list[Tensor]:
        """φ_0 = θ to φ_K of every task."""
        path = [self.problem.theta.expand_as(self.b)]
        for _ in range(steps):
            gradient = _times(self.inner, path[-1]) + self.b - self.problem.lam * self.problem.theta
            path.append(path[-1] - self.problem.rate * gradient)
        return path

    def _response(self, pulls: list[Tensor]) -> Tensor:
        """Gradient descent on the linear system whose right-hand side changes from step to step:
        −dφ_K/dν.
        """
        v = torch.zeros_like(self.b)
        for pull in pulls:
            v = v + self.problem.rate * (pull - _times(self.inner, v))
        return v

    def _query(self, phi: Tensor) -> Tensor:
        return _times(self.A, phi) + self.b

    def _mean(self, v: Tensor) -> Tensor:
        return self.problem.lam * v.mean(0)

    def _implicit(self) -> Tensor:
        learner = self.problem.learner(self.estimator, 1)
        learner.solver = mn.NewtonCG(steps=10, cg_steps=200, tol=1e-12)
        (estimate,) = learner.meta_gradient(self.problem.tasks, metrics=False)[0].values()
        return estimate


def _times(matrices: Tensor, vectors: Tensor) -> Tensor:
    return (matrices @ vectors.unsqueeze(-1)).squeeze(-1)
