from __future__ import annotations

import math

import pytest
import torch

from metanudge.task import Task
from metanudge.tasks import Quadratic


def random_task(seed: int, dim: int = 4) -> Task:
    """A task whose query objective differs from the support objective, unlike the paper's."""
    a, b = Quadratic(dim, condition=20, seed=seed).batch([0, 1])
    return Task(a.support, b.query)


def test_matrices_are_symmetric_with_the_stated_condition_number():
    source = Quadratic(dim=12, condition=50, seed=1)
    A, b = source.batch(range(30)).stacks[0].support
    assert A.shape == (30, 1, 12, 12)
    assert b.shape == (30, 1, 12)
    assert A.dtype == b.dtype == torch.float64
    assert torch.equal(A, A.mT)
    eigenvalues = torch.linalg.eigvalsh(A)
    torch.testing.assert_close(eigenvalues[..., -1], torch.ones(30, 1, dtype=torch.float64))
    torch.testing.assert_close(
        eigenvalues[..., 0], torch.full((30, 1), 1 / 50, dtype=torch.float64)
    )


def test_directions_are_isotropic_and_spread_is_the_spread():
    source = Quadratic(dim=3, condition=100, seed=0, spread=2.0)
    A, b = source.batch(range(4000)).stacks[0].support
    mean = A.mean(dim=(0, 1))
    assert (mean - mean.diagonal().mean() * torch.eye(3)).abs().max() < 0.03
    assert abs(b.std() - 2.0) < 5 * 2.0 / math.sqrt(2 * b.numel())


def test_support_and_query_are_the_same_objective_in_tensors_of_their_own():
    task = Quadratic(dim=3).task(5)
    for support, query in zip(task.support, task.query, strict=True):
        assert torch.equal(support, query)
        assert support.data_ptr() != query.data_ptr()


def test_loss_is_the_objective_and_needs_only_the_call_of_the_model():
    source = Quadratic(dim=4, seed=2)
    task, theta = (
        source.task(0),
        torch.randn(4, generator=torch.Generator().manual_seed(0)).double(),
    )
    (A,), (b,) = task.support
    expected = 0.5 * theta @ A @ theta + theta @ b
    model = source.model(theta)
    torch.testing.assert_close(source.loss(model, task.support), expected)
    torch.testing.assert_close(
        torch.autograd.grad(source.loss(model, task.support), model.theta)[0], A @ theta + b
    )
    functional = torch.func.functional_call(source.model(), {"theta": theta}, task.support)
    torch.testing.assert_close(functional.mean(), expected)
    assert dict(source.model().named_parameters()).keys() == {"theta"}


@pytest.mark.parametrize(
    "lam", [0.3, torch.tensor([0.1, 0.5, 2.0, 9.0])], ids=["scalar", "one per parameter"]
)
@pytest.mark.parametrize("nu", [0.0, 0.4, -0.2])
def test_solution_is_stationary(lam, nu):
    task, theta = random_task(0), torch.arange(4.0)
    phi = Quadratic.solution(task, theta, lam, nu).requires_grad_()
    model = Quadratic(4).model()
    objective = [
        torch.func.functional_call(model, {"theta": phi}, batch).mean()
        for batch in (task.support, task.query)
    ]
    total = (
        objective[0]
        + nu * objective[1]
        + 0.5 * (torch.as_tensor(lam, dtype=torch.float64) * (phi - theta) ** 2).sum()
    )
    assert torch.autograd.grad(total, phi)[0].abs().max() < 1e-12


@pytest.mark.parametrize(
    "lam", [0.3, torch.tensor([0.1, 0.5, 2.0, 9.0])], ids=["scalar", "one per parameter"]
)
def test_meta_gradient_is_the_derivative_of_the_outer_loss(lam):
    task, theta, h = random_task(1), torch.arange(4.0).double(), 1e-5

    def outer(at: torch.Tensor) -> float:
        (A,), (b,) = task.query
        phi = Quadratic.solution(task, at, lam)
        return float(0.5 * phi @ A @ phi + phi @ b)

    steps = h * torch.eye(4, dtype=torch.float64)
    numeric = torch.tensor(
        [(outer(theta + e) - outer(theta - e)) / (2 * h) for e in steps], dtype=torch.float64
    )
    torch.testing.assert_close(
        Quadratic.meta_gradient(task, theta, lam), numeric, rtol=1e-7, atol=1e-8
    )


def test_closed_forms_are_those_of_the_paper():
    task, theta, lam, nu = Quadratic(dim=5).task(0), torch.ones(5).double(), 2.0, 0.1
    (A,), (b,) = task.support
    eye = torch.eye(5, dtype=torch.float64)
    paper = torch.linalg.inv((1 + nu) * A + lam * eye) @ (lam * theta - (1 + nu) * b)
    torch.testing.assert_close(Quadratic.solution(task, theta, lam, nu), paper)
    inverse = torch.linalg.inv(A + lam * eye)
    gradient = lam * inverse @ (A @ inverse @ (lam * theta - b) + b)
    torch.testing.assert_close(Quadratic.meta_gradient(task, theta, lam), gradient)


def test_float32_tasks_keep_closed_forms_in_float64():
    task = Quadratic(dim=3, condition=2, dtype=torch.float32).task(0)
    assert task.support[0].dtype == torch.float32
    assert Quadratic.solution(task, torch.zeros(3), 1.0).dtype == torch.float64


def test_the_smallest_quadratic_is_one_number():
    task = Quadratic(dim=1, condition=1).task(0)
    assert task.support[0].item() == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 0}, "dim=0 is not a positive integer"),
        ({"condition": 0.5}, "condition=0.5 is not a condition number"),
        ({"condition": math.nan}, "condition=nan"),
        ({"dim": 1, "condition": 2}, "exactly 1 when dim=1"),
        ({"spread": -1}, "spread=-1 is not a standard deviation"),
    ],
)
def test_impossible_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Quadratic(**options)


def test_properties():
    source = Quadratic(dim=7)
    assert (source.kind, source.num_outputs, source.input_shape, source.classes("train")) == (
        "regression",
        1,
        (7, 7),
        (),
    )
    assert repr(source) == "Quadratic(shots=1, queries=1, seed=0, input_shape=(7, 7), device='cpu')"
