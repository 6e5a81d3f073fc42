"""The implicit gradient with a dense Hessian: the oracle the others are measured against."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from metanudge.engines import Inner
from metanudge.engines.stacked import StackedInner
from metanudge.estimators.base import MetaGradient, solve_plainly
from metanudge.params import flatten, norm, unflatten
from metanudge.solvers.base import Solver, check_count


@dataclass(frozen=True)
class Exact:
    """g_i = λ (∇²f̂ + λ)⁻¹ ∇f at φ_K  (paper, eq. 8): exact where the solver has converged.

    Args:
        max_parameters: refuse larger models; a dense Hessian has the square of this many entries per task.

    Cost per task: K support gradients, one Hessian-vector product per parameter, a dense solve.
    """

    max_parameters: int = 5000
    engines = ("stacked",)
    width = 1

    def __post_init__(self) -> None:
        check_count(self.max_parameters, "max_parameters", "5000 parameters take 200 MB per task in float64.")

    def check(self, solver: Solver) -> None:
        """Any solver will do."""

    def accumulate(self, inner: Inner, solver: Solver, total: MetaGradient) -> None:
        """Add the dense implicit gradients of a group of tasks."""
        assert isinstance(inner, StackedInner)
        size = sum(p.numel() for p in inner.problem.parameters.values())
        if size > self.max_parameters:
            raise ValueError(
                f"Exact builds a dense Hessian of {size} × {size} entries per task; the limit is {self.max_parameters} parameters. "
                "Use IMAML(cg_steps=200, tol=1e-10) instead, a smaller model, or raise max_parameters."
            )
        d = solve_plainly(inner, solver, total).displacement
        q = inner.query_gradient(d)
        total.check(inner.places, "query gradient", norm(q))
        lam = flatten({n: inner.problem.lam[n].expand_as(leaf[0]).unsqueeze(0) for n, leaf in d.items()})[0]
        system = inner.hessian(d) + torch.diag(lam)
        total.check(inner.places, "Hessian (after the query gradient)", system.flatten(1).norm(dim=1))
        x = torch.linalg.solve(system, flatten(q))
        total.add(unflatten(x, d), 1.0, inner.problem.lam)
