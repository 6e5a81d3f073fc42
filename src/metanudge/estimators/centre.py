"""The centre of a proximal term as a constant force moves it: where `start="shifted"` begins."""

from __future__ import annotations

import torch

from metanudge.engines import Inner
from metanudge.params import Params, norm
from metanudge.problem import TwoLevels
from metanudge.proximal import Custom, Diagonal, Matrix
from metanudge.solvers.conjugate_gradient import conjugate_gradient

MOST_PRODUCTS = 500


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
