"""Training compared at equal cost: what a meta-step spends, and how far a budget gets.

Cost is counted in backward passes for one task: gradients of support and query losses, and Hessian
products, each of which is one pass more than the gradient it comes with.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TypeVar

import metanudge as mn
from metanudge.estimators import Estimator
from metanudge.testing.problems import logistic_regression

COUNTED = (
    "Gradients spent are backward passes for one task, of support and query losses alike; a Hessian"
    " product counts as one pass beside the gradient it comes with; evaluations of losses count"
    " nothing."
)
X = TypeVar("X")


@functools.cache
def passes(estimator: Estimator, steps: int, learn_lr: mn.InnerRates | None = None) -> int:
    """Of one meta-gradient of one task with so many inner steps, counted on a small problem.

    Example:
        >>> passes(mn.FOMAML(), 5), passes(mn.MAML(), 5), passes(mn.FOBMAML(nu=0.1), 5)
        (6, 11, 20)
    """
    setup = logistic_regression(tasks=1)
    learner = mn.MetaLearner(
        setup.model,
        setup.loss,
        lam=2.0,
        solver=mn.GradientDescent(lr=0.1, steps=steps),
        estimator=estimator,
        learn_lr=learn_lr,
    )
    stats = learner.meta_gradient(setup.tasks, metrics=False)[1]
    return round(stats.support_gradients + stats.query_gradients + stats.hessian_products)


def within(curve: Mapping[int, X], each: int, budget: float) -> X | None:
    """What a curve over meta-steps shows at the last place that a budget of passes pays for.

    Example:
        >>> within({0: "a", 10: "b", 20: "c"}, each=6, budget=100.0)
        'b'
    """
    paid = [step for step in curve if step * each <= budget]
    return curve[max(paid)] if paid else None


def common_budget(each: Mapping[str, int], steps: int) -> int:
    """What the cheapest of some methods spends in so many meta-steps."""
    return min(each.values()) * steps
