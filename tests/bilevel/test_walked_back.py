"""The hypergradient of K steps, walked back one at a time, against unrolling them at once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import metanudge as mn
from bilevel_problems import Known, logistic, ridge
from problems import relative_error

PROBLEMS = {
    "ridge, one penalty": ridge(per_feature=False),
    "ridge, outer depends on x": ridge(direct=True),
    "logistic": logistic(),
    "logistic, outer depends on x": logistic(direct=True),
}
PRODUCTS = {
    "autograd": (mn.MAML(products="autograd"), 1e-10),
    "difference": (mn.MAML(products="difference", epsilon=1e-5), 1e-6),
}
SOLVERS: dict[str, Any] = {
    "GD": mn.GradientDescent(lr=0.2, steps=5),
    "Nesterov": mn.Nesterov(lr=0.2, steps=5, momentum=0.5),
}
OPTIMIZERS: dict[str, Any] = {
    "momentum": mn.TorchOptimizer(torch.optim.SGD, steps=5, options={"lr": 0.1, "momentum": 0.9}),
    "Adam": mn.TorchOptimizer(torch.optim.Adam, steps=5, options={"lr": 0.1}),
    "AdamW": mn.TorchOptimizer(torch.optim.AdamW, steps=5, options={"lr": 0.1, "weight_decay": 1}),
}


def solve(problem: Known, estimator: mn.MAML, solver: Any) -> mn.Hypergradient:
    return mn.hypergradient(
        problem.inner, problem.outer, problem.x, problem.init, solver=solver, estimator=estimator
    )


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize(("estimator", "tolerance"), PRODUCTS.values(), ids=PRODUCTS)
def test_it_is_the_unrolled_hypergradient(
    name: str, solver: str, estimator: mn.MAML, tolerance: float
):
    problem = PROBLEMS[name]
    found = solve(problem, estimator, SOLVERS[solver])
    expected = solve(problem, mn.MAML(products="unrolled"), SOLVERS[solver])
    assert relative_error(found.gradient, expected.gradient) < tolerance
    torch.testing.assert_close(found.phi, expected.phi, rtol=0, atol=1e-14)
    assert relative_error(expected.gradient, problem.truth) > 1e-2, "far from converged"


@pytest.mark.parametrize("keep", ["device", "recompute"])
def test_what_it_costs(keep: Any):
    """Besides the gradients that the result reports at the solution: one inner, one outer."""
    problem, solver = PROBLEMS["logistic"], SOLVERS["GD"]
    again = 3 if keep == "recompute" else 0
    found = solve(problem, mn.MAML(products="difference", epsilon=1e-5, trajectory=keep), solver)
    assert (found.inner_gradients, found.outer_gradients) == (3 * 5 + 1 + again, 1)
    assert found.hessian_products == 0
    found = solve(problem, mn.MAML(products="autograd", trajectory=keep), solver)
    assert (found.inner_gradients, found.outer_gradients) == (2 * 5 + 1 + again, 1)
    assert found.hessian_products == 5


@pytest.mark.parametrize(
    ("estimator", "tolerance"), [*PRODUCTS.values(), (mn.MAML(), 1e-10)], ids=[*PRODUCTS, "auto"]
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_inside(optimizer: str, estimator: mn.MAML, tolerance: float):
    """Against the steps written out, and autograd through them."""
    problem = PROBLEMS["logistic, outer depends on x"]
    x = problem.x.detach().clone().requires_grad_()
    phi, m, v = problem.init, torch.zeros_like(problem.init), torch.zeros_like(problem.init)
    for step in range(1, 6):
        at = phi if phi.requires_grad else phi.detach().requires_grad_()
        (g,) = torch.autograd.grad(problem.inner(x, at), at, create_graph=True)
        if optimizer == "momentum":
            m = 0.9 * m + g
            phi = phi - 0.1 * m
        else:
            if optimizer == "AdamW":  # towards the start: its parameters are displacements
                phi = phi - 0.1 * (phi - problem.init)
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            phi = phi - 0.1 * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
    expected: Tensor = torch.autograd.grad(problem.outer(x, phi), x)[0]
    found = solve(problem, estimator, OPTIMIZERS[optimizer])
    assert relative_error(found.gradient, expected) < tolerance


@pytest.mark.parametrize("solver", SOLVERS)
def test_leaves_that_share_a_gradient(solver: str):
    """Two that enter as a sum: autograd hands out one tensor for both."""
    x = torch.tensor([0.3, -0.2], dtype=torch.float64)
    init = {"a": 2 * x, "b": x - 1}

    def inner(x: Tensor, phi: dict[str, Tensor]) -> Tensor:
        return (x.exp() * (phi["a"] + phi["b"]).cosh()).sum()

    def outer(x: Tensor, phi: dict[str, Tensor]) -> Tensor:
        return (phi["a"] * phi["b"].sin()).sum()

    whole, back = (
        mn.hypergradient(
            inner, outer, x, init, solver=SOLVERS[solver], estimator=mn.MAML(products=products)
        )
        for products in ("unrolled", "autograd")
    )
    assert relative_error(back.gradient, whole.gradient) < 1e-12


# ---------------------------------------------------------- functions that have one derivative only


class Once(torch.autograd.Function):
    """cosh."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        ctx.save_for_backward(t)
        return t.cosh()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * ctx.saved_tensors[0].sinh()


def by_cosh(cosh: Callable[[Tensor], Tensor], *, inside: bool) -> Callable[..., Tensor]:
    """Its second derivative counts; `inside` also where a second backward pass would meet it."""

    def inner(x: Tensor, phi: Tensor) -> Tensor:
        value = cosh(phi)
        return (value.square() if inside else value).sum() + (x * phi).sum()

    return inner


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "last"])
@pytest.mark.parametrize("solver", [*SOLVERS.values(), *OPTIMIZERS.values()])
def test_a_function_with_one_derivative(
    solver: Any, inside: bool, caplog: pytest.LogCaptureFixture
):
    x = torch.tensor([0.3, -0.2], dtype=torch.float64)
    init = torch.tensor([0.5, 0.1], dtype=torch.float64)
    once, plain = by_cosh(Once.apply, inside=inside), by_cosh(torch.cosh, inside=inside)

    def solved(inner: Any, estimator: Any) -> Tensor:
        found = mn.hypergradient(
            inner, lambda x, phi: phi.sin().sum(), x, init, solver=solver, estimator=estimator
        )
        return found.gradient

    with caplog.at_level(logging.WARNING, logger="metanudge"):
        found = solved(once, mn.MAML())
    assert "Once is marked with @once_differentiable" in caplog.text
    assert relative_error(found, solved(plain, mn.MAML())) < 1e-6
    assert relative_error(solved(once, PRODUCTS["difference"][0]), found) < 1e-6
    exact: list[Any] = [mn.MAML(products="autograd"), mn.IMAML(), mn.Exact()]
    if solver in SOLVERS.values():
        exact += [mn.MAML(products="unrolled"), mn.FOBMAML(stencil="tangent")]
    for estimator in exact:
        with pytest.raises(RuntimeError, match="once_differentiable"):
            solved(once, estimator)


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("solver", [mn.GradientDescent, mn.Nesterov])
def test_weighted_losses_of_the_steps(name: str, solver: Any):
    """Their hypergradient is the weighted sum of those of as many steps."""
    problem, weights = PROBLEMS[name], (0.5, 0.0, -0.3, 1.0)
    more = {} if solver is mn.GradientDescent else {"momentum": 0.5}
    found = solve(problem, mn.MAML(step_weights=weights), solver(0.2, 4, **more))
    each = [
        solve(problem, mn.MAML(products="unrolled"), solver(0.2, k, **more)).gradient
        for k in range(1, 5)
    ]
    expected = sum(w * gradient for w, gradient in zip(weights, each, strict=True))
    assert relative_error(found.gradient, expected) < 1e-10


def test_adam_walks_back_where_a_parameter_is_a_single_number():
    def of(init: Tensor) -> Tensor:
        x = torch.tensor(0.3, dtype=torch.float64)
        found = mn.hypergradient(
            lambda x, phi: (phi - 1).square().sum() + x.exp() * phi.square().sum(),
            lambda x, phi: (phi - 0.2).square().sum(),
            x,
            init,
            solver=OPTIMIZERS["Adam"],
            estimator=mn.MAML(products="autograd"),
        )
        return found.gradient

    vector = of(torch.zeros(1, dtype=torch.float64))
    torch.testing.assert_close(of(torch.zeros((), dtype=torch.float64)), vector, rtol=1e-14, atol=0)
