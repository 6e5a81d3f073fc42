"""The closed forms behind the constants, the rates in ε and the stochastic inner solves."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from metanudge_lab.experiments import bias_constants, inner_noise, outer_rates
from metanudge_lab.experiments.bias_constants import FORWARD, SYMMETRIC, Logistic, Nudged

CONFIG = bias_constants.Config()


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_derivatives_and_their_bounds() -> None:
    loss, phi = Logistic(normal(6, 3), size=1.7), 0.3 * normal(3)

    def value(at: Tensor) -> Tensor:
        return 1.7 * torch.nn.functional.softplus(-loss.a @ at).mean()

    torch.testing.assert_close(torch.func.grad(value)(phi), loss.gradient(phi))
    torch.testing.assert_close(torch.autograd.functional.hessian(value, phi), loss.hessian(phi))
    u = normal(3) / normal(3).norm()
    third = u @ (loss.hessian(phi + 1e-5 * u) - loss.hessian(phi - 1e-5 * u)) @ u / 2e-5
    l0, l1, l2, _ = loss.bounds
    assert float(loss.gradient(phi).norm()) < l0
    assert float(torch.linalg.matrix_norm(loss.hessian(phi), 2)) <= l1
    assert abs(float(third)) <= l2


def test_the_exact_meta_gradient_is_that_of_the_solution_path() -> None:
    problem = Nudged(0, CONFIG, 2.0)
    h = 1e-5
    slope = (problem.solution(h) - problem.solution(-h)) / (2 * h)
    # h² of the third derivative, and rounding over h
    torch.testing.assert_close(problem.exact(), -problem.lam * slope, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize(("stencil", "power"), [(FORWARD, 2), (SYMMETRIC, 3)])
def test_nudging_with_a_multiple_of_the_loss_is_nudging_more(stencil: str, power: int) -> None:
    """z(ν) of s·f is z(sν) of f: so the bias goes as s^2, or s^3, and no constant of first order
    in s bounds it.
    """
    small, large = (Nudged(0, CONFIG, 2.0, size) for size in (1.0, 4.0))
    torch.testing.assert_close(large.solution(0.01), small.solution(0.04), rtol=1e-12, atol=1e-13)
    ratio = large.bias(stencil, 1e-3) / small.bias(stencil, 1e-3)
    assert ratio == pytest.approx(4.0**power, rel=0.02)


def test_the_hard_instance_is_an_outer_loss_after_adaptation() -> None:
    """Inner losses ∓c·y: φ* = θ ± c/λ, and the two tasks' gradients differ from ∇F by ±ℒc/λ."""
    config, epsilon, lam, c = outer_rates.Config(), 0.1, 2.0, 2.0
    theta = torch.tensor([3.0, 0.4], dtype=torch.float64)

    def outer(phi: Tensor) -> Tensor:
        width = 2 * epsilon / config.curvature
        slope = 2 * epsilon * torch.sqrt(phi[0] ** 2 + width**2)
        return slope + config.curvature * phi[1] ** 2 / 2

    shift = torch.tensor([0.0, c / lam], dtype=torch.float64)
    tasks = [torch.func.grad(lambda t, s=sign: outer(t + s * shift))(theta) for sign in (1, -1)]
    found = outer_rates.meta_gradient(theta[None, None], epsilon, config, outer_rates.HARD)[0, 0]
    torch.testing.assert_close(sum(tasks) / 2, found)
    pull = config.noise * torch.tensor([0.0, 1.0], dtype=torch.float64)
    torch.testing.assert_close(tasks[0] - found, pull * c / lam)


def test_steps_without_noise_are_those_of_gradient_descent() -> None:
    config = replace(outer_rates.Config(), rates=1)
    generator = torch.Generator().manual_seed(0)
    options = {"clipped": False, "noise": 0.0, "generator": generator}
    assert outer_rates.fewest(0.1, config, instance=outer_rates.EASY, **options) == (1, 1.0)
    steps, _ = outer_rates.fewest(0.1, config, instance=outer_rates.HARD, **options)
    assert steps == pytest.approx(1 / (2 * 0.1) ** 2, rel=0.15), "Δ/(2ε) at 2ε a step"


def test_noise_keeps_solves_off_by_the_root_of_the_steps() -> None:
    config = replace(inner_noise.Config(), at=(100, 1600), chains=400, nus=(0.1,))
    problem = Nudged(0, config, config.multiple, config.size)
    found = inner_noise.solves(problem, [0.0], config, shared=False, seed=0)
    deltas = [float((phi[0] - problem.solution(0.0)).norm(dim=1).mean()) for phi in found.values()]
    # 400 chains leave a few percent; the first steps a few more
    assert math.log(deltas[0] / deltas[1]) / math.log(16) == pytest.approx(0.5, abs=0.08)


def test_solves_that_share_noise_differ_by_little_of_it() -> None:
    config = replace(inner_noise.Config(), at=(50,), chains=8, nus=(0.01,))
    problem = Nudged(0, config, config.multiple, config.size)
    apart = {}
    for shared in (False, True):
        (phi,) = inner_noise.solves(problem, [0.0, 0.01], config, shared=shared, seed=0).values()
        moved = phi[1] - phi[0] - (problem.solution(0.01) - problem.solution(0.0))
        apart[shared] = float(moved.norm())
    assert apart[True] < 0.1 * apart[False]
