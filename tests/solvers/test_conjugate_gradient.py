"""Conjugate gradient against dense solves, row by row."""

from __future__ import annotations

import torch
from torch import Tensor

from metanudge.params import flatten
from metanudge.solvers.conjugate_gradient import conjugate_gradient


def linear_systems() -> tuple[Tensor, Tensor]:
    """Four systems of ten unknowns: the identity, three distinct eigenvalues, ten of them, and one
    without a right-hand side.
    """
    generator = torch.Generator().manual_seed(3)
    rotation = torch.linalg.qr(torch.randn(4, 10, 10, generator=generator, dtype=torch.float64)).Q
    few = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64).repeat(4)[:10]
    many = torch.linspace(0.5, 10, 10, dtype=torch.float64)
    A = (rotation * torch.stack([torch.ones_like(few), few, many, many])[:, None]) @ rotation.mT
    b = torch.randn(4, 10, generator=generator, dtype=torch.float64)
    b[3] = 0
    return A, b


def cut(matrix: Tensor) -> dict[str, Tensor]:
    """Vectors of ten as a dict of two leaves of different shapes."""
    return {"matrix": matrix[:, :6].reshape(-1, 2, 3), "vector": matrix[:, 6:]}


def product_with(A: Tensor):
    return lambda v: cut((A @ flatten(v).unsqueeze(-1)).squeeze(-1))


def test_conjugate_gradient_solves_row_by_row():
    A, b = linear_systems()
    exact = torch.linalg.solve(A, b)
    for steps, solved in ((1, [0, 3]), (3, [0, 1, 3]), (10, [0, 1, 2, 3]), (40, [0, 1, 2, 3])):
        result = conjugate_gradient(product_with(A), cut(b), steps=steps)
        x = flatten(result.x)
        errors = (x - exact).norm(dim=1)
        assert [row for row in range(4) if errors[row] < 1e-10] == solved
        assert not result.indefinite.any()
        assert result.products == steps
        true_residual = (b - (A @ x.unsqueeze(-1)).squeeze(-1)).norm(dim=1)
        torch.testing.assert_close(result.residual, true_residual, rtol=1e-8, atol=1e-12)


def test_conjugate_gradient_stops_when_the_slowest_row_is_done():
    A, b = linear_systems()
    result = conjugate_gradient(product_with(A), cut(b), steps=40, tol=1e-9)
    assert result.products == 10
    assert (result.residual <= 1e-9 * b.norm(dim=1)).all()
    assert conjugate_gradient(product_with(A[:2]), cut(b[:2]), steps=40, tol=1e-9).products == 3
    alone = [
        conjugate_gradient(product_with(A[r : r + 1]), cut(b[r : r + 1]), steps=40, tol=1e-9)
        for r in range(4)
    ]
    assert [one.products for one in alone] == [1, 3, 10, 0]
    torch.testing.assert_close(
        flatten(result.x), torch.cat([flatten(one.x) for one in alone]), rtol=0, atol=1e-14
    )


def test_conjugate_gradient_flags_indefinite_rows_and_solves_the_others():
    A, b = linear_systems()
    bad = A.clone()
    bad[0] = -A[0]  # negative at the first direction
    values, vectors = torch.linalg.eigh(A[2])
    values[0] = -0.5  # negative in one direction among ten
    bad[2] = (vectors * values) @ vectors.T
    result = conjugate_gradient(product_with(bad), cut(b), steps=40, tol=1e-12)
    x = flatten(result.x)
    assert result.indefinite.tolist() == [True, False, True, False]
    assert torch.isfinite(x).all()
    assert torch.isfinite(result.residual).all()
    assert (x[0] == 0).all()  # what it had
    assert b[2] @ x[2] > 0  # still downhill
    torch.testing.assert_close(x[1], torch.linalg.solve(A[1], b[1]), rtol=0, atol=1e-10)
