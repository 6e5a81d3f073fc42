"""Differences in every precision: the ε that chooses itself, and what it says about its error."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import metanudge as mn
from metanudge.engines.precision import Precision, precision_of
from metanudge.estimators.products import ProductsWarning, ladder, usual_epsilon
from once import Once, OnceModule
from problems import Setup, conv_net, mlp, relative_error, seeded, transformer, vector
from walks import lstm

SOLVER = mn.GradientDescent(lr=0.1, steps=5)
SMOOTH = {"MLP": lambda: mlp(tasks=4), "conv": conv_net, "Transformer": transformer}
# Unit of rounding u: errors of order ε² and u/ε are least, u^⅔, at ε = u^⅓, times curvature; the
# estimate may not be larger than these.
PRECISIONS = {
    "float64": (torch.float64, False, 1e-8),
    "float32": (torch.float32, False, 1e-3),
    "bfloat16 autocast": (torch.float32, True, 0.2),
    "bfloat16": (torch.bfloat16, False, 0.2),
}


def cast(setup: Setup, dtype: torch.dtype) -> Setup:
    return Setup(copy.deepcopy(setup.model).to(dtype), setup.loss, setup.tasks.to(dtype))


def learner(setup: Setup, estimator: mn.MAML, engine: str = "inplace") -> mn.MetaLearner:
    return mn.MetaLearner(
        setup.model, setup.loss, lam=1.0, solver=SOLVER, estimator=estimator, engine=engine
    )


def exact(setup: Setup) -> Tensor:
    whole = learner(setup, mn.MAML(products="autograd"))
    return vector(whole.meta_gradient(setup.tasks, metrics=False)[0])


@pytest.mark.parametrize("engine", ["inplace", "stacked"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", SMOOTH)
def test_epsilon_chooses_itself(model: str, precision: str, engine: str):
    dtype, autocast, tolerance = PRECISIONS[precision]
    double = SMOOTH[model]()
    truth = exact(double)
    setup = cast(double, dtype)
    differences = learner(setup, mn.MAML(products="difference"), engine)
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        found, stats = differences.meta_gradient(setup.tasks, metrics=False)
    error = relative_error(vector(found).double(), truth)
    assert stats.products == "difference"
    assert stats.error is not None
    assert stats.error < tolerance
    assert error < 3 * stats.error, "the estimate is no lower than the error"
    seen = differences.tuner.last
    assert seen is not None
    assert seen.symbol == "ε"
    assert str(seen).startswith("ε ")
    assert min(seen.nus) <= differences.tuner.nu <= max(seen.nus)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_without_a_look_epsilon_follows_the_precision(precision: str):
    dtype, autocast, _ = PRECISIONS[precision]
    problem = learner(cast(mlp(), dtype), mn.MAML()).problem()
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        tried = ladder(problem)
        assert tried[0] > usual_epsilon(problem) > tried[-1]
        assert (
            precision_of(problem)
            is {
                "float64": Precision.DOUBLE,
                "float32": Precision.SINGLE,
                "bfloat16 autocast": Precision.AUTOCAST,
                "bfloat16": Precision.HALF,
            }[precision]
        )


def kinked() -> Setup:
    source = mn.tasks.MNIST1D(ways=3, shots=5, queries=10, seed=0)
    tasks = mn.TaskBatch.of([source.task(i) for i in range(4)]).to(torch.float64)
    return Setup(seeded(0, lambda: mn.models.Conv1D(ways=3)), F.cross_entropy, tasks)


def test_kinks_are_told_from_what_is_smooth():
    """ReLU and max-pooling: in float64 there is room below the kinks, in float32 there is not, and
    that is said.
    """
    double = kinked()
    truth = exact(double)
    fine = learner(double, mn.MAML(products="difference"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, stats = fine.meta_gradient(double.tasks, metrics=False)
    assert relative_error(found, truth) < 1e-6
    assert stats.error is not None
    assert stats.error < 1e-6
    single = cast(double, torch.float32)
    coarse = learner(single, mn.MAML(products="difference"))
    with pytest.warns(ProductsWarning, match="not worth having.*autograd"):
        found, stats = coarse.meta_gradient(single.tasks, metrics=False)
    assert stats.error is not None
    assert stats.error > 0.3
    assert relative_error(vector(found).double(), truth) > 0.3
    products = learner(single, mn.MAML(products="autograd"))
    found, stats = products.meta_gradient(single.tasks, metrics=False)
    assert stats.error is None
    # float32: K steps through a net with kinks, whose sides rounding may change
    assert relative_error(vector(found).double(), truth) < 1e-2


def test_a_given_epsilon_is_taken_as_it_is():
    setup = mlp()
    given = learner(setup, mn.MAML(products="difference", epsilon=1e-4))
    stats = given.backward(setup.tasks, metrics=False)
    assert given.tuner.nu is None
    assert stats.error is None
    assert stats.support_gradients == 3 * SOLVER.steps


# ------------------------------------------------------------- what cannot be differentiated twice


@pytest.mark.parametrize("solver", [SOLVER, mn.TorchOptimizer(torch.optim.Adam, steps=5)])
def test_auto_takes_differences_where_autograd_cannot(
    solver: Any, caplog: pytest.LogCaptureFixture
):
    setup, smooth = mlp(OnceModule), mlp()

    def made(setup: Setup, estimator: mn.MAML) -> mn.MetaLearner:
        return mn.MetaLearner(
            setup.model, setup.loss, lam=1.0, solver=solver, estimator=estimator, engine="inplace"
        )

    auto = made(setup, mn.MAML())
    with caplog.at_level(logging.WARNING, logger="metanudge"):
        found, stats = auto.meta_gradient(setup.tasks)
        auto.meta_gradient(setup.tasks)
    (record,) = caplog.records
    assert "differences" in record.getMessage()
    assert stats.products == "difference"
    expected, stats = made(smooth, mn.MAML()).meta_gradient(smooth.tasks)
    assert stats.products == "autograd"
    assert relative_error(found, expected) < 1e-6
    with pytest.raises(RuntimeError, match="once_differentiable"):
        made(setup, mn.MAML(products="autograd")).backward(setup.tasks)
    assert all(p.grad is None for p in setup.model.parameters())


def test_a_loss_that_is_one_function_with_one_derivative():
    """A second backward pass would not meet it: its derivative is a constant where it is used."""
    setup = mlp()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return Once.apply(F.cross_entropy(output, target))

    def gradient(loss: Any, products: Any) -> Any:
        estimator = mn.MAML(products=products)
        return learner(setup._replace(loss=loss), estimator).meta_gradient(setup.tasks)[0]

    expected = gradient(lambda a, b: F.cross_entropy(a, b).tanh(), "autograd")
    assert relative_error(gradient(loss, "auto"), expected) < 1e-6
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient(loss, "autograd")


def test_auto_chooses_epsilon_from_then_on():
    """And says what it is worth, on a net with kinks too little."""
    setup = mlp(OnceModule)
    auto = learner(setup, mn.MAML())
    _, first = auto.meta_gradient(setup.tasks)
    found, stats = auto.meta_gradient(setup.tasks)
    assert (first.products, first.error) == ("difference", None)
    assert stats.error is not None
    assert 0 < stats.error < PRECISIONS["float64"][2]
    assert f"products difference (error about {stats.error:.1g})" in str(stats)
    assert relative_error(vector(found), exact(mlp())) < 3 * stats.error

    kinks = cast(kinked(), torch.float32)
    kinks = kinks._replace(loss=lambda a, b: Once.apply(F.cross_entropy(a, b)))
    auto = learner(kinks, mn.MAML())
    auto.meta_gradient(kinks.tasks)
    with pytest.warns(ProductsWarning, match="at no ε are MAML's gradients"):
        assert auto.meta_gradient(kinks.tasks)[1].error > 0.3  # type: ignore[operator]


@pytest.mark.parametrize("make", [mlp, lstm], ids=["MLP", "LSTM"])
def test_auto_is_exact_where_autograd_can(make: Callable[[], Setup]):
    setup = make()
    whole = learner(setup, mn.MAML()).meta_gradient(setup.tasks, metrics=False)
    products = learner(setup, mn.MAML(products="autograd")).meta_gradient(setup.tasks)
    assert relative_error(whole[0], products[0]) == 0
    assert whole[1].products == "autograd"


def test_statistics_say_that_it_was_unrolled():
    setup = mlp()
    assert learner(setup, mn.MAML(), "stacked").backward(setup.tasks).products == "unrolled"
    fobmaml = mn.MetaLearner(setup.model, setup.loss)
    assert fobmaml.backward(setup.tasks).products is None
