"""iMAML: the implicit function theorem, the linear system solved by conjugate gradient (Rajeswaran
et al. 2019).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from metanudge.engines import Inner
from metanudge.estimators.base import Estimator, solve_plainly
from metanudge.estimators.total import MetaGradient
from metanudge.solvers.base import Solver, check_count
from metanudge.solvers.conjugate_gradient import conjugate_gradient


@dataclass(frozen=True)
class IMAML(Estimator):
    """λ (∇²f̂ + λ)⁻¹ ∇f at φ_K  (paper, eq. 9), the system solved with `cg_steps` Hessian-vector
    products.

    A learned stiffness gets −λ d ⊙ (∇²f̂ + λ)⁻¹∇f, shared layers ω get ∂_ω f − ∂²_ωφ f̂ (∇²f̂ +
    λ)⁻¹∇f, one more product.

    With `NewtonCG` as solver it is the Hessian-free variant of the iMAML paper.

    Args:
        cg_steps: conjugate-gradient steps; as many as parameters solve the system exactly.
        tol: stop once the linear residual is this small, relative to the query gradient.
        damping: solve with ∇²f̂ + λ + damping instead. Networks that have taken a few inner steps
            train far better with it (see `metanudge reproduce mnist1d`); the code released with
            iMAML is damped by λ + 20 (22 at λ = 2). The larger, the closer to FO-MAML, up to the
            gradient's length.

    Cost per task: K support gradients, one query gradient, `cg_steps` Hessian-vector products;
    needs double backward.
    """

    cg_steps: int = 5
    tol: float = 0.0
    damping: float = 0.0
    repeats_itself = True

    def __post_init__(self) -> None:
        check_count(self.cg_steps, "cg_steps", "The paper uses 5.")
        if self.tol < 0:
            raise ValueError(f"tol must not be negative, got {self.tol!r}. 0 takes all cg_steps.")
        if not 0 <= self.damping < math.inf:
            raise ValueError(
                f"damping must be a number of at least 0, got {self.damping!r}. 0 is the paper's"
                " iMAML, 22 as released."
            )

    def graphs(self, solver: Solver) -> int:
        """That of one Hessian-vector product."""
        return 1

    def accumulate(self, inner: Inner, solver: Solver, total: MetaGradient) -> None:
        """Add λ (∇²f̂ + λ)⁻¹ ∇f of a group of tasks."""
        d = solve_plainly(inner, solver, total).displacement
        q = total.query_gradient(inner, d)
        oracle = inner.oracle()
        solve = conjugate_gradient(
            lambda v: oracle.hvp(d, v), q, steps=self.cg_steps, tol=self.tol, damping=self.damping
        )
        total.check(
            inner.places,
            "residual of the conjugate gradient after the query gradient",
            solve.residual,
        )
        inner.judge(solve)
        total.add_response(inner, d, solve.x, -1.0)
