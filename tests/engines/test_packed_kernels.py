"""The Triton kernels of 16-bit parameters do what their pieces do: on a CUDA device, or in Triton's
interpreter where it is installed.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

CUDA = torch.cuda.is_available()
HERE = "cuda" if CUDA else "cpu"
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="needs Triton (with a CUDA device or without)",
)

from metanudge.engines import packed  # noqa: E402
from metanudge.engines.packed import Packed, Step  # noqa: E402

SIZES = [(1,), (63, 65), (4096,), (3, 5, 1111)]
LAMBDAS = ["none", "number", "tensor"]


@pytest.fixture
def kernels() -> Iterator[Any]:
    """Calls a function with the kernels, and without."""
    from metanudge.engines.packed_kernels import KERNELS

    with pytest.MonkeyPatch.context() as patch:

        def both(work: Any) -> tuple[Any, Any]:
            found = []
            for chosen in (KERNELS, None):
                patch.setattr(packed, "_kernels_for", lambda _, chosen=chosen: chosen)
                found.append(work())
            return found[0], found[1]

        yield both


def multiples(shape: tuple[int, ...], unit: float, limit: int, seed: int) -> Tensor:
    """Whole multiples of a power of two, so that all sums and products below are exact in float32,
    fused or not, and only the rounding to 24 bits is left to be compared.
    """
    generator = torch.Generator().manual_seed(seed)
    return (unit * torch.randint(-limit, limit + 1, shape, generator=generator)).to(HERE)


def factor(kind: str, shape: tuple[int, ...]) -> Tensor | None:
    """λ ∈ {1/2, 1, 2}."""
    if kind == "none":
        return None
    exponents = multiples(shape if kind == "tensor" else (), 1.0, 1, 5)
    return torch.exp2(exponents)


def same(a: Packed, b: Packed) -> bool:
    return torch.equal(a.high, b.high) and torch.equal(a.low, b.low)


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("lam", LAMBDAS)
def test_a_step(kernels: Any, shape: tuple[int, ...], lam: str):
    """d in units of 2⁻¹⁰ up to 16 (14 bits and a sign), g of 2⁻⁴ up to 8, λ a power of two, α =
    2⁻³: the new d is a multiple of 2⁻¹⁴ below 32, which float32 holds and 16 bits do not.
    """
    start, by = multiples(shape, 2**-10, 2**14, 0), factor(lam, shape)
    g = multiples(shape, 2**-4, 2**7, 1).bfloat16()

    def work() -> tuple[Packed, Tensor]:
        d = Packed.of(start)
        sums, _ = packed.descend(d, g, 0.125, by, None, keep=False)
        return d, sums[0].sum()

    (ours, square), (pieces, expected) = kernels(work)
    assert same(ours, pieces)
    assert not torch.equal(ours.open(), start)
    # 10⁴ positive terms, each rounded once and again at every addition
    torch.testing.assert_close(square, expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("shape", [*SIZES, (2**20 + 5,)])
def test_a_step_in_two_parts(kernels: Any, shape: tuple[int, ...]):
    """Parallel parts: then every sample knows the angle between them."""
    start, g = multiples(shape, 2**-10, 2**14, 0), multiples(shape, 2**-4, 2**7, 1).bfloat16()

    def work() -> tuple[Packed, Tensor]:
        d, step = Packed.of(start), Step()
        step.take(d, g, 0.125, None, last=False)
        step.take(d, 2 * g, 0.125, None, last=False)
        return d, Step.norms([step])[0]

    (ours, norm), (pieces, expected) = kernels(work)
    assert same(ours, pieces)
    torch.testing.assert_close(norm, expected, rtol=1e-4, atol=0)
    torch.testing.assert_close(norm, 3 * g.float().norm(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_where_the_parameters_are(kernels: Any, shape: tuple[int, ...], dtype: torch.dtype):
    """One float32 sum, rounded to 16 bits: there is nothing to be fused."""
    if dtype == torch.bfloat16 and not CUDA:
        pytest.skip("Triton's interpreter cuts bfloat16 off instead of rounding")
    generator = torch.Generator().manual_seed(2)
    theta = torch.randn(shape, generator=generator).to(HERE, dtype)
    d = Packed.of(0.01 * torch.randn(shape, generator=generator).to(HERE))

    def work() -> Tensor:
        phi = torch.empty_like(theta)
        packed.place(d, theta, phi)
        return phi

    ours, pieces = kernels(work)
    assert torch.equal(ours, pieces)


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("scale", LAMBDAS)
@pytest.mark.parametrize("whole", [True, False])
def test_adding_up(kernels: Any, shape: tuple[int, ...], scale: str, whole: bool):
    start, rows = multiples(shape, 2**-10, 2**14, 0), multiples(shape, 2**-8, 2**12, 3)
    more = rows if whole else Packed.of(rows)

    def work() -> Packed:
        total = Packed.of(start)
        packed.add(total, more, -0.25, factor(scale, shape))
        return total

    ours, pieces = kernels(work)
    assert same(ours, pieces)


def test_what_is_no_number(kernels: Any):
    """Infinities and NaN stay what they are; of a CUDA device's NaN all bits are ones."""
    bits = torch.tensor([0x7FFFFFFF, 0x7F800000, -0x00800000, 0x7F7FFFFF], dtype=torch.int32)
    start, g = bits.view(torch.float32).to(HERE), torch.zeros(4, device=HERE).bfloat16()

    def work() -> Packed:
        d = Packed.of(start)
        packed.descend(d, g, 0.5, None, None, keep=False)
        return d

    ours, pieces = kernels(work)
    expected = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.inf], device=HERE)
    for found in (ours, pieces):
        torch.testing.assert_close(found.open(), expected, equal_nan=True, rtol=0, atol=0)
