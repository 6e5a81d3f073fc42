"""What a meta-gradient costs, counted: evaluations of the user's loss on the in-place engine, and
what `Stats` says on both.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field

import pytest
from torch import Tensor

import metanudge as mn
from problems import mlp

K, TASKS, SUPPORT, QUERY = 4, 2, 6, 9
GD = mn.GradientDescent(lr=0.1, steps=K)


@dataclass
class CountedLoss:
    """A loss that counts its calls by data set, and by whether they carry a graph; and the backward
    passes through it.
    """

    loss: object
    calls: Counter = field(default_factory=Counter)

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        which = {SUPPORT: "support", QUERY: "query"}[len(target)]
        value = self.loss(output, target)
        if not value.requires_grad:
            self.calls[f"{which} forward only"] += 1
            return value
        self.calls[which] += 1
        value.register_hook(lambda _: self.calls.update([f"{which} backward"]))
        return value


def run(estimator, solver=GD, *, engine: str, metrics: bool = False) -> tuple[Counter, mn.Stats]:
    """Calls and statistics of one meta-gradient; the calls per task in place, for all tasks
    together where they are stacked.
    """
    model, loss, tasks = mlp(tasks=TASKS, support=SUPPORT, query=QUERY)
    counted = CountedLoss(loss)
    learner = mn.MetaLearner(model, counted, solver=solver, estimator=estimator, engine=engine)
    _, stats = learner.meta_gradient(tasks, metrics=metrics)
    together = TASKS if engine == "inplace" else 1
    assert all(count % together == 0 for count in counted.calls.values())
    return Counter({key: count // together for key, count in counted.calls.items()}), stats


FOBMAML = mn.FOBMAML
COSTS = [  # estimator, support gradients, query gradients
    (mn.FOMAML(), K, 1),
    (mn.Reptile(), K, 0),
    (FOBMAML(nu=0.1), 2 * K, 2 * K),
    (FOBMAML(nu=0.1, stencil="forward"), 2 * K, K),
    (FOBMAML(nu=0.1, stencil="five-point"), 4 * K, 4 * K),
    (FOBMAML(nu=0.1, nudge="gradient"), 3 * K, 1),
    (FOBMAML(nu=0.1, nudge="gradient", start="shifted"), 3 * K, 1),
    (FOBMAML(nu=0.1, nudge="gradient", start="solution"), 3 * K, 1),
    (FOBMAML(nu=0.1, nudge="gradient", stencil="forward"), 2 * K, 1),
    (FOBMAML(nu=0.1, nudge="gradient", stencil="five-point"), 5 * K, 1),
    (FOBMAML(nu=0.1, start="solution"), 3 * K, 2 * K),
    (FOBMAML(nu=0.1, start="shifted"), 3 * K, 2 * K + 1),
    (mn.MAML(products="difference", epsilon=1e-4), 3 * K, 1),
]


@pytest.mark.parametrize(
    ("estimator", "support", "query"), COSTS, ids=[repr(estimator) for estimator, *_ in COSTS]
)
def test_first_order_gradients_are_counted(estimator, support, query):
    calls, stats = run(estimator, engine="inplace")
    expected = Counter(
        {"support": support, "support backward": support, "query": query, "query backward": query}
    )
    assert calls == +expected  # nothing else: without metrics there is no forward pass beside these
    for engine in ("inplace", "stacked"):
        _, stats = run(estimator, engine=engine)
        assert (stats.support_gradients, stats.query_gradients, stats.hessian_products) == (
            support,
            query,
            0,
        )
        assert (stats.engine, stats.tasks) == (engine, TASKS)


def test_stacked_tasks_and_nudges_share_their_passes():
    calls, _ = run(FOBMAML(nu=0.1), engine="stacked")
    # Inside vmap a loss cannot see whether a graph is being made outside it: count every call.
    assert [
        sum(n for key, n in calls.items() if key in (data, f"{data} forward only"))
        for data in ("support", "query")
    ] == [K, K]


@pytest.mark.parametrize("engine", ["inplace", "stacked"])
@pytest.mark.parametrize(
    ("estimator", "forward_passes"),
    [
        (mn.FOMAML(), 2),  # query loss before and after
        (FOBMAML(nu=0.1), 3),  # before, and after each of the two solves
        (FOBMAML(nu=0.1, nudge="gradient"), 2),
        (FOBMAML(nu=0.1, stencil="forward"), 2),
    ],
    ids=["FOMAML", "loss nudge", "gradient nudge", "forward"],
)
def test_metrics_cost_forward_passes_only(estimator, forward_passes, engine):
    without, cheap = run(estimator, engine=engine, metrics=False)
    measured, stats = run(estimator, engine=engine, metrics=True)
    # Side by side, one call before and one after serve all tasks and nudges.
    assert measured - without == Counter(
        {"query forward only": forward_passes if engine == "inplace" else 2}
    )
    assert stats.query_loss < stats.query_loss_before
    assert (stats.support_gradients, stats.query_gradients) == (
        cheap.support_gradients,
        cheap.query_gradients,
    )


@pytest.mark.parametrize("engine", ["inplace", "stacked"])
def test_second_order_products_of_imaml(engine):
    _, stats = run(mn.IMAML(cg_steps=3), engine=engine)
    # A product comes with a gradient of the support loss, which is counted too.
    assert (stats.support_gradients, stats.query_gradients, stats.hessian_products) == (K + 3, 1, 3)


def test_second_order_products_of_maml():
    for truncate, products in ((None, K), (0, 0), (2, 2)):
        _, stats = run(mn.MAML(truncate=truncate), engine="stacked")
        assert (stats.support_gradients, stats.query_gradients, stats.hessian_products) == (
            K,
            1,
            products,
        )


@pytest.mark.parametrize(("nudge", "gradients"), [("loss", (K, K)), ("gradient", (2 * K, 1))])
def test_tangent_costs_a_product_per_step(nudge, gradients):
    _, stats = run(FOBMAML(stencil="tangent", nudge=nudge), engine="stacked")
    assert (stats.support_gradients, stats.query_gradients, stats.hessian_products) == (
        *gradients,
        K,
    )


def test_es_maml_takes_no_query_gradient():
    calls, stats = run(mn.ESMAML(samples=3), engine="inplace")
    assert calls == Counter({"support": 6 * K, "support backward": 6 * K, "query forward only": 6})
    for engine in ("inplace", "stacked"):
        _, stats = run(mn.ESMAML(samples=3), engine=engine)
        assert (stats.support_gradients, stats.query_gradients, stats.hessian_products) == (
            6 * K,
            0,
            0,
        )


def test_rows_that_stop_early_are_not_paid_for_in_place():
    """A generous tolerance ends the solves: fewer gradients than K a solve."""
    learner_cost = [
        run(FOBMAML(nu=0.1), dataclasses.replace(GD, tol=tol), engine="inplace")
        for tol in (1e-12, 1e3)
    ]
    (all_steps, _), (one_look, stats) = learner_cost
    assert all_steps["support"] == 2 * K
    assert one_look["support"] == 2
    assert stats.support_gradients == 2
