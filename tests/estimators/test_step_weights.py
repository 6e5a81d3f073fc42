"""The multi-step loss Σ_k w_k f(φ_k), against autograd through a loop of tensor operations."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

import metanudge as mn
from adaptations import LAM, ON_ENGINES, ON_SOLVERS, SOLVERS, assert_same, wanted
from problems import Setup, mlp
from walks import EXACT, LR, PRODUCTS

WEIGHTS = (0.3, 0.0, -0.2, 0.7)


def learner_for(setup: Setup, solver: Any, estimator: Any, **options: Any) -> mn.MetaLearner:
    return mn.MetaLearner(
        setup.model, setup.loss, lam=LAM, solver=solver, estimator=estimator, **options
    )


@ON_SOLVERS
@pytest.mark.parametrize(
    "options",
    [{}, {"adapt": ["2.*"], "learn_lam": "tensor", "learn_lr": "step"}],
    ids=["all adapt", "all that can be learned"],
)
def test_the_gradient_of_a_weighted_sum(options: dict[str, Any], solver: str):
    setup = mlp(tasks=2)
    learner = learner_for(setup, SOLVERS[solver](4), mn.MAML(), **options)
    right, _ = wanted(setup, learner, weights=WEIGHTS)
    for (estimator, tolerance), engine in itertools.product(
        PRODUCTS.values(), ("inplace", "stacked")
    ):
        learner.estimator = dataclasses.replace(estimator, step_weights=WEIGHTS)
        learner.engine = engine
        gradient, stats = learner.meta_gradient(setup.tasks, metrics=False)
        assert_same(gradient, right, tolerance)
        each = 3 if estimator.products == "difference" else 2
        assert stats.support_gradients == each * 4
        assert stats.query_gradients == 3, "a weight of 0 costs nothing"


@ON_ENGINES
def test_the_statistics_stay_those_of_the_last_step(engine: str):
    setup, solver = mlp(tasks=2), mn.Nesterov(LR, 4, momentum=0.5)
    learner = learner_for(setup, solver, mn.MAML(step_weights=list(WEIGHTS)), engine=engine)
    gradient, stats = learner.meta_gradient(setup.tasks)
    assert stats.products == "autograd"
    assert stats.query_loss == pytest.approx(learner.evaluate(setup.tasks).mean_loss, rel=1e-13)
    assert_same(gradient, wanted(setup, learner, weights=WEIGHTS)[0], EXACT)


@ON_ENGINES
def test_the_last_one_alone_is_the_usual_loss(engine: str):
    setup, solver = mlp(tasks=2), mn.GradientDescent(LR, 3)
    learner = learner_for(setup, solver, mn.MAML(products="autograd"), engine=engine)
    usual, _ = learner.meta_gradient(setup.tasks)
    learner.estimator = mn.MAML(products="autograd", step_weights=(0, 0, 1))
    same, _ = learner.meta_gradient(setup.tasks)
    assert all(leaf.equal(usual[n]) for n, leaf in same.items())


@ON_ENGINES
@pytest.mark.parametrize("keep", ["device", "recompute"])
def test_truncated(keep: Any, engine: str):
    """The loss where the differentiated steps begin sees θ alone."""
    setup, weights = mlp(tasks=2), (0.0, 0.4, -0.5, 1.0)
    estimator = mn.MAML(truncate=2, step_weights=weights, trajectory=keep)
    learner = learner_for(setup, mn.GradientDescent(LR, 4), estimator, engine=engine)
    gradient, _ = learner.meta_gradient(setup.tasks)
    assert_same(gradient, wanted(setup, learner, weights=weights, truncate=2)[0], EXACT)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step_weights": (0.5, 0.5)}, "step_weights has 2 weights, but the solver takes 4 steps"),
        (
            {"step_weights": WEIGHTS, "truncate": 1},
            "the loss after step 1, but with truncate=1 only the last 1 of 4 steps are kept",
        ),
    ],
)
def test_weights_that_do_not_fit_the_solver(options: dict[str, Any], message: str):
    setup = mlp(tasks=2)
    with pytest.raises(ValueError, match=message):
        learner_for(setup, mn.GradientDescent(LR, 4), mn.MAML(**options)).backward(setup.tasks)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step_weights": ()}, r"must be finite numbers, one for each inner step.* got \(\)"),
        ({"step_weights": 0.5}, "must be finite numbers.* got 0.5"),
        ({"step_weights": (1.0, float("nan"))}, "must be finite numbers"),
        ({"step_weights": (1.0, 0.0)}, "the last one not 0"),
        ({"step_weights": (0.5, 0.5), "products": "unrolled"}, "takes all at once"),
    ],
)
def test_bad_weights(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        mn.MAML(**options)
