"""`solve_bilevel` as a node of torch's graph."""

from __future__ import annotations

import pytest
import torch

import metanudge as mn
from bilevel_problems import logistic, ridge
from problems import relative_error

DOUBLE = {"dtype": torch.float64}
ESTIMATORS = {
    "default": None,
    "five-point": mn.FOBMAML(nu=3e-3, stencil="five-point", nudge="gradient"),
    "exact": mn.Exact(),
}


@pytest.mark.parametrize("make", [ridge, logistic])
@pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=ESTIMATORS)
def test_backward_fills_the_gradient(make, estimator):
    problem = make(direct=True)
    x = problem.x.clone().requires_grad_()
    loss = mn.solve_bilevel(problem.inner, problem.outer, x, problem.init, estimator=estimator)
    torch.testing.assert_close(loss.detach(), problem.outer(problem.x, problem.solution))
    loss.backward()
    assert relative_error(x.grad, problem.truth) < 1e-5
    (
        3 * mn.solve_bilevel(problem.inner, problem.outer, x, problem.init, estimator=estimator)
    ).backward()
    assert relative_error(x.grad, 4 * problem.truth) < 1e-5


@pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=ESTIMATORS)
def test_inside_a_larger_graph(estimator):
    """torch's own gradcheck: x is made from two leaves, one of which also goes around, and the loss
    goes on into a function.
    """
    problem = logistic(direct=True)

    def total(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        x = a.sin() * b + 0.1 * a
        loss = mn.solve_bilevel(
            problem.inner,
            problem.outer,
            x,
            problem.init,
            solver=mn.LBFGS(tol=1e-13),
            estimator=estimator,
        )
        return (2 * loss).tanh() + (a * b).sum()

    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(4, generator=generator, **DOUBLE).requires_grad_() for _ in range(2))
    assert torch.autograd.gradcheck(total, (a, b), eps=1e-5, atol=1e-5, rtol=1e-4)


def test_structures_in_a_larger_graph():
    """x is a dict with a list in it; one tensor stands in two places, one needs no gradient, one is
    an integer.
    """
    A = torch.eye(2, **DOUBLE) + 0.3

    def inner(x, phi):
        penalty = (x["log"][0].exp() * phi["w"].square()).sum() + x["log"][1].exp() * phi[
            "w"
        ].square().sum()
        return (A @ phi["w"] - x["target"]).square().sum() + penalty

    def outer(x, phi):
        return (phi["w"][x["index"]] - x["goal"]).square() + x["log"][0].sum() * phi["w"].sum()

    def total(s: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        x = {
            "log": [s.tanh(), t.square()],
            "target": s,
            "goal": torch.tensor(0.2, **DOUBLE),
            "index": torch.tensor(1),
        }
        return 2 * mn.solve_bilevel(
            inner,
            outer,
            x,
            {"w": torch.zeros(2, **DOUBLE)},
            estimator=mn.FOBMAML(nu=1e-3, stencil="five-point"),
        )

    s = torch.tensor([0.4, -0.7], **DOUBLE, requires_grad=True)
    t = torch.tensor(0.5, **DOUBLE, requires_grad=True)
    assert torch.autograd.gradcheck(total, (s, t), eps=1e-5, atol=1e-6, rtol=1e-5)


def test_an_outer_optimizer_reaches_the_minimum():
    """Descent on F with one penalty arrives where a fine search over its closed form is lowest."""
    problem = ridge(per_feature=False)
    x = problem.x.clone().requires_grad_()
    optimizer = torch.optim.LBFGS([x], max_iter=20, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = mn.solve_bilevel(problem.inner, problem.outer, x, problem.init)
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        here = mn.solve_bilevel(problem.inner, problem.outer, x, problem.init)
        for shift in (-0.05, 0.05):
            assert mn.solve_bilevel(problem.inner, problem.outer, x + shift, problem.init) > here
    assert (
        abs(float(mn.hypergradient(problem.inner, problem.outer, x, problem.init).gradient)) < 1e-4
    )


def test_without_gradients_the_inner_problem_is_solved_once():
    problem = logistic(direct=True)
    calls = []

    def outer(x, phi):
        calls.append(1)
        return problem.outer(x, phi)

    truth = problem.outer(problem.x, problem.solution)
    plain = mn.solve_bilevel(problem.inner, outer, problem.x, problem.init)
    with torch.no_grad():
        off = mn.solve_bilevel(
            problem.inner, outer, problem.x.clone().requires_grad_(), problem.init
        )
    assert len(calls) == 2
    for loss in (plain, off):
        assert not loss.requires_grad
        torch.testing.assert_close(loss, truth)


def test_it_cannot_be_differentiated_twice():
    """A second derivative would be silently wrong: the hypergradient is a constant in the graph."""
    problem = ridge()
    x = problem.x.clone().requires_grad_()
    loss = mn.solve_bilevel(problem.inner, problem.outer, x, problem.init)
    (g,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="can be differentiated once"):
        (g.sum() + x.sum()).backward()


def test_tensors_that_bypass_x_are_noticed():
    problem = ridge()
    x, scale = problem.x.clone().requires_grad_(), torch.ones((), **DOUBLE, requires_grad=True)
    for inner, outer, who in (
        (lambda x, phi: scale * problem.inner(x, phi), problem.outer, "inner"),
        (problem.inner, lambda x, phi: scale * problem.outer(x, phi), "outer"),
    ):
        with pytest.raises(
            ValueError,
            match=(
                rf"{who}\(x, phi\) uses a tensor that requires gradients.*would not reach it.*Put"
                r" it into x"
            ),
        ):
            mn.solve_bilevel(inner, outer, x, problem.init)
        assert (
            relative_error(mn.hypergradient(inner, outer, x, problem.init).gradient, problem.truth)
            < 1e-5
        )


def test_mixed_precision():
    """x in float32 and φ in float64: the loss has the outer function's type, the gradient that of
    x.
    """
    problem = ridge()
    x = problem.x.float().requires_grad_()
    loss = mn.solve_bilevel(
        lambda x, phi: problem.inner(x.double(), phi),
        problem.outer,
        x,
        problem.init,
        estimator=mn.Exact(),
    )
    loss.backward()
    assert loss.dtype == torch.float64
    assert x.grad.dtype == torch.float32
    assert relative_error(x.grad.double(), problem.truth) < 1e-5
