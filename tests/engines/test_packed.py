"""Displacements and meta-gradients of 16-bit parameters in 24 bits: what is lost, and what is
saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import metanudge as mn
from metanudge import params
from metanudge.engines import packed
from metanudge.engines.packed import Packed, PackedParams
from metanudge.testing.memory import Allocations
from problems import Setup, classification_tasks, seeded

# Half a unit in the last of 16 binary digits.
ROUNDING = 2.0**-16


def numbers(*shape: int) -> Tensor:
    """Of all sizes."""
    generator = torch.Generator().manual_seed(0)
    sign = torch.randn(*shape, generator=generator)
    return sign * 10 ** (20 * torch.rand(*shape, generator=generator) - 15)


def test_what_comes_back():
    x = numbers(3, 50)
    assert torch.equal(Packed.of(Packed.of(x).open()).open(), Packed.of(x).open())
    assert float(((Packed.of(x).open() - x) / x).abs().max()) <= ROUNDING
    assert torch.equal(Packed.of(x.bfloat16()).open(), x.bfloat16().float())
    assert Packed.of(x).nbytes == 3 * x.numel()


def test_what_is_no_number_stays_so():
    bits = torch.tensor([0x7FFFFFFF, 0x7F800000, -0x00800000, 0, -(2**31)], dtype=torch.int32)
    x = bits.view(torch.float32)  # the NaN of CUDA devices, infinities, zeros
    torch.testing.assert_close(Packed.of(x).open(), x, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("piece", [7, 2**20])
@pytest.mark.parametrize("lam", ["none", "number", "tensor"])
def test_the_three_operations(piece: int, lam: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packed, "_PIECE", piece)
    monkeypatch.setattr(packed, "_MOST", 2**20)
    generator = torch.Generator().manual_seed(1)
    d, g, theta = (torch.randn(1, 5, 9, generator=generator) for _ in range(3))
    d, low, theta = Packed.of(d).open(), g.bfloat16(), theta.bfloat16()
    by = {"none": None, "number": torch.tensor(2.0), "tensor": torch.rand(5, 9)}[lam]
    factor = torch.zeros(()) if by is None else by
    step = low.float() + factor * d
    moved = Packed.of(d)
    sums, _ = packed.descend(moved, low, 0.1, by, None, keep=False)
    torch.testing.assert_close(sums.sum(), step.square().sum())
    torch.testing.assert_close(moved.open(), d - 0.1 * step, rtol=2 * ROUNDING, atol=1e-7)
    phi = torch.empty_like(theta)
    packed.place(moved, theta, phi)
    assert torch.equal(phi, (theta.float() + moved.open()).bfloat16())
    for rows in (moved, moved.open()[0]):
        total = Packed.of(theta[0])
        packed.add(total, rows, -0.3, by)
        expected = theta[0].float() - 0.3 * (1 if by is None else by) * moved.open()[0]
        torch.testing.assert_close(total.open(), expected, rtol=2 * ROUNDING, atol=1e-7)


def test_leaves_are_copies_in_their_order():
    d = PackedParams({"a": torch.ones(1), "b": Packed.of(torch.ones(2)), "c": torch.zeros(1)})
    assert list(d) == ["a", "b", "c"] == [name for name, _ in d.items()]
    d["b"].add_(1)
    d["a"].add_(1)
    assert [leaf.tolist() for leaf in d.values()] == [[2.0], [1.0, 1.0], [0.0]]
    assert (d.pop("b").tolist(), list(d), dict(d.packed)) == ([1.0, 1.0], ["a", "c"], {})


# ----------------------------------------------------------------------------------- in the engine


def large(dtype: torch.dtype = torch.bfloat16, layers: int = 5, tasks: int = 2) -> Setup:
    """Layers of the least size that is packed; parameters weigh more than activations."""
    model = seeded(
        0,
        lambda: nn.Sequential(
            *(layer for _ in range(layers) for layer in (nn.Linear(256, 256), nn.Tanh())),
            nn.Linear(256, 3),
        ),
    )
    data = classification_tasks((256,), 3, tasks, 6, 6, 0)
    return Setup(model.to(dtype), F.cross_entropy, data.to(dtype))


def found(setup: Setup, estimator: Any, *, nu: float = 0.1, **options: Any) -> tuple[Tensor, Any]:
    options = {"lam": 2.0, "solver": mn.GradientDescent(0.05, 5), **options}
    learner = mn.MetaLearner(
        setup.model, setup.loss, estimator=estimator, engine="inplace", **options
    )
    gradient, stats = learner.meta_gradient(setup.tasks)
    return torch.cat([leaf.double().flatten() for leaf in gradient.values()]), stats


ESTIMATORS = {
    "loss": mn.FOBMAML(nu=0.1),
    "small nudge": mn.FOBMAML(nu=0.01),
    "gradient": mn.FOBMAML(nu=0.1, nudge="gradient"),
    "shifted": mn.FOBMAML(nu=0.1, nudge="gradient", start="shifted"),
    "solution": mn.FOBMAML(nu=0.1, start="solution", stencil="forward"),
    "FO-MAML": mn.FOMAML(),
    "Reptile": mn.Reptile(),
    "differences": mn.MAML(products="difference", epsilon=0.02),
}


@pytest.fixture
def unpacked() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def cosine(x: Tensor, y: Tensor) -> float:
    return float(torch.dot(x, y) / (x.norm() * y.norm()))


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_farther_from_float64_than_float32_is(
    name: str, dtype: torch.dtype, unpacked: pytest.MonkeyPatch
):
    """The same 16-bit parameters in float64, and the same estimator: 1 − cosine is what the
    gradients' rounding makes of it, and a fifth of it is luck.
    """
    setup, estimator = large(dtype), ESTIMATORS[name]
    ours, stats = found(setup, estimator)
    unpacked.setattr(params, "LEAST_PACKED", 2**40)
    whole, expected = found(setup, estimator)
    truth, _ = found(
        Setup(setup.model.double(), setup.loss, setup.tasks.to(torch.float64)), estimator
    )
    assert 1 - cosine(ours, truth) <= 1.2 * (1 - cosine(whole, truth))
    assert stats.residual == pytest.approx(expected.residual, rel=0.01)
    assert stats.query_loss == pytest.approx(expected.query_loss, rel=0.01)
    assert stats.gradient_norm == pytest.approx(float(ours.norm()), rel=1e-4)


def test_a_stiffness_for_each_entry_and_shared_layers(unpacked: pytest.MonkeyPatch):
    setup = large()
    generator = torch.Generator().manual_seed(3)
    lam = {
        n: 1 + torch.rand(p.shape, generator=generator) for n, p in setup.model.named_parameters()
    }
    own = {n: leaf for n, leaf in lam.items() if not n.startswith("0.")}
    options = {"lam": own, "adapt": [f"{place}.*" for place in range(2, 11, 2)]}
    ours = found(setup, mn.FOBMAML(nu=0.1), **options)[0]
    unpacked.setattr(params, "LEAST_PACKED", 2**40)
    whole = found(setup, mn.FOBMAML(nu=0.1), **options)[0]
    assert cosine(ours, whole) > 0.999


def test_ten_bytes_a_parameter(unpacked: pytest.MonkeyPatch):
    """θ, φ, and 3 bytes each of displacement and meta-gradient: φ was there before. Gradients are
    gone as soon as they are there; a layer's is at hand, in float32 with what it is made of.
    """
    setup = large(layers=24)
    size = sum(p.numel() for p in setup.model.parameters())
    learner = mn.MetaLearner(
        setup.model,
        setup.loss,
        estimator=mn.FOBMAML(nu=0.1),
        engine="inplace",
        solver=mn.GradientDescent(0.05, 5),
    )
    layer, activations = 256 * 256 * (2 + 5 * 4), 24 * 2 * 6 * 256 * 2 + 2**16

    def peak() -> int:
        learner.problem()
        with Allocations() as seen:
            learner.meta_gradient(setup.tasks, metrics=False)
        return seen.peak

    assert peak() <= 8 * size + layer + activations
    unpacked.setattr(params, "LEAST_PACKED", 2**40)
    assert peak() > 13 * size, "two float32 copies and a whole gradient"


def test_a_plan_for_a_cuda_device_asks_what_kernels_ask():
    """Sums of tiles and a sample of them, and no pieces in float32."""
    size = 4 * packed._PIECE
    with FakeTensorMode():
        d, theta, phi, g = (
            torch.empty(size, dtype=torch.bfloat16, device="cuda") for _ in range(4)
        )
        moved, total = (Packed.zeros(d.shape, d.device) for _ in range(2))
        with Allocations() as seen:
            step = packed.Step()
            step.take(moved, g, 0.1, torch.ones((), device="cuda"), last=False)
            step.take(moved, g, 0.1, None, last=True)
            packed.place(moved, theta, phi)
            packed.add(total, moved, 1.0, None)
    tiles = size // packed._TILE
    assert seen.peak <= 4 * (1 + 4 + packed._SEEN) * tiles + 2**10
    assert step._squares[1].device.type == "cuda"
