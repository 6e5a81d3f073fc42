"""The outer optimizers against formulas written a second time in NumPy, and against the theory they
come from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from metanudge.optim import SNGDM, ClippedGD, NormalizedGD, global_norm

Arrays = list[np.ndarray]
SHAPES = [(3, 2), (4,), (), (0,)]

BUILD: dict[str, Callable[..., Optimizer]] = {
    "clipped": lambda params, lr=0.1: ClippedGD(params, lr, max_norm=2.0),
    "clipped, loose": lambda params, lr=0.1: ClippedGD(params, lr, max_norm=1e6),
    "normalized": lambda params, lr=0.1: NormalizedGD(params, lr),
    "normalized, smoothed": lambda params, lr=0.1: NormalizedGD(params, lr, smoothing=3.0),
    "sngdm": lambda params, lr=0.1: SNGDM(params, lr, momentum=0.7),
}
every = pytest.mark.parametrize("name", BUILD)


def length(arrays: Sequence[np.ndarray]) -> float:
    return math.sqrt(sum(float((a.astype(np.float64) ** 2).sum()) for a in arrays))


def by_hand(name: str, theta: Arrays, gradients: list[Arrays], lr: Sequence[float]) -> Arrays:
    """The iterates' end point, from the formulas of the docstrings."""
    average: Arrays | None = None
    for g in gradients:
        if name == "sngdm":
            average = (
                g
                if average is None
                else [0.7 * m + (1 - 0.7) * gi for m, gi in zip(average, g, strict=True)]
            )
            step = [m / length(average) for m in average]
        elif name.startswith("clipped"):
            bound = 1e6 if name.endswith("loose") else 2.0
            step = [min(1.0, bound / length(g)) * gi for gi in g]
        else:
            step = [gi / ((3.0 if name.endswith("smoothed") else 0.0) + length(g)) for gi in g]
        theta = [t - rate * s for t, s, rate in zip(theta, step, lr, strict=True)]
    return theta


def draw(seed: int, steps: int = 6) -> tuple[Arrays, list[Arrays]]:
    rng = np.random.default_rng(seed)
    theta = [np.asarray(rng.standard_normal(shape)) for shape in SHAPES]
    sizes = [0.1, 30.0, 1.0, 0.5, 4.0, 0.01][:steps]
    return theta, [
        [np.asarray(size * rng.standard_normal(shape)) for shape in SHAPES] for size in sizes
    ]


def parameters(theta: Arrays, dtype: torch.dtype = torch.float64) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.tensor(t, dtype=dtype)) for t in theta]


def move(optimizer: Optimizer, params: Sequence[Tensor], gradient: Arrays) -> None:
    for p, g in zip(params, gradient, strict=True):
        p.grad = torch.tensor(g, dtype=p.dtype)
    optimizer.step()


@every
@pytest.mark.parametrize("seed", range(3))
def test_matches_the_formula(name: str, seed: int) -> None:
    theta, gradients = draw(seed)
    params = parameters(theta)
    optimizer = BUILD[name](params)
    for g in gradients:
        move(optimizer, params, g)
    for p, expected in zip(params, by_hand(name, theta, gradients, [0.1] * 4), strict=True):
        np.testing.assert_allclose(p.detach().numpy(), expected, rtol=1e-13, atol=1e-14)


@every
def test_groups_share_the_norm_and_keep_their_lr(name: str) -> None:
    theta, gradients = draw(7)
    params = parameters(theta)
    optimizer = BUILD[name]([{"params": params[:1], "lr": 0.3}, {"params": params[1:]}])
    for g in gradients:
        move(optimizer, params, g)
    for p, expected in zip(
        params, by_hand(name, theta, gradients, [0.3, 0.1, 0.1, 0.1]), strict=True
    ):
        np.testing.assert_allclose(p.detach().numpy(), expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("scale", [1e-150, 1e-8, 1.0, 1e8, 1e150])
def test_normalized_step_has_length_lr_whatever_the_gradient(scale: float) -> None:
    _, (g, *_) = draw(3)
    params = parameters([np.zeros(shape) for shape in SHAPES])
    move(NormalizedGD(params, lr=0.25), params, [scale * gi for gi in g])
    step = [p.detach().numpy() for p in params]
    assert length(step) == pytest.approx(0.25, rel=4e-16)
    for s, gi in zip(step, g, strict=True):
        np.testing.assert_allclose(s, -0.25 * gi / length(g), rtol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-35, 1e-25, 1e25, 1e35])
def test_the_norm_neither_overflows_nor_vanishes_in_narrow_types(
    dtype: torch.dtype, scale: float
) -> None:
    tensors = [torch.full((30,), scale, dtype=dtype), torch.full((2, 35), -scale, dtype=dtype)]
    assert global_norm(tensors).item() == pytest.approx(10 * tensors[0][0].item(), rel=1e-6)
    param = torch.nn.Parameter(torch.zeros(4, dtype=dtype))
    param.grad = torch.full((4,), scale, dtype=dtype)
    NormalizedGD([param], lr=1.0).step()
    torch.testing.assert_close(param.detach(), torch.full((4,), -0.5, dtype=dtype))


def test_half_precision_does_not_limit_the_norm() -> None:
    param = torch.nn.Parameter(torch.zeros(10_000, dtype=torch.float16))
    param.grad = torch.full((10_000,), 1e4, dtype=torch.float16)  # norm 1e6, beyond float16
    assert global_norm([param.grad]).item() == pytest.approx(1e6, rel=1e-12)
    NormalizedGD([param], lr=1.0).step()
    torch.testing.assert_close(param.detach(), torch.full_like(param, -0.01))


@every
def test_zero_gradient_moves_nothing(name: str) -> None:
    theta, _ = draw(1)
    params = parameters(theta)
    optimizer = BUILD[name](params)
    for _ in range(2):
        move(optimizer, params, [np.zeros(shape) for shape in SHAPES])
    for p, t in zip(params, theta, strict=True):
        np.testing.assert_array_equal(p.detach().numpy(), t)


@every
def test_nan_gradient_shows_in_theta(name: str) -> None:
    theta, (g, *_) = draw(1)
    params = parameters(theta)
    g[1][0] = np.nan
    move(BUILD[name](params), params, g)
    assert params[1].isnan().any()


@every
def test_parameters_without_gradient_stay_and_do_not_count(name: str) -> None:
    theta, (g, *_) = draw(2)
    params, alone = parameters(theta), parameters(theta)[:1]
    params[0].grad, alone[0].grad = torch.tensor(g[0]), torch.tensor(g[0])
    BUILD[name](params).step()
    BUILD[name](alone).step()
    torch.testing.assert_close(params[0], alone[0], rtol=0, atol=0)
    np.testing.assert_array_equal(params[1].detach().numpy(), theta[1])
    optimizer = BUILD[name](parameters(theta))
    assert optimizer.step() is None  # no gradient at all


@every
def test_closure_is_called_with_gradients_on(name: str) -> None:
    x = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    optimizer = BUILD[name]([x])

    def closure() -> float:
        optimizer.zero_grad()
        loss = (x**2).sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 5.0
    assert optimizer.step(closure) < 5.0


@every
def test_resume_from_state_dict_is_bit_exact(name: str) -> None:
    theta, gradients = draw(5)
    whole, half = parameters(theta), parameters(theta)
    optimizer = BUILD[name](whole)
    first = BUILD[name](half)
    for g in gradients[:3]:
        move(optimizer, whole, g)
        move(first, half, g)
    resumed_params = [torch.nn.Parameter(p.detach().clone()) for p in half]
    resumed = BUILD[name](resumed_params, lr=99.0)
    resumed.load_state_dict(first.state_dict())
    for g in gradients[3:]:
        move(optimizer, whole, g)
        move(resumed, resumed_params, g)
    for p, q in zip(whole, resumed_params, strict=True):
        assert torch.equal(p, q)


@every
def test_schedulers_set_the_length_of_a_step(name: str) -> None:
    theta, gradients = draw(6)
    params = parameters(theta)
    optimizer = BUILD[name](params)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    before = [p.detach().clone() for p in params]
    move(optimizer, params, gradients[0])
    one = [p.detach() - b for p, b in zip(params, before, strict=True)]
    scheduler.step()
    before = [p.detach().clone() for p in params]
    # the same gradient, so SNGDM's average keeps its direction too
    move(optimizer, params, gradients[0])
    for p, b, o in zip(params, before, one, strict=True):
        torch.testing.assert_close(p.detach() - b, 0.5 * o, rtol=1e-12, atol=1e-14)


@every
def test_lr_may_be_a_tensor(name: str) -> None:
    theta, gradients = draw(8)
    params, others = parameters(theta), parameters(theta)
    move(BUILD[name](params, lr=torch.tensor(0.1, dtype=torch.float64)), params, gradients[0])
    move(BUILD[name](others, lr=0.1), others, gradients[0])
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p, q)


@every
def test_a_step_reads_nothing_back_to_the_host(name: str) -> None:
    """Meta tensors have no data: whatever would wait for a GPU's result (.item(), bool(), ==)
    raises on them.
    """
    params = [torch.nn.Parameter(torch.empty(shape, device="meta")) for shape in SHAPES]
    optimizer = BUILD[name](params)
    for _ in range(2):
        for p in params:
            p.grad = torch.empty_like(p)
        optimizer.step()
    with pytest.raises(RuntimeError, match="meta"):
        bool(params[2] == 0)


@every
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_step_on_a_gpu_does_not_synchronise(name: str) -> None:
    theta, gradients = draw(4)
    params = [torch.nn.Parameter(p.detach().cuda()) for p in parameters(theta)]
    optimizer = BUILD[name](params)
    for g in gradients:
        for p, gi in zip(params, g, strict=True):
            p.grad = torch.tensor(gi, device="cuda")
        try:
            torch.cuda.set_sync_debug_mode("error")
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for p, expected in zip(params, by_hand(name, theta, gradients, [0.1] * 4), strict=True):
        np.testing.assert_allclose(p.detach().cpu().numpy(), expected, rtol=1e-12, atol=1e-13)


@every
def test_sparse_and_complex_gradients_are_refused_before_anything_moves(name: str) -> None:
    good = torch.nn.Parameter(torch.ones(2))
    good.grad = torch.ones(2)
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match=r"sparse gradient .*\(4, 2\).*sparse=False"):
        BUILD[name]([good, embedding.weight]).step()
    wave = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    wave.grad = torch.ones_like(wave)
    with pytest.raises(TypeError, match=r"complex gradient .*complex64.*view_as_real"):
        BUILD[name]([good, wave]).step()
    assert torch.equal(good.detach(), torch.ones(2))


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_bad_options_name_the_value_and_the_fix(bad: float) -> None:
    x = [torch.nn.Parameter(torch.ones(1))]
    for build in BUILD.values():
        with pytest.raises(ValueError, match=rf"lr={bad}.*Try"):
            build(x, lr=bad)
    with pytest.raises(ValueError, match=rf"smoothing={bad}.*Try"):
        NormalizedGD(x, lr=0.1, smoothing=bad)
    with pytest.raises(ValueError, match=rf"momentum={bad}.*Try"):
        SNGDM(x, lr=0.1, momentum=bad)
    for norm in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=rf"max_norm={norm}.*Try"):
            ClippedGD(x, lr=0.1, max_norm=norm)
    with pytest.raises(ValueError, match=r"momentum=1\.0.*Try"):
        SNGDM([{"params": x, "momentum": 1.0}], lr=0.1)


def test_without_a_bound_clipped_is_plain_gradient_descent() -> None:
    theta, gradients = draw(9)
    params, others = parameters(theta), parameters(theta)
    ours, torchs = ClippedGD(params, 0.1, max_norm=math.inf), SGD(others, 0.1)
    for g in gradients:
        move(ours, params, g)
        move(torchs, others, g)
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-15, atol=1e-15)


# F(x) = x⁴ is not smooth, but |F''| = 12x² ≤ L0 + L1·|F'| with L1 = 4 and L0 = 1 (12x² − 16|x|³
# peaks at 1, x = 1/2). On steps no longer than 1/L1 the descent lemma then holds with A·L0 +
# B·L1·|F'|, A = 2 and B = e − 1 (Zhang, Jin, Fang and Wang, "Improved Analysis of Clipping
# Algorithms for Non-convex Optimization", NeurIPS 2020, with c = 1).
L0, L1 = 2 * 1.0, (math.e - 1) * 4.0


def descend(optimizer: Optimizer, x: Tensor, steps: int) -> list[tuple[float, float]]:
    """(F, |F'|) along the way."""
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (x**4).sum()
        loss.backward()
        assert x.grad is not None
        seen.append((loss.item(), x.grad.abs().item()))
        optimizer.step()
    return seen


def start(at: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor([at], dtype=torch.float64))


def test_clipping_converges_where_gradient_descent_diverges() -> None:
    x, y = start(50.0), start(50.0)
    path = descend(ClippedGD([x], lr=0.05, max_norm=10.0), x, 400)
    assert path[-1][1] < 0.05
    assert all(after < before for (before, _), (after, _) in pairwise(path))
    assert not math.isfinite(descend(SGD([y], lr=0.05), y, 20)[-1][0])


@pytest.mark.parametrize("far", [0.3, 3.0, 30.0])
def test_the_step_of_the_proof_descends_as_the_proof_says(far: float) -> None:
    x, epsilon = start(far), 1e-3
    path = descend(NormalizedGD([x], lr=1 / L1, smoothing=L0 / L1), x, 3000)
    for (before, slope), (after, _) in pairwise(path):
        assert before - after >= slope**2 / (2 * (L0 + L1 * slope)) * (1 - 1e-12)
    needed = next(k for k, (_, slope) in enumerate(path) if slope <= epsilon)
    assert needed <= 4 * L0 * path[0][0] / epsilon**2 + 4 * L1**2 * path[0][0] / L0


def test_momentum_finds_the_minimum_through_noise_that_defeats_plain_normalisation() -> None:
    """Rare large gradients against many small ones: E[g] = x, yet E[g/|g|] points the wrong way."""

    def end(momentum: float) -> float:
        torch.manual_seed(0)
        x = start(0.0)
        optimizer = SNGDM([x], lr=0.02, momentum=momentum)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4000)
        tail = []
        for k in range(4000):
            noise = 9.0 if torch.rand(()) < 0.1 else -1.0
            x.grad = x.detach() + noise
            optimizer.step()
            scheduler.step()
            if k >= 3000:
                tail.append(x.item())
        return float(np.mean(tail))

    assert abs(end(0.99)) < 0.3
    assert abs(end(0.0)) > 0.7
