"""`check_gradient` tells the truth about estimators, on models where the truth is known."""

import math

import pytest
import torch
from torch import nn

import metanudge as mn
from metanudge.models import Conv1D


@pytest.fixture
def tasks():
    g = torch.Generator().manual_seed(0)
    x, xq = torch.randn(3, 8, 4, generator=g), torch.randn(3, 8, 4, generator=g)
    y, yq = torch.randint(0, 3, (3, 8), generator=g), torch.randint(0, 3, (3, 8), generator=g)
    return mn.TaskBatch((x, y), (xq, yq))


@pytest.fixture
def learner():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    return mn.MetaLearner(
        model, nn.functional.cross_entropy, lam=2.0, solver=mn.GradientDescent(lr=0.2, steps=3)
    )


def test_targets_are_exact(learner, tasks):
    report = mn.check_gradient(learner, tasks, estimators=[mn.MAML(), mn.Exact()])
    maml, exact = report.rows
    assert maml.error_adaptation < 1e-12
    assert maml.cosine_adaptation == pytest.approx(1, abs=1e-12)
    assert report.optimum_residual < 1e-9
    # Exact uses the learner's three steps, not the optimum: it must not be credited with the
    # optimum's gradient.
    assert 1e-3 < exact.error_implicit < 1


def test_converged_solver_reaches_the_implicit_target(learner, tasks):
    learner.solver = mn.NewtonCG(tol=1e-12)
    estimators = [mn.Exact(), mn.FOBMAML(nu=1e-3), mn.IMAML(cg_steps=60)]
    report = mn.check_gradient(learner, tasks, estimators=estimators, nus=[])
    assert [row.error_implicit < 1e-4 for row in report.rows] == [True] * 3
    assert math.isnan(report.agreement)
    assert any("K-step adaptation" in note for note in report.notes)


def test_agrees_with_meta_gradients_computed_directly(learner, tasks):
    report = mn.check_gradient(
        learner, tasks, estimators=[mn.FOBMAML(nu=0.1), mn.FOMAML()], nus=[0.1], max_tasks=2
    )
    twin = mn.MetaLearner(learner.model.double(), learner.loss, lam=2.0, solver=learner.solver)
    some = tasks[:2].to(torch.float64)
    gradients = []
    for estimator in (mn.FOBMAML(nu=0.1), mn.FOMAML(), mn.MAML()):
        twin.estimator = estimator
        gradients.append(torch.cat([g.flatten() for g in twin.meta_gradient(some)[0].values()]))
    for row, g in zip(report.rows, gradients[:2], strict=True):
        truth = gradients[2]
        assert row.error_adaptation == pytest.approx(
            float((g - truth).norm() / truth.norm()), rel=1e-9
        )
        assert row.cosine_adaptation == pytest.approx(
            float(torch.cosine_similarity(g, truth, dim=0)), rel=1e-9
        )


def test_tries_every_nu_and_prints_a_table(learner, tasks):
    report = mn.check_gradient(
        learner, tasks, estimators=[mn.FOBMAML(nu=0.2), mn.FOMAML()], nus=[0.01, 0.1]
    )
    assert [row.nu for row in report.rows] == [0.01, 0.1, 0.2, None]
    text = str(report)
    assert "against the implicit gradient" in text
    assert all(row.estimator in text for row in report.rows)
    assert report.as_dicts()[0]["nu"] == 0.01


def test_the_verdict_names_the_closest_and_tells_smooth_from_kinked(learner, tasks):
    """Max-pooling, BatchNorm and ReLU with so few examples: a difference in float32 sees kinks on
    nearly every step, which float64 resolves; tanh has none.
    """
    smooth = mn.check_gradient(learner, tasks, nus=[0.1], max_tasks=2)
    best = min(smooth.rows, key=lambda row: row.error_adaptation)
    assert f"Closest to the K-step adaptation: {best.estimator}" in smooth.verdict
    assert 'are meaningful here: MAML(products="difference") in float32' in smooth.verdict
    assert smooth.differences.error_adaptation < 1e-2
    assert smooth.verdict in str(smooth)
    torch.manual_seed(2)
    solver = mn.GradientDescent(lr=0.1, steps=5)
    net = Conv1D(ways=3, channels=4)
    kinked = mn.MetaLearner(net, nn.functional.cross_entropy, solver=solver)
    g = torch.Generator().manual_seed(2)
    x, y = torch.randn(2, 15, 40, generator=g), torch.arange(3).repeat(2, 5)
    few = mn.TaskBatch((x, y), (x.flip(0), y))
    report = mn.check_gradient(kinked, few, nus=[], optimum=solver)  # not what this is about
    assert "are not to be trusted here" in report.verdict
    assert 'MAML(products="autograd")' in report.verdict
    named = mn.check_gradient(learner, tasks, estimators=[mn.FOMAML()], max_tasks=1)
    assert named.differences is None
    assert named.verdict.count("FOMAML") == 2


def test_leaves_the_learner_as_it_is(learner, tasks):
    before = [p.clone() for p in learner.parameters()]
    calls = learner.calls
    mn.check_gradient(learner, tasks, estimators=[mn.FOMAML()])
    assert learner.calls == calls
    assert all(
        torch.equal(p, b) and p.dtype == torch.float32 and p.grad is None
        for p, b in zip(learner.parameters(), before, strict=True)
    )


def test_an_estimator_that_cannot_run_is_noted_not_fatal(learner, tasks):
    learner.solver = mn.LBFGS()
    report = mn.check_gradient(
        learner, tasks, estimators=[mn.FOBMAML(stencil="tangent"), mn.FOMAML()], max_tasks=1
    )
    assert [row.estimator for row in report.rows] == ["FOMAML"]
    assert any("tangent" in note for note in report.notes)


def test_says_when_the_inner_loop_diverges(tasks):
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    learner = mn.MetaLearner(
        model, nn.functional.cross_entropy, lam=2.0, solver=mn.GradientDescent(lr=1.5, steps=4)
    )
    report = mn.check_gradient(learner, tasks, estimators=[mn.FOMAML()])
    assert report.residual_growth > 1
    assert "smaller lr in the solver or a smaller lam: lr·λ = 3" in str(report)


def test_learned_stiffness_and_shared_layers_are_part_of_the_comparison(learner, tasks):
    """With converged solves, what is learned besides θ counts as well; estimators that cannot learn
    it are noted.
    """
    own = mn.MetaLearner(
        learner.model,
        learner.loss,
        lam=2.0,
        learn_lam="tensor",
        adapt="2.*",
        solver=mn.GradientDescent(lr=0.3, steps=60),
    )
    report = mn.check_gradient(
        own,
        tasks,
        estimators=[mn.FOBMAML(stencil="tangent"), mn.FOBMAML(nu=1e-2), mn.FOMAML()],
        nus=[],
    )
    assert report.parameters == sum(p.numel() for p in own.parameters())
    tangent, difference = report.rows
    assert tangent.error_implicit < 1e-8
    assert difference.error_implicit < 1e-3
    assert report.agreement == pytest.approx(1, abs=1e-9)
    assert any("FOMAML: FOMAML has no gradient for the stiffness" in note for note in report.notes)


def test_regularisers_are_compared_in_double_precision(learner, tasks):
    def regulariser(phi, theta):
        return sum(
            (phi[n] - theta[n]).square().sum() + (phi[n] - theta[n]).pow(4).sum() for n in phi
        )

    own = mn.MetaLearner(
        learner.model,
        learner.loss,
        regulariser=regulariser,
        solver=mn.GradientDescent(lr=0.2, steps=80),
    )
    (row,) = mn.check_gradient(own, tasks, estimators=[mn.FOBMAML(stencil="tangent")]).rows
    assert row.error_implicit < 1e-8


class OnceDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.tanh(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (1 - torch.tanh(x) ** 2)


class Once(nn.Module):
    def forward(self, x):
        return OnceDifferentiable.apply(x)


@pytest.mark.parametrize("twice", [True, False])
def test_in_place_it_says_the_same(learner, tasks, twice):
    """By autograd's products, and by differences where the model has no second derivative (nor
    stacks), to what differences can do in float64: 1e-10/ν of the optima, and ε² and ε_machine/ε
    of the products at ε = 1e-6.
    """
    estimators = [mn.FOMAML(), mn.FOBMAML(nu=0.1)]
    stacked = mn.check_gradient(learner, tasks, estimators=estimators, nus=[])
    if twice:
        learner.engine = "inplace"
    else:
        learner.model[1] = Once()
    report = mn.check_gradient(learner, tasks, estimators=estimators, nus=[])
    tolerance = 1e-8 if twice else 1e-5
    for row, expected in zip(report.rows, stacked.rows, strict=True):
        for name in ("cosine_implicit", "error_implicit", "cosine_adaptation", "error_adaptation"):
            assert getattr(row, name) == pytest.approx(getattr(expected, name), abs=tolerance)
    assert report.residual_growth == pytest.approx(stacked.residual_growth, rel=1e-10)
    assert report.agreement == pytest.approx(stacked.agreement, abs=tolerance)
    assert any("differences of optima" in note for note in report.notes) == (not twice)


def test_without_stiffness_the_steps_alone_are_compared(learner, tasks):
    plain = mn.MetaLearner(
        learner.model, learner.loss, lam=0.0, solver=learner.solver, estimator=mn.MAML()
    )
    report = mn.check_gradient(plain, tasks)
    assert [row.estimator for row in report.rows] == ["MAML", "FOMAML", "Reptile"]
    assert report.rows[0].error_adaptation < 1e-12
    assert 1e-3 < report.rows[1].error_adaptation < 1
    assert any("λ is 0" in note for note in report.notes)
    assert "Closest to the K-step adaptation: MAML" in report.verdict
    assert "implicit gradient: " not in report.verdict
    assert "λ is 0" in str(report)
