"""One identity for everything that is meta-learned: ∇F(h) = d/dν ∂_h[g + ν f](h, φ_ν) at ν = 0, ∂_h
at fixed φ.

It completes the paper's General Discussion. g is the inner objective, f the outer one, h any of: θ,
the centre of the proximal term; its learned stiffness; layers that all tasks share, on which f̂ and
f depend directly. Estimators differ in how they take d/dν: by a difference of solutions
(`add_partials`) or along the response dφ/dν (`add_response`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from metanudge.engines import Inner
from metanudge.estimators.total import MetaGradient
from metanudge.params import Params, norm, tiled
from metanudge.problem import TwoLevels
from metanudge.proximal import Custom, Diagonal, Matrix
from metanudge.solvers.conjugate_gradient import conjugate_gradient

MOST_PRODUCTS = 500


def add_partials(
    total: MetaGradient,
    inner: Inner,
    d: Params,
    weights: Sequence[float],
    *,
    offsets: Sequence[float] | None,
    scale: Params | None,
) -> None:
    """Add Σ_j w_j ∂_h[g + ν_j f](φ_j) of a group of tasks.

    Args:
        d: the displacements φ_j − θ, nudge by nudge.
        weights: w_j, one per nudge.
        offsets: ν_j, where the nudge is the loss f; without, f is not evaluated.
        scale: in place of λ.
    """
    problem = inner.problem
    rows, lam = problem.proximal.pull(d, inner.theta)
    total.add(rows, [-w for w in weights], lam if scale is None else scale)
    problem.proximal.accumulate(
        total.gradient, d, d, [0.5 * w / total.num_tasks for w in weights], scale
    )
    if problem.shared:
        each = {"nu": next(iter(d.values())).new_ones(inner.tasks)}
        nu = None if offsets is None else tiled(each, offsets)["nu"]
        total.add(inner.shared_gradient(d, nu, weights), 1.0)


def add_response(
    total: MetaGradient,
    inner: Inner,
    d: Params,
    v: Params,
    sign: float,
    scale: Params | None = None,
) -> None:
    """Add ∂²_hφ g · (± v), how ∂_h g changes as φ moves from θ + d along ± v; the direct term ∂_h f
    is `query_gradient`'s.
    """
    problem = inner.problem
    rows, lam = problem.proximal.pull(d, inner.theta, v)
    total.add(rows, -sign, lam if scale is None else scale)
    problem.proximal.accumulate(total.gradient, d, v, [sign / total.num_tasks], scale)
    if problem.shared:
        total.add(inner.shared_hvp(d, v), sign)


def query_gradient(
    total: MetaGradient | None,
    inner: Inner,
    d: Params,
    *,
    direct: bool = True,
    weight: float = 1.0,
) -> Params:
    """∇f(θ + d) by the parameters that adapt, of which `total` takes note; by the shared ones it is
    the direct term, which `total` gets from the same evaluation, times a weight.
    """
    if total is None:
        return inner.query_gradient(d)
    shared = inner.problem.shared if direct else {}
    g = inner.query_gradient(d, shared=bool(shared))
    if shared:
        total.add({n: g.pop(n) for n in shared}, weight)
    total.check(inner.places, "query gradient", norm(g))
    return g


def check_shifted(problem: TwoLevels) -> None:
    """Raise where there is no centre of a quadratic proximal term to shift."""
    if not problem.learns_theta:
        raise ValueError(
            "start='shifted' starts nudged solves at a moved proximal centre, and a general inner"
            " problem has no such centre. Use start='theta' (all solves start at init) or"
            " start='solution' (at the un-nudged solution)."
        )
    if isinstance(problem.proximal, Custom):
        raise ValueError(
            'start="shifted" moves the centre of a quadratic proximal term, but a regulariser was'
            ' given instead of one. Use start="theta" or start="solution".'
        )


def centre_shift(inner: Inner, force: Params) -> Params:
    """How far a constant force moves the centre of the proximal term: λ⁻¹ times the force, or A⁻¹
    for an operator A.
    """
    proximal = inner.problem.proximal
    if isinstance(proximal, Diagonal):
        return {n: leaf / proximal.lam[n] for n, leaf in force.items()}
    assert isinstance(proximal, Matrix)
    size = sum(leaf[0].numel() for leaf in force.values())
    tol = max(torch.finfo(leaf.dtype).eps for leaf in force.values()) ** 0.8
    solve = conjugate_gradient(proximal.product, force, steps=min(2 * size, MOST_PRODUCTS), tol=tol)
    if not bool((solve.residual <= 1e3 * tol * norm(force)).all()):
        raise ValueError(
            f'start="shifted" needs A⁻¹∇f for the operator A given as lam, and {solve.products}'
            " steps of conjugate gradient did not find it: A is badly conditioned. Use"
            ' start="theta" or start="solution".'
        )
    return solve.x
