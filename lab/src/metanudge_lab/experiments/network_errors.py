"""How far an estimate is from the two exact meta-gradients of a network: the implicit one, and that
of the K-step adaptation.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import metanudge as mn
from metanudge.engines import Cost, InplaceEngine
from metanudge.estimators import Estimator
from metanudge.params import Params
from metanudge.proximal.lanczos import extreme_eigenvalues
from metanudge.solvers import Solver
from metanudge.task import TaskBatch
from metanudge.testing.problems import vector
from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.base import Row

TARGETS = {"implicit": "implicit gradient", "steps": "gradient of the K steps"}


class Exact:
    """Both exact meta-gradients at a model's weights, in float64.

    Args:
        model: its weights are θ; it stays as it is.
        tasks: on which.
        steps: K.
        reach: steps after which the inner optimum is taken to be reached, with the stable inner
            learning rate 1/(L̂ + λ).
        optimum: what finds it instead.
        rate: inner learning rate of the K steps; the stable one by default.
        lam: λ.

    Attributes:
        residual: at the optimum, over that at θ.
        growth: the same after the K steps; above 1 they go astray.
    """

    def __init__(
        self,
        model: nn.Module,
        tasks: TaskBatch,
        *,
        steps: int,
        reach: int = 0,
        optimum: Solver | None = None,
        rate: float | None = None,
        lam: float = m.LAM,
    ) -> None:
        self.tasks, self.steps = tasks.to(torch.float64), steps
        double = copy.deepcopy(model).double()
        self.learner = mn.MetaLearner(
            double, nn.functional.cross_entropy, lam=lam, engine="stacked", compile=False
        )
        self.rate = 1 / (curvature(self.learner, self.tasks) + lam)
        solver = optimum or mn.GradientDescent(lr=self.rate, steps=reach)
        self.implicit, stats = self._gradient(mn.IMAML(cg_steps=300, tol=1e-10), solver)
        self.residual = stats.residual / stats.residual_start
        self.rate = self.rate if rate is None else rate
        self.adaptation, stats = self._gradient(mn.MAML(), self._steps)
        self.growth = stats.residual / stats.residual_start

    def compare(self, estimator: Estimator) -> Row:
        """Relative error and cosine against both, and the ν that was used; None where the estimate
        is not finite.
        """
        row: Row = {
            "rate": self.rate,
            "residual": self.residual,
            "agreement": cosine(self.implicit, self.adaptation),
        }
        try:
            estimate, stats = self._gradient(estimator, self._steps)
        except mn.NonFiniteError:
            return (
                row
                | {"nu_used": None}
                | dict.fromkeys(f"{kind}_{key}" for kind in ("error", "cosine") for key in TARGETS)
            )
        return row | {"nu_used": stats.nu} | compared(estimate, self.implicit, self.adaptation)

    @property
    def _steps(self) -> Solver:
        return mn.GradientDescent(lr=self.rate, steps=self.steps)

    def _gradient(self, estimator: Estimator, solver: Solver) -> tuple[Tensor, mn.Stats]:
        self.learner.estimator, self.learner.solver = estimator, solver
        found, stats = self.learner.meta_gradient(self.tasks, metrics=False)
        return vector(found), stats


def compared(estimate: Tensor, implicit: Tensor, adaptation: Tensor) -> Row:
    """Relative error and cosine of an estimate against both."""
    row: Row = {}
    for key, truth in (("implicit", implicit), ("steps", adaptation)):
        row |= {
            f"error_{key}": float((estimate - truth).norm() / truth.norm()),
            f"cosine_{key}": cosine(estimate, truth),
        }
    return row


def cosine(one: Tensor, other: Tensor) -> float:
    """Of the angle between two vectors."""
    return float(torch.cosine_similarity(one, other, dim=0))


def curvature(learner: mn.MetaLearner, tasks: TaskBatch) -> float:
    """The largest curvature of the tasks' support losses at θ, in absolute value, by Lanczos'
    method.
    """
    largest = 0.0
    with InplaceEngine().session(learner.problem(), tasks, width=1, seed=0, cost=Cost()) as groups:
        for inner in groups:
            zero = inner.zeros(1)
            generator = torch.Generator().manual_seed(0)
            start = {
                n: torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype).to(leaf.device)
                for n, leaf in zero.items()
            }

            def product(v: Params, inner: Any = inner, zero: Params = zero) -> Params:
                hv: Params = inner.data_hvp(zero, v, None, 0, None)[2]
                return hv

            largest = max(largest, *map(abs, extreme_eigenvalues(product, start)))
    return largest
