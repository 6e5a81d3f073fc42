"""The hypergradient of K steps, walked back one at a time, against unrolling them at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

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


@pytest.mark.parametrize(("estimator", "tolerance"), PRODUCTS.values(), ids=PRODUCTS)
@pytest.mark.parametrize("optimizer", ["momentum", "Adam"])
def test_an_optimizer_inside(optimizer: str, estimator: mn.MAML, tolerance: float):
    """Against the steps written out, and autograd through them."""
    problem, steps = PROBLEMS["logistic, outer depends on x"], 5
    x = problem.x.detach().clone().requires_grad_()
    phi, m, v = problem.init, torch.zeros_like(problem.init), torch.zeros_like(problem.init)
    for step in range(1, steps + 1):
        at = phi if phi.requires_grad else phi.detach().requires_grad_()
        (g,) = torch.autograd.grad(problem.inner(x, at), at, create_graph=True)
        if optimizer == "momentum":
            m = 0.9 * m + g
            phi = phi - 0.1 * m
        else:
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            phi = phi - 0.1 * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
    expected: Tensor = torch.autograd.grad(problem.outer(x, phi), x)[0]
    options = {"lr": 0.1, "momentum": 0.9} if optimizer == "momentum" else {"lr": 0.1}
    kind = torch.optim.SGD if optimizer == "momentum" else torch.optim.Adam
    found = solve(problem, estimator, mn.TorchOptimizer(kind, steps=steps, options=options))
    assert relative_error(found.gradient, expected) < tolerance


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
