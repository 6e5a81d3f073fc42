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
from metanudge.task import TaskBatch
from metanudge.testing.problems import vector
from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.base import Row

TARGETS = {"implicit": "implicit gradient", "steps": "gradient of the K steps"}


class Exact:
    """Both exact meta-gradients at a model's weights, in float64 and with the stable inner learning
    rate 1/(L̂ + λ).

    Args:
        model: its weights are θ; it stays as it is.
        tasks: on which.
        steps: K.
        reach: steps after which the inner optimum is taken to be reached.
    """

    def __init__(self, model: nn.Module, tasks: TaskBatch, *, steps: int, reach: int) -> None:
        self.tasks, self.steps = tasks.to(torch.float64), steps
        double = copy.deepcopy(model).double()
        self.learner = mn.MetaLearner(
            double, nn.functional.cross_entropy, lam=m.LAM, engine="stacked", compile=False
        )
        self.rate = 1 / (curvature(self.learner, self.tasks) + m.LAM)
        self.implicit, stats = self._gradient(mn.IMAML(cg_steps=300, tol=1e-10), reach)
        self.residual = stats.residual / stats.residual_start
        self.adaptation, _ = self._gradient(mn.MAML(), steps)

    def compare(self, estimator: Estimator) -> Row:
        """Relative error and cosine against both, and the ν that was used; None where the estimate
        is not finite.
        """
        row: Row = {
            "rate": self.rate,
            "residual": self.residual,
            "agreement": _cosine(self.implicit, self.adaptation),
        }
        try:
            estimate, stats = self._gradient(estimator, self.steps)
        except mn.NonFiniteError:
            return (
                row
                | {"nu_used": None}
                | dict.fromkeys(f"{kind}_{key}" for kind in ("error", "cosine") for key in TARGETS)
            )
        row["nu_used"] = stats.nu
        for key, truth in (("implicit", self.implicit), ("steps", self.adaptation)):
            row |= {
                f"error_{key}": float((estimate - truth).norm() / truth.norm()),
                f"cosine_{key}": _cosine(estimate, truth),
            }
        return row

    def _gradient(self, estimator: Estimator, steps: int) -> tuple[Tensor, mn.Stats]:
        self.learner.estimator, self.learner.solver = (
            estimator,
            mn.GradientDescent(lr=self.rate, steps=steps),
        )
        found, stats = self.learner.meta_gradient(self.tasks, metrics=False)
        return vector(found), stats


def _cosine(one: Tensor, other: Tensor) -> float:
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
