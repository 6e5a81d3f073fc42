"""The curvature of inner problems from gradients alone, and the inner rate that follows from it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import metanudge as mn
from metanudge.curvature import curvature
from metanudge.engines import InplaceEngine, StackedEngine

AUTO = mn.GradientDescent(lr="auto", steps=5)


def tasks(scale: float = 1.0, dtype: torch.dtype = torch.float64) -> mn.TaskBatch:
    random = torch.Generator().manual_seed(0)
    x = scale * torch.randn(3, 7, 4, dtype=dtype, generator=random)
    y = torch.randn(3, 7, 1, dtype=dtype, generator=random)
    return mn.TaskBatch(support=(x, y), query=(x, y))


def linear(dtype: torch.dtype = torch.float64, **how) -> mn.MetaLearner:
    torch.manual_seed(1)
    return mn.MetaLearner(nn.Linear(4, 1, dtype=dtype), F.mse_loss, **how)


def exact(batch: mn.TaskBatch) -> float:
    """Of mean squared errors the Hessian is 2/n XᵀX, with a column of ones for the bias."""
    sizes = []
    for task in batch:
        x = torch.cat([task.support[0], torch.ones_like(task.support[0][:, :1])], 1).double()
        sizes.append(torch.linalg.eigvalsh(2 / len(x) * x.T @ x)[-1])
    return float(max(sizes))


@pytest.mark.parametrize("engine", [StackedEngine(), InplaceEngine()])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_of_linear_models_it_is_the_largest_eigenvalue(engine, scale) -> None:
    batch = tasks(scale)
    found = curvature(linear().problem(), batch, engine=engine, probes=100)
    assert found == pytest.approx(exact(batch), rel=1e-6)


@pytest.mark.parametrize("engine", ["stacked", "inplace"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_few_probes_suffice_for_a_rate(engine, dtype) -> None:
    batch = tasks(dtype=dtype)
    learner = linear(dtype, solver=AUTO, engine=engine)
    assert "lr='auto'" in repr(learner)
    learner.backward(batch)
    # two digits are kept; power iteration comes from below
    assert learner.solver.lr == pytest.approx(0.1 / (exact(batch) + 2), rel=0.1)
    assert repr(learner.solver) in repr(learner)


@pytest.mark.filterwarnings("ignore::metanudge.estimators.run.DivergenceWarning")
def test_the_first_call_decides_whichever_it_is() -> None:
    batch = tasks()
    calls = [
        lambda own: own.backward(batch), lambda own: own.evaluate(batch),
        lambda own: own.choose_nu(batch), lambda own: own.meta_gradient(batch),
    ]  # fmt: skip
    rates = []
    for call in calls:
        learner = linear(solver=AUTO)
        call(learner)
        rates.append(learner.solver.lr)
        learner.backward(tasks(1e3))
        assert learner.solver.lr == rates[-1], "it stays"
    assert set(rates) == {rates[0]}
    support = batch[0].support
    learner = linear(solver=AUTO)
    learner.adapt(support, steps=1)
    first, learner = learner.solver, linear(solver=AUTO)
    with learner.adapted(support):
        assert learner.solver == first == replace(AUTO, lr=first.lr)


def test_what_follows_is_a_learner_with_that_rate() -> None:
    batch, auto = tasks(), linear(solver=AUTO)
    auto.backward(batch)
    plain = linear(solver=auto.solver)
    plain.backward(batch)
    for own, other in zip(auto.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own.grad, other.grad)


def test_a_state_dict_keeps_it() -> None:
    first = linear(solver=AUTO)
    first.backward(tasks())
    second = linear(solver=AUTO)
    second.load_state_dict(first.state_dict())
    assert second.solver == first.solver
    by_hand = linear(solver=mn.GradientDescent(lr=0.01, steps=5))
    by_hand.load_state_dict(first.state_dict())
    assert by_hand.solver.lr == 0.01
    old = first.state_dict()
    old["_extra_state"] = old["_extra_state"][:-1]
    third = linear(solver=AUTO)
    third.load_state_dict(old)
    assert third.solver.lr == "auto"


def test_what_is_refused() -> None:
    x = torch.full((1, 3, 4), torch.inf, dtype=torch.float64)
    with pytest.raises(ValueError, match="no learning rate follows"):
        linear(solver=AUTO).backward(mn.TaskBatch(support=(x, x[..., :1]), query=(x, x[..., :1])))
    with pytest.raises(ValueError, match="Give lr a number"):
        linear(solver=AUTO, learn_lr="scalar", estimator=mn.MAML())
    with pytest.raises(ValueError, match="lr must be a positive number"):
        mn.GradientDescent(lr="fast", steps=5)
