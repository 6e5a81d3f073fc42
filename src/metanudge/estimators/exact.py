"""The implicit gradient with a dense Hessian: the oracle the others are measured against."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from metanudge.engines import Inner
from metanudge.estimators.base import Estimator, solve_plainly
from metanudge.estimators.total import MetaGradient
from metanudge.params import flatten, unflatten
from metanudge.solvers.base import Solver, check_count
from metanudge.solvers.conjugate_gradient import LinearSolve


@dataclass(frozen=True)
class Exact(Estimator):
    """g_i = λ (∇²f̂ + λ)⁻¹ ∇f at φ_K  (paper, eq. 8): exact where the solver has converged.

    Args:
        max_parameters: refuse larger models; a dense Hessian has the square of this many entries
            per task.

    Cost per task: K support gradients, one Hessian-vector product per parameter, a dense solve.
    """

    max_parameters: int = 5000
    engines = ("stacked",)

    def __post_init__(self) -> None:
        check_count(
            self.max_parameters,
            "max_parameters",
            "5000 parameters take 200 MB per task in float64.",
        )

    def accumulate(self, inner: Inner, solver: Solver, total: MetaGradient) -> None:
        """Add the dense implicit gradients of a group of tasks."""
        size = sum(p.numel() for p in inner.problem.parameters.values())
        if size > self.max_parameters:
            raise ValueError(
                f"Exact builds a dense Hessian of {size} × {size} entries per task; the limit is"
                f" {self.max_parameters} parameters. Use IMAML(cg_steps=200, tol=1e-10) instead, a"
                " smaller model, or raise max_parameters."
            )
        d = solve_plainly(inner, solver, total).displacement
        q = total.query_gradient(inner, d)
        system = inner.hessian(d)
        total.check(
            inner.places, "Hessian (after the query gradient)", system.flatten(1).norm(dim=1)
        )
        target = flatten(q)
        x, info = torch.linalg.solve_ex(system, target)
        residual = (torch.linalg.vecdot(system, x.unsqueeze(1)) - target).norm(dim=1)
        singular = info > 0
        solve = LinearSolve(unflatten(x, d), residual, size, torch.zeros_like(singular), singular)
        inner.judge(solve)
        if bool(singular.any()):
            raise torch.linalg.LinAlgError(  # type: ignore[attr-defined]
                f"The Hessian of task {inner.places[int(singular.int().argmax())]} is singular"
                " where its solve ended, so there is no implicit gradient. Use a larger lam."
            )
        total.add_response(inner, d, solve.x, -1.0)
