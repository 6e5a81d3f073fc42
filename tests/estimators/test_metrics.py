"""Where query loss and accuracy after adaptation are measured: at the un-nudged solution."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import metanudge as mn
from metanudge.training.progress import describe
from problems import mlp

GD = mn.GradientDescent(lr=0.1, steps=4)
FOBMAML = mn.FOBMAML
EXACT = [  # measured at φ_0 itself
    FOBMAML(nu=0.2, stencil="forward"),
    FOBMAML(nu=0.2, nudge="gradient"),
    FOBMAML(nu=0.2, start="shifted"),
    FOBMAML(stencil="tangent"),
]


def of_mlp(estimator: mn.FOBMAML, **options: object) -> tuple[mn.MetaLearner, mn.TaskBatch]:
    """A smooth model in float64."""
    model, loss, tasks = mlp(tasks=3, support=6, query=9)
    options = {"engine": "stacked"} | options
    return mn.MetaLearner(model, loss, solver=GD, estimator=estimator, **options), tasks


def of_chain(estimator: mn.FOBMAML, **options: object) -> tuple[mn.MetaLearner, mn.TaskBatch]:
    """A smooth chain of layers, which takes the accelerated path."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(2, 3, 6, 1, 8, generator=g, dtype=torch.float64)
    y = torch.arange(6).remainder(3).expand(3, 6)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        layers = nn.Conv1d(1, 4, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(32, 3)
    learner = mn.MetaLearner(
        nn.Sequential(*layers).double(), nn.functional.cross_entropy, solver=GD, estimator=estimator
    )
    return learner, mn.TaskBatch(support=(x[0], y), query=(x[1], y))


def deviation(make, estimator: mn.FOBMAML, **options: object) -> float:
    """How far the loss told is from that of an un-nudged solve."""
    learner, tasks = make(estimator, **options)
    stats = learner.meta_gradient(tasks)[1]
    if make is of_chain:
        assert stats.path.startswith(("native", "fused")), stats.path
    return abs(stats.query_loss - learner.evaluate(tasks).mean_loss)


@pytest.mark.parametrize("make", [of_mlp, of_chain])
@pytest.mark.parametrize("stencil", ["symmetric", "five-point"])
def test_the_loss_is_that_of_the_unnudged_solution_up_to_nu_squared(make, stencil):
    far, near = (deviation(make, FOBMAML(nu=nu, stencil=stencil)) for nu in (0.08, 0.02))
    # a fourth of ν: a sixteenth of what is left, as ν tends to 0
    assert math.log(far / near, 4) == pytest.approx(2, abs=0.15)


def test_both_pairs_of_five_points_are_measured_at_the_inner_one():
    for chunk in (None, 2, 3, 4, 12):
        learner, tasks = of_mlp(FOBMAML(nu=0.1, stencil="five-point"), chunk=chunk)
        five = learner.meta_gradient(tasks)[1]
        learner, tasks = of_mlp(FOBMAML(nu=0.1), chunk=chunk)
        assert five.query_loss == pytest.approx(learner.meta_gradient(tasks)[1].query_loss)
        assert not five.nudged


@pytest.mark.parametrize("estimator", EXACT, ids=str)
@pytest.mark.parametrize("make", [of_mlp, of_chain])
def test_where_the_unnudged_solution_is_known_it_is_measured_itself(make, estimator):
    assert deviation(make, estimator) < 1e-12


@pytest.mark.parametrize("make", [of_mlp, of_chain])
@pytest.mark.parametrize("stencil", ["symmetric", "five-point"])
def test_measuring_changes_no_bit_of_the_gradient(make, stencil):
    learner, tasks = make(FOBMAML(nu=0.1, stencil=stencil))
    told, untold = (learner.meta_gradient(tasks, metrics=m, seed=0) for m in (True, False))
    assert all(torch.equal(leaf, untold[0][n]) for n, leaf in told[0].items())
    assert told[1].query_gradients == untold[1].query_gradients
    assert told[1].support_gradients == untold[1].support_gradients


@pytest.mark.parametrize("options", [{"engine": "inplace"}, {"chunk": 1}], ids=str)
def test_solutions_that_never_meet_are_called_nudged(options):
    learner, tasks = of_mlp(FOBMAML(nu=0.1), **options)
    stats = learner.meta_gradient(tasks)[1]
    assert stats.nudged
    assert "(nudged)" in str(stats)
    learner, tasks = of_mlp(FOBMAML(nu=0.1, nudge="gradient"), **options)
    plain = learner.meta_gradient(tasks)[1]
    assert not plain.nudged
    assert "nudged" not in str(plain)


@pytest.mark.parametrize("stencil", ["symmetric", "five-point"])
def test_nudged_losses_are_the_same_on_both_engines(stencil):
    """Means over the same nudged solutions: apart by the rounding of sums alone."""
    found = []
    for options in ({"engine": "inplace"}, {"chunk": 1}):
        learner, tasks = of_mlp(FOBMAML(nu=0.1, stencil=stencil), **options)
        found.append(learner.meta_gradient(tasks)[1].query_loss)
    assert found[0] == pytest.approx(found[1], rel=1e-12)


def test_progress_says_nudged():
    values = {"query_loss": 0.5, "query_accuracy": 0.9, "residual": 0.1}
    assert describe(values).startswith("loss 0.5 · accuracy 90.0%")
    assert "(nudged)" in describe(values | {"nudged": 1})
