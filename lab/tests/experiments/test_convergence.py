"""Meta-objectives in closed form, the optimizers that run on them, and how smooth they are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import metanudge as mn
from metanudge_lab.experiments.meta_objectives import MetaObjective, Regression, Rippled
from metanudge_lab.experiments.meta_optimizers import (
    FINER,
    OPTIMIZERS,
    fastest,
    first_below,
    lowest_end,
    mean_of_last,
    run,
)
from metanudge_lab.experiments.smoothness import envelope, smoothness

CPU = torch.device("cpu")
OBJECTIVES = ("exponential", "quartic", "linear", "rippled")


def objective(name: str) -> MetaObjective:
    options: dict[str, Any] = {"dim": 3, "tasks": 4, "lam": 1.5, "device": CPU}
    return (
        Rippled(0, radius=8.0, **options)
        if name == "rippled"
        else Regression(name, 0, radius=1.5, **options)
    )


# ---------------------------------------------------------------------------------- meta-objectives


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradient_and_hessian_are_those_of_the_value(name: str) -> None:
    f = objective(name)
    eye = torch.eye(3, dtype=torch.float64)
    step = 1e-5
    for i in range(f.tasks):
        slopes = torch.stack(
            [
                (f.values(f.start + step * e)[i] - f.values(f.start - step * e)[i]) / (2 * step)
                for e in eye
            ]
        )
        bends = torch.stack(
            [
                (f.gradients(f.start + step * e)[i] - f.gradients(f.start - step * e)[i])
                / (2 * step)
                for e in eye
            ]
        )
        torch.testing.assert_close(f.gradients(f.start)[i], slopes, rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(f.hessians(f.start)[i], bends, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_minimiser_is_one(name: str) -> None:
    f = objective(name)
    theta = f.minimiser()
    assert float(f.gradient(theta).norm()) < 1e-10
    assert float(torch.linalg.eigvalsh(f.all(theta).hessian)[0]) > 0


@pytest.mark.parametrize("growth", ["exponential", "quartic", "linear"])
def test_the_learner_has_the_same_meta_gradient(growth: str) -> None:
    f = objective(growth)
    assert isinstance(f, Regression)
    setup = f.setup(f.start)
    learner = mn.MetaLearner(
        setup.model, setup.loss, lam=1.5, solver=mn.NewtonCG(tol=1e-12), estimator=mn.Exact()
    )
    (found,) = learner.meta_gradient(setup.tasks, metrics=False)[0].values()
    torch.testing.assert_close(found[0], f.gradient(f.start), rtol=1e-9, atol=1e-12)


def test_the_rippled_inner_solution_is_one() -> None:
    f = objective("rippled")
    assert isinstance(f, Rippled)
    phi = f.solution(f.start)
    slope = f.lam * (phi - f.start) - f.size * f.frequency * torch.sin(f.frequency * phi)
    assert float(slope.norm()) < 1e-12
    smooth, inner, bend = f.constants
    assert f.lam == pytest.approx(2 * inner)
    assert (smooth, bend) == (1.0, pytest.approx(inner * f.frequency))


# ------------------------------------------------------------------------ optimizers and smoothness


class Parabola(MetaObjective):
    """½‖θ‖² for every task: everything about it is known."""

    tasks = 2
    start = torch.tensor([3.0, 4.0], dtype=torch.float64)

    def gradients(self, theta: Tensor) -> Tensor:
        return theta.expand(2, 2).clone()

    def hessians(self, theta: Tensor) -> Tensor:
        return torch.eye(2, dtype=torch.float64).expand(2, 2, 2)

    def values(self, theta: Tensor) -> Tensor:
        return (theta @ theta / 2).expand(2)


def test_runs_record_the_gradients_norm() -> None:
    assert run(
        Parabola(), OPTIMIZERS["GD"], 0.5, steps=2, horizon=None, seed=None
    ) == pytest.approx([5.0, 2.5, 1.25])
    assert run(Parabola(), OPTIMIZERS["GD"], 0.5, steps=2, horizon=2, seed=None) == pytest.approx(
        [5.0, 2.5, 2.5 * 0.75]
    )
    assert run(Parabola(), OPTIMIZERS["GD"], 0.5, steps=4, horizon=1, seed=None) == pytest.approx(
        [5.0, 2.5, 2.5, 2.5, 2.5]
    )
    assert run(
        Parabola(), OPTIMIZERS["ClippedGD"], 0.5, steps=1, horizon=None, seed=0
    ) == pytest.approx([5.0, 4.5])
    away = run(Parabola(), OPTIMIZERS["GD"], 1e9, steps=50, horizon=None, seed=None)
    assert len(away) < 50, "a run that overflows ends early"
    assert math.isnan(mean_of_last(away, 50))
    assert first_below([5.0, 2.5, 1.25], 2.5) == 1
    assert fastest(Parabola(), OPTIMIZERS["GD"], rates=(0.5, 0.9), steps=5, epsilon=0.1) == 2, (
        "5 → 0.5 → 0.05 at a rate of 0.9"
    )
    assert fastest(Parabola(), OPTIMIZERS["GD"], rates=(0.1,), steps=5, epsilon=0.1) is None
    near = [0.3 * factor for factor in (1, *FINER)]
    best = min(5 * abs(1 - rate) * abs(1 - rate / 2) for rate in near)
    assert best < 5 * 0.7 * 0.85
    assert lowest_end(
        Parabola(), OPTIMIZERS["GD"], rates=(0.1, 0.3), steps=2, seed=0
    ) == pytest.approx(best), "around 0.3 as well"
    assert lowest_end(Parabola(), OPTIMIZERS["GD"], rates=(1e9,), steps=50, seed=0) == math.inf


def test_the_proofs_step_on_a_parabola() -> None:
    """L₀ = 1 and L₁ = 0: one step of gradient descent lowers F by exactly what is promised, and
    reaches the minimum.
    """
    rows = smoothness(Parabola(), steps=5, epsilon=0.1)
    (proof,) = [row for row in rows if row["kind"] == "proof"]
    assert (proof["flat"], proof["steep"]) == (pytest.approx(1.0), 0.0)
    assert (proof["steps"], proof["broken"]) == (1, 0)
    assert proof["bound"] == pytest.approx(4 * 12.5 / 0.1**2)
    assert [row["ratio"] for row in rows if row["kind"] == "pairs"] == pytest.approx([1.0] * 6)


def test_the_envelope_lies_above() -> None:
    generator = torch.Generator().manual_seed(0)
    norms = torch.rand(30, generator=generator, dtype=torch.float64).tolist()
    points = [
        (g, (1 + 2 * g) * (0.5 + 0.5 * u)) for g, u in zip(norms, reversed(norms), strict=True)
    ]
    flat, steep = envelope(points)
    assert all(flat + steep * g >= h * (1 - 1e-9) for g, h in points)
    assert sum(abs(flat + steep * g - h) < 1e-9 for g, h in points) >= 1


def test_quartic_growth_breaks_the_global_form_and_not_the_local_one() -> None:
    rows = smoothness(objective("quartic"), steps=60, epsilon=0.01)
    ratios = [row["ratio"] for row in rows if row["kind"] == "pairs"]
    assert ratios == sorted(ratios)
    (proof,) = [row for row in rows if row["kind"] == "proof"]
    assert proof["broken"] == 0
    path = [row for row in rows if row["kind"] == "path"]
    assert all(
        row["curvature"] <= (proof["flat"] + proof["steep"] * row["norm"]) * (1 + 1e-9)
        for row in path
    )


def test_proposition_3_holds_with_the_constants_of_its_proof_only() -> None:
    (row,) = [
        row
        for row in smoothness(objective("rippled"), steps=60, epsilon=0.01)
        if row["kind"] == "constants"
    ]
    assert row["proved"] <= 1 < row["stated"]
