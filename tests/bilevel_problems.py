"""Bilevel problems whose hypergradient is known without automatic differentiation; seeded.

    problem = ridge(per_feature=True)
    result = mn.hypergradient(problem.inner, problem.outer, problem.x, problem.init)
    relative_error(result.gradient, problem.truth)

The regulariser of feature j is ½ exp(x_j) φ_j², with one x for all features or one each. The outer
loss is the loss on validation data, plus, with `direct`, a term in which x stands by itself and one
in which it meets φ.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from perturbation import perturbed

FEATURES, TRAIN, VALIDATION = 4, 12, 9
DIRECT = 0.5


class Known(NamedTuple):
    """A bilevel problem and the answers."""

    inner: Callable[[Any, Any], Tensor]
    outer: Callable[[Any, Any], Tensor]
    x: Tensor
    init: Tensor
    solution: Tensor
    truth: Tensor
    direct: Tensor  # the part of `truth` that does not go through φ
    # the least and the largest eigenvalue of the inner Hessian at the solution
    curvature: tuple[float, float]


def ridge(
    *,
    per_feature: bool = True,
    direct: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Known:
    """½ mean (Aφ − b)² + ½ Σ exp(x_j) φ_j², solved by the normal equations."""
    (A, b), (V, c), x, init = _data(per_feature, seed, dtype)

    def inner(x: Tensor, phi: Tensor) -> Tensor:
        return 0.5 * (A @ phi - b).square().mean() + 0.5 * (x.exp() * phi.square()).sum()

    def outer(x: Tensor, phi: Tensor) -> Tensor:
        return 0.5 * (V @ phi - c).square().mean() + _direct(x, phi, direct)

    hessian = A.T @ A / len(A) + torch.diag(x.exp().expand(FEATURES))
    solution = torch.linalg.solve(hessian, A.T @ b / len(A))
    force = V.T @ (V @ solution - c) / len(V)
    return _known(inner, outer, x, init, solution, hessian, force, direct)


def logistic(
    *,
    per_feature: bool = True,
    direct: bool = False,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Known:
    """mean log(1 + exp(−b Aφ)) + ½ Σ exp(x_j) φ_j² with b = ±1, solved by Newton's method with the
    formulas written out.
    """
    (A, b), (V, c), x, init = _data(per_feature, seed, dtype)
    b, c = b.sign(), c.sign()

    def inner(x: Tensor, phi: Tensor) -> Tensor:
        return F.softplus(-b * (A @ phi)).mean() + 0.5 * (x.exp() * phi.square()).sum()

    def outer(x: Tensor, phi: Tensor) -> Tensor:
        return F.softplus(-c * (V @ phi)).mean() + _direct(x, phi, direct)

    weight = x.exp().expand(FEATURES)
    phi = torch.zeros(FEATURES, dtype=dtype)
    for _ in range(50):
        wrong = 1 / (1 + (b * (A @ phi)).exp())
        hessian = (A.T * (wrong * (1 - wrong))) @ A / len(A) + torch.diag(weight)
        phi = phi - torch.linalg.solve(hessian, weight * phi - A.T @ (b * wrong) / len(A))
    force = -V.T @ (c / (1 + (c * (V @ phi)).exp())) / len(V)
    return _known(inner, outer, x, init, phi, hessian, force, direct)


def _data(
    per_feature: bool, seed: int, dtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    teacher = draw(FEATURES)
    sets = []
    for size in (TRAIN, VALIDATION):
        inputs = draw(size, FEATURES)
        sets.append((inputs, inputs @ teacher + 0.7 * draw(size)))
    x = -0.7 + 0.5 * (draw(FEATURES) if per_feature else draw(1)[0])
    return sets[0], sets[1], perturbed(x), perturbed(draw(FEATURES))


def _direct(x: Tensor, phi: Tensor, direct: bool) -> Tensor | float:
    return DIRECT * (x.square().sum() + (x * phi).sum()) if direct else 0.0


def _known(
    inner: Callable[..., Tensor],
    outer: Callable[..., Tensor],
    x: Tensor,
    init: Tensor,
    phi: Tensor,
    hessian: Tensor,
    force: Tensor,
    direct: bool,
) -> Known:
    """∇F = ∂_x f − (∂_x ∂_φ g)ᵀ H⁻¹ ∂_φ f, where ∂_φ g has exp(x_j) φ_j in its entry j."""
    plain = torch.zeros_like(phi)
    if direct:
        plain = DIRECT * (2 * x * torch.ones_like(phi) / (1 if x.ndim else FEATURES) + phi)
        force = force + DIRECT * x
    through = -x.exp() * phi * torch.linalg.solve(hessian, force)
    if x.ndim == 0:
        plain, through = plain.sum(), through.sum()
    eigenvalues = torch.linalg.eigvalsh(hessian)
    return Known(
        inner,
        outer,
        x,
        init,
        phi,
        plain + through,
        plain,
        (float(eigenvalues[0]), float(eigenvalues[-1])),
    )
