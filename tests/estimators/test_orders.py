"""Orders of convergence of FO-B-MAML on smooth problems that are not quadratic (paper, Proposition
2 and Corollary 1).

With exact inner solves the error is the stencil's truncation error, O(ν), O(ν²), O(ν⁴). With
solutions that are off by δ it is that plus O(λδ/ν), at best O(δ^½) for the forward and O(δ^⅔) for
the symmetric difference.
"""

from __future__ import annotations

import functools

import pytest

import metanudge as mn
from metanudge.solvers import Solver
from metanudge.testing.inexact import EXACTLY, OffBy
from problems import Setup, log_slope, logistic_regression, mlp, relative_error

PROBLEMS = {
    "logistic regression": (logistic_regression, 0.5),
    "tanh MLP": (functools.partial(mlp, features=2, hidden=3, classes=2), 1.0),
}


def meta_gradient(setup: Setup, lam: float, solver: Solver, estimator, engine: str = "stacked"):
    learner = mn.MetaLearner(
        setup.model, setup.loss, lam=lam, solver=solver, estimator=estimator, engine=engine
    )
    return learner.meta_gradient(setup.tasks, metrics=False)[0]


@functools.cache
def problem(name: str):
    """A problem of one task, its stiffness, and its exact meta-gradient."""
    make, lam = PROBLEMS[name]
    setup = make(tasks=1)
    return setup, lam, meta_gradient(setup, lam, EXACTLY, mn.Exact())


@pytest.mark.parametrize(
    ("stencil", "nus", "order", "tolerance"),
    [
        ("forward", (1e-4, 1e-3, 1e-2), 1, 0.02),
        ("symmetric", (1e-3, 1e-2, 3e-2), 2, 0.02),
        ("five-point", (0.01, 0.02, 0.05), 4, 0.1),
    ],
    ids=["forward", "symmetric", "five-point"],
)
@pytest.mark.parametrize("nudge", ["loss", "gradient"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_truncation_error_has_the_order_of_the_stencil(name, nudge, stencil, nus, order, tolerance):
    setup, lam, truth = problem(name)
    estimators = [mn.FOBMAML(nu=nu, stencil=stencil, nudge=nudge) for nu in nus]
    errors = [
        relative_error(meta_gradient(setup, lam, EXACTLY, e, "inplace"), truth) for e in estimators
    ]
    assert errors[0] > 1e-11  # else rounding would be fitted
    assert log_slope(nus, errors) == pytest.approx(order, abs=tolerance)


FORWARD, SYMMETRIC = ("forward", (1e-10, 1e-8, 1e-6), 1), ("symmetric", (1e-9, 1e-7, 1e-5), 2)


@pytest.mark.parametrize(
    ("name", "nudge", "stencil", "deltas", "order", "middle"),
    [
        ("logistic regression", "loss", *FORWARD, 2),
        ("logistic regression", "loss", *SYMMETRIC, 2),
        ("logistic regression", "gradient", *FORWARD, 8),
        ("logistic regression", "gradient", *SYMMETRIC, 2),
        ("tanh MLP", "loss", *SYMMETRIC, 2),
    ],
)
def test_error_at_the_best_nudge_has_the_order_of_corollary_1(
    name, nudge, stencil, deltas, order, middle
):
    """The optimum of ν^p + δ/ν lies at a multiple of δ^(1/(p+1)), where the error is a multiple of
    δ^(p/(p+1)).
    """
    setup, lam, truth = problem(name)
    best = []
    for delta in deltas:
        errors = []
        for multiple in (middle / 4, middle, 4 * middle):
            estimator = mn.FOBMAML(
                nu=multiple * delta ** (1 / (order + 1)), stencil=stencil, nudge=nudge
            )
            gradients = [
                meta_gradient(setup, lam, OffBy(delta, seed), estimator, "inplace")
                for seed in range(2)
            ]
            errors.append(
                sum(relative_error(gradient, truth) for gradient in gradients) / len(gradients)
            )
        assert errors.index(min(errors)) == 1  # the scan has the optimum inside
        best.append(min(errors))
    assert log_slope(deltas, best) == pytest.approx(order / (order + 1), abs=0.02)
