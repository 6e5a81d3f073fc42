"""Conjugate gradient for symmetric positive-definite systems, row by row (Hestenes & Stiefel,
1952).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from metanudge.params import Params, add_scaled, dot, norm, zeros_like

Product = Callable[[Params], Params]


@dataclass(frozen=True)
class LinearSolve:
    """An approximate solution of A x = b.

    Attributes:
        x: the solution of each row.
        residual: ‖b − A x‖ of each row.
        products: matrix-vector products used.
        indefinite: rows in which a direction of non-positive curvature was met; they keep the x
            they had.
        singular: rows in which a direct solve found no x.
    """

    x: Params
    residual: Tensor
    products: int
    indefinite: Tensor
    singular: Tensor


def conjugate_gradient(
    matvec: Product, b: Params, *, steps: int, tol: float | Tensor = 0.0, damping: float = 0.0
) -> LinearSolve:
    """Solve A x = b from x = 0 with at most `steps` products; a row stops at ‖b − A x‖ ≤ tol·‖b‖ or
    at ⟨p, A p⟩ ≤ 0.

    `tol` is one number or one per row; `damping` is added to the diagonal of A.
    Rows that have stopped keep their x while the others go on.
    """
    x = zeros_like(b)
    r = {name: leaf.clone() for name, leaf in b.items()}
    p = r
    rr = dot(r, r)
    target = (tol * norm(b)) ** 2
    active = rr > target
    indefinite = torch.zeros_like(active)
    products = 0
    stops_early = isinstance(tol, Tensor) or tol > 0
    for _ in range(steps):
        # Without a tolerance the loop has a fixed length and never waits for the device.
        if stops_early and not bool(active.any()):
            break
        ap = matvec(p)
        if damping:
            ap = {name: torch.add(leaf, p[name], alpha=damping) for name, leaf in ap.items()}
        products += 1
        curvature = dot(p, ap)
        indefinite = indefinite | (active & (curvature <= 0))
        active = active & (curvature > 0)
        alpha = _ratio(rr, curvature, active)
        x = add_scaled(x, alpha, p)
        r = add_scaled(r, -alpha, ap)
        rr_new = dot(r, r)
        active = active & (rr_new > target)
        p = add_scaled(r, _ratio(rr_new, rr, active), p)
        rr = rr_new
    singular = torch.zeros_like(indefinite)
    return LinearSolve(x, rr.clamp_min(0).sqrt(), products, indefinite, singular)


def _ratio(a: Tensor, b: Tensor, active: Tensor) -> Tensor:
    """a / b in the rows that are active, 0 in the others."""
    return torch.where(active, a / torch.where(b == 0, 1.0, b), 0.0)
