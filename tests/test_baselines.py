"""Baselines against closed forms and hand-written code in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import metanudge as mn
from metanudge.baselines import (
    _TOLERANCE,
    PENALTIES,
    Baselines,
    Comparison,
    centroids,
    logistic,
    measure,
    ridge,
)
from metanudge.tasks import MNIST1D, Sinusoid

pytestmark = pytest.mark.numerical
# rounding of sums over a few dozen numbers, times the conditioning (at most 1/penalty) of a system
CLOSE = {"rtol": 0.0, "atol": 1e-15 * 100 / 1e-3}


def problem(n: int, features: int, outputs: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n * features)
    x, q = (torch.randn(3, m, features, dtype=torch.float64, generator=generator) for m in (n, 5))
    return 3 * x + 1, torch.randn(3, n, outputs, dtype=torch.float64, generator=generator), q


def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs centred and of mean squared length 1, and by how much they were divided."""
    z = x - x.mean(-2, keepdim=True)
    length = z.square().sum(-1).mean(-1).sqrt()[..., None, None]
    return z / length, length


@pytest.mark.parametrize(("n", "features"), [(12, 4), (5, 9), (4, 4)])
def test_ridge_solves_the_normal_equations(n: int, features: int) -> None:
    x, y, q = problem(n, features)
    z, length = scaled(x)
    A = z.mT @ z / n + 1e-3 * torch.eye(features, dtype=torch.float64)
    w = torch.linalg.solve(A, z.mT @ (y - y.mean(-2, keepdim=True)) / n)
    expected = (q - x.mean(-2, keepdim=True)) / length @ w + y.mean(-2, keepdim=True)
    torch.testing.assert_close(ridge(x, y, 1e-3)(q), expected, **CLOSE)


def test_ridge_without_spread_predicts_the_mean() -> None:
    x, y = torch.ones(4, 3).double(), torch.arange(4.0).double()[:, None]
    assert torch.equal(ridge(x, y, 0.0)(x), torch.full((4, 1), 1.5).double())


@pytest.mark.parametrize(("n", "features"), [(12, 4), (6, 9)])
@pytest.mark.parametrize("penalty", PENALTIES["classification"])
def test_the_gradient_of_logistic_regression_vanishes(
    n: int, features: int, penalty: float
) -> None:
    x, _, _ = problem(n, features)
    labels = torch.arange(n).remainder(3).expand(3, n)
    fit = logistic(x, labels, 3, penalty)
    z, length = scaled(x)
    w = (fit.weight * length).requires_grad_()  # of z, where x = z·length + mean
    b = fit.offset.clone().requires_grad_()
    outputs = z @ w + b
    torch.testing.assert_close(fit(x), outputs.detach(), **CLOSE)
    loss = F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="sum") / n
    loss = loss + 0.5 * penalty * (w.square().sum() + b.square().sum())
    for gradient in torch.autograd.grad(loss, [w, b]):
        # each entry was below the tolerance along the axes on which it was tested
        assert float(gradient.abs().max()) <= _TOLERANCE * math.sqrt(features)


def test_centroids_are_the_nearest_means() -> None:
    x, _, q = problem(9, 4)
    labels = torch.tensor([0, 1, 3] * 3).expand(3, 9)  # no example of class 2
    found = centroids(x, labels, 4)(q).argmax(-1)
    for task in range(3):
        means = {c: x[task][labels[task] == c].mean(0) for c in (0, 1, 3)}
        for row in range(5):
            nearest = min(means, key=lambda c: float((means[c] - q[task, row]).norm()))
            assert int(found[task, row]) == nearest


def test_scores_follow_the_tasks_whatever_their_sizes() -> None:
    source = Sinusoid(shots=4, noise=0.1, dtype=torch.float64)
    large = Sinusoid(shots=9, noise=0.1, dtype=torch.float64)
    tasks = [large.task(i) if i % 3 else source.task(i) for i in range(8)]
    fitted = Baselines.fit("regression", source.batch(range(8), "val"), train=source.pooled(20))
    together = fitted.scores(mn.TaskBatch.of(tasks))
    assert set(together) == {"ridge regression", "mean predictor", "pooled ridge"}
    for place, task in enumerate(tasks):
        alone = fitted.scores(mn.TaskBatch.of(task))
        for name, scores in together.items():
            torch.testing.assert_close(scores[place], alone[name][0], rtol=1e-12, atol=0.0)
        mean = F.mse_loss(task.support[1].mean().expand_as(task.query[1]), task.query[1])
        torch.testing.assert_close(together["mean predictor"][place], mean, rtol=1e-13, atol=0.0)


def test_pooled_ridge_is_ridge_on_all_rows() -> None:
    source = Sinusoid(shots=4, dtype=torch.float64)
    train, test = source.pooled(20), source.batch(range(5), "test")
    assert train is not None
    fitted = Baselines.fit("regression", source.batch(range(8), "val"), train=train)
    rows = [batch for task in train for batch in (task.support, task.query)]
    x, y = (torch.cat([batch[part] for batch in rows]) for part in (0, 1))
    fit = ridge(x, y, fitted.penalties["pooled ridge"])
    expected = torch.stack([F.mse_loss(fit(t.query[0]), t.query[1]) for t in test])
    torch.testing.assert_close(fitted.scores(test)["pooled ridge"], expected, rtol=1e-11, atol=0.0)


def test_chance_is_one_over_ways() -> None:
    source = MNIST1D(num_samples=1000, queries=5, cache=False)
    found = measure(source, 7)
    assert set(found) == {"logistic regression", "nearest centroid", "chance"}
    assert found["chance"].tolist() == [1 / 3] * 7
    assert source.pooled(3) is None


def test_a_baseline_wins_beyond_the_interval_or_is_not_mentioned() -> None:
    own = torch.tensor([0.5, 0.6, 0.7, 0.6])
    better, unclear = (
        own + torch.tensor([0.1, 0.1, 0.2, 0.1]),
        own + torch.tensor([0.3, -0.2, 0, 0]),
    )
    beside = Comparison("classification", own, {"a": unclear, "b": better})
    assert str(beside.verdict()).startswith("b is better here: 72.50% against 60.00%, by 12.50% ±")
    assert Comparison("classification", own, {"a": unclear, "c": own}).verdict() is None
    # losses: less is better
    assert Comparison("regression", own, {"b": better}).verdict() is None
    assert str(Comparison("regression", better, {"b": own}).verdict()).startswith("b is better")
    difference = beside.as_dict()["b"]
    assert difference["learner_better_by"] == pytest.approx(-0.125)
    assert difference["learner_better_by_ci95"] == pytest.approx(1.96 * 0.05 / 2)
    diverged = Comparison("regression", torch.tensor([1.0, torch.inf]), {"b": own[:2]})
    assert str(diverged.verdict()).startswith("The learner diverged on 1 of 2 tasks")


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_wide_tasks_go_a_few_at_a_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = MNIST1D(num_samples=2000, cache=False) if kind == "classification" else Sinusoid()
    whole = measure(source, 20)
    monkeypatch.setattr("metanudge.baselines._NUMBERS", 1)
    parts = measure(source, 20)
    assert whole.keys() == parts.keys()
    for name, scores in whole.items():
        torch.testing.assert_close(parts[name], scores, **CLOSE)
