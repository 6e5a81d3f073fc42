"""φ, θ and one byte an entry give the displacement back, close enough that only its own rounding
and 2⁻⁹ of that of φ are seen.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from metanudge.engines.descent import pieces, recovered, remainder

BITS = {torch.float32: 24, torch.float64: 53}


def numbers(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """θ and d of all sizes, d from far below the rounding of θ to far above θ itself."""
    generator = torch.Generator().manual_seed(0)
    sign = torch.randn(2, 300, 7, generator=generator, dtype=dtype)
    size, ratio = torch.rand(2, 300, 7, generator=generator, dtype=dtype)
    theta = sign[0] * 10 ** (8 * size - 4)
    return theta, theta * sign[1] * 10 ** (18 * ratio - 12)


@pytest.mark.parametrize("dtype", BITS)
def test_what_comes_back(dtype: torch.dtype):
    theta, d = numbers(dtype)
    phi = theta + d
    lost = remainder(phi, theta, d, most=100)
    assert lost.dtype == torch.int8
    error = (recovered(phi, theta, lost) - d).abs()
    bound = 1.01 * 2.0 ** -(BITS[dtype] + 8) * phi.abs() + 2.0 ** -BITS[dtype] * d.abs()
    assert bool((error <= bound).all())
    assert float(((phi - theta - d).abs() / bound).max()) > 100, (
        "without the remainders much is lost"
    )


@pytest.mark.parametrize("dtype", BITS)
def test_where_a_number_is_zero_nothing_is_lost(dtype: torch.dtype):
    theta, d = numbers(dtype)
    for left, right in (
        (theta, -theta),
        (theta, torch.zeros_like(theta)),
        (torch.zeros_like(theta), d),
        (0 * theta, 0 * d),
    ):
        phi = left + right
        assert torch.equal(recovered(phi, left, remainder(phi, left, right, most=100)), right)


def test_the_smallest_and_the_largest_numbers():
    least, largest = (torch.finfo(torch.float32).smallest_normal, torch.finfo(torch.float32).max)
    theta = torch.tensor([least / 8, -least, least, largest, 1.0])
    d = torch.tensor([least / 4, least / 2, -least / 8, -largest / 3, largest])
    phi = theta + d
    torch.testing.assert_close(
        recovered(phi, theta, remainder(phi, theta, d, most=2)), d, rtol=1e-7, atol=0
    )


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_so(bad: float):
    theta, d = torch.ones(1), torch.full((1,), bad)
    phi = theta + d
    assert not torch.isfinite(recovered(phi, theta, remainder(phi, theta, d, most=1))).any()


@pytest.mark.parametrize("shape", [(1,), (1, 7), (1, 3, 50), (1, 4, 2, 3, 3)])
@pytest.mark.parametrize("most", [1, 10, 1000])
def test_pieces_cover_a_tensor_once(shape: tuple[int, ...], most: int):
    whole = torch.zeros(shape)
    sizes = []
    for piece, same in pieces(whole, whole, most=most):
        piece += 1
        assert piece.shape == same.shape
        sizes.append(piece.numel())
    assert torch.equal(whole, torch.ones(shape))
    assert max(sizes) <= max(most, whole.numel() // max(shape))
