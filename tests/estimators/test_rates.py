"""Learned inner rates, against autograd through a loop of plain tensor operations."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import metanudge as mn
from adaptations import LAM, ON_ENGINES, ON_SOLVERS, SOLVERS, assert_same, wanted
from problems import Setup, mlp, relative_error
from walks import EXACT, LR, MODELS, PRODUCTS, Parameters, engines, loss_at

FORMS = ["scalar", "tensor", "parameter", "step"]
ON_FORMS = pytest.mark.parametrize("per", FORMS)
ON_SIGNS = pytest.mark.parametrize("positive", [True, False], ids=["positive", "signed"])


def learner_for(setup: Setup, solver: Any, what: mn.InnerRates, **options: Any) -> mn.MetaLearner:
    """Rates that all differ, of both signs where they may."""
    learner = mn.MetaLearner(
        setup.model, setup.loss, solver=solver, learn_lr=what, **{"lam": LAM, **options}
    )
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in learner.rate_parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=p.dtype)
            p.copy_(p + 0.3 * noise if what.positive else p * (0.3 + noise))
    return learner


@ON_FORMS
@ON_SIGNS
@ON_SOLVERS
def test_the_gradient_by_the_rates(solver: str, positive: bool, per: Any):
    """In one step all parameters adapt; in five λ is learned and layers are shared as well."""
    setup, what = mlp(tasks=2), mn.InnerRates(per, positive)
    ways = list(itertools.product(PRODUCTS.values(), ("inplace", "stacked")))
    for steps, options in ((1, {}), (5, {"learn_lam": "tensor", "adapt": ["2.*"]})):
        learner = learner_for(setup, SOLVERS[solver](steps), what, **options)
        right, _ = wanted(setup, learner)
        # signed ones differ in the last factor alone
        for (estimator, tolerance), engine in ways if positive else ways[::3]:
            learner.estimator, learner.engine = estimator, engine
            gradient, stats = learner.meta_gradient(setup.tasks, metrics=False)
            assert_same(gradient, right, tolerance)
            each = 3 if estimator.products == "difference" else 2
            assert (stats.support_gradients, stats.query_gradients) == (each * steps, 1)


@pytest.mark.parametrize("model", MODELS)
@ON_SOLVERS
@pytest.mark.parametrize("steps", [1, 5, 20])
def test_all_at_once_on_every_network(solver: str, steps: int, model: str):
    """Learned rates, a learned λ (which one step does not see) and a shared layer; also shared is
    the bias of the keys, which changes nothing (`test_optimizers_walked_back`).
    """
    setup = MODELS[model](tasks=2)
    first, *names = [n for n, _ in setup.model.named_parameters() if not n.endswith("in_proj_bias")]
    options = {"adapt": names, "learn_lam": "tensor" if steps > 1 else None}
    learner = learner_for(setup, SOLVERS[solver](steps), mn.InnerRates("step"), **options)
    with sdpa_kernel(SDPBackend.MATH):
        right, _ = wanted(setup, learner)
    assert first in right
    for (estimator, tolerance), engine in itertools.product(PRODUCTS.values(), engines(model)):
        learner.estimator, learner.engine = estimator, engine
        gradient, stats = learner.meta_gradient(setup.tasks, metrics=False)
        assert_same(gradient, right, tolerance)
        each = 3 if estimator.products == "difference" else 2
        assert (stats.support_gradients, stats.query_gradients) == (each * steps, 1)


@ON_ENGINES
@pytest.mark.parametrize("estimator", [mn.MAML(), mn.MAML(trajectory="recompute")], ids=str)
def test_all_adapt_in_five_steps(estimator: mn.MAML, engine: str):
    """By autograd, step by step, if nothing else is asked for."""
    setup, solver = mlp(tasks=2), mn.GradientDescent(LR, 5)
    learner = learner_for(setup, solver, mn.InnerRates("step"), estimator=estimator, engine=engine)
    gradient, stats = learner.meta_gradient(setup.tasks)
    assert stats.products == "autograd"
    assert_same(gradient, wanted(setup, learner)[0], EXACT)


@ON_ENGINES
@ON_SIGNS
def test_a_momentum_made_from_a_learned_stiffness(positive: bool, engine: str):
    """It stays that of the solver's own rate, which is never negative."""
    setup, what = mlp(tasks=2), mn.InnerRates("parameter", positive)
    learner = learner_for(
        setup, mn.Nesterov(LR, 4), what, learn_lam="tensor", estimator=mn.MAML(), engine=engine
    )

    def beta(h: Parameters) -> Tensor:
        smallest = torch.stack([p for n, p in h.items() if n.startswith("log_lam")]).exp().min()
        root = (LR * smallest).sqrt()
        return (1 - root) / (1 + root)

    gradient, _ = learner.meta_gradient(setup.tasks)
    assert_same(gradient, wanted(setup, learner, beta=beta)[0], EXACT)


@ON_ENGINES
@pytest.mark.parametrize("solver", ["GD", "Adam"])
def test_truncated(solver: str, engine: str):
    """The rates of earlier steps count as constants, as the displacements do."""
    setup = mlp(tasks=2)
    learner = learner_for(
        setup,
        SOLVERS[solver](4),
        mn.InnerRates("step"),
        estimator=mn.MAML(truncate=2),
        engine=engine,
    )
    gradient, _ = learner.meta_gradient(setup.tasks)
    assert_same(gradient, wanted(setup, learner, truncate=2)[0], EXACT)
    assert all(not leaf[:2].any() for n, leaf in gradient.items() if n.startswith("log_lr."))


# ------------------------------------------------------------------------------------ to adapt with


@ON_FORMS
@ON_SOLVERS
def test_adaptation_uses_them_also_beyond_the_last_step(solver: str, per: Any):
    """Any estimator may do it. Rounding, in steps of a well-conditioned problem."""
    setup = mlp(tasks=1)
    learner = learner_for(setup, SOLVERS[solver](3), mn.InnerRates(per))
    (task,) = setup.tasks
    for steps in (2, 6):
        _, phi = wanted(setup, learner, steps=steps)
        adapted = dict(learner.adapt(task.support, steps=steps).named_parameters())
        assert relative_error({n: p.detach() for n, p in adapted.items()}, phi) < 1e-13
        after = float(loss_at(setup, phi, task.query))
        for engine in ("inplace", "stacked"):
            learner.engine = engine
            assert float(learner.evaluate(task, steps=steps).loss) == pytest.approx(after, 1e-13)


@ON_SIGNS
@ON_SOLVERS
def test_they_start_as_the_solver_would(solver: str, positive: bool):
    setup, made = mlp(tasks=2), SOLVERS[solver](3)
    options: Any = {"solver": made, "lam": LAM, "estimator": mn.MAML(truncate=3)}
    plain = mn.MetaLearner(setup.model, setup.loss, **options)
    own = mn.MetaLearner(
        setup.model, setup.loss, learn_lr=mn.InnerRates("tensor", positive), **options
    )
    assert own.evaluate(setup.tasks).loss.tolist() == pytest.approx(
        plain.evaluate(setup.tasks).loss.tolist(), rel=1e-13
    )
    gradient, stats = own.meta_gradient(setup.tasks)
    for name, leaf in plain.meta_gradient(setup.tasks)[0].items():
        assert relative_error(gradient[name], leaf) < EXACT
    assert stats.query_loss == pytest.approx(own.evaluate(setup.tasks).mean_loss, rel=1e-13)


# ------------------------------------------------------------------------------ kept on the learner


@ON_SIGNS
def test_what_is_learned_is_used(positive: bool):
    setup = mlp(tasks=2)
    learner = learner_for(
        setup, mn.GradientDescent(LR, 2), mn.InnerRates("tensor", positive), estimator=mn.MAML()
    )
    groups = learner.parameter_groups(lr=0.0, rate_lr=0.1)
    assert [group["lr"] for group in groups] == [0.0, 0.1]
    assert groups[1]["params"] == list(learner.rate_parameters())
    assert groups[1]["weight_decay"] == 0.0
    before = learner.evaluate(setup.tasks).mean_loss
    learner.backward(setup.tasks)
    torch.optim.SGD(groups).step()
    assert learner.evaluate(setup.tasks).mean_loss < before
    rates = learner.rates()
    name = "log_lr" if positive else "lr"
    for n, p in learner.named_parameters():
        if n.startswith(name):
            kept = rates[n.removeprefix(f"{name}.")]
            assert torch.equal(kept, p.detach().exp() if positive else p.detach())
    again = mn.MetaLearner(
        mlp(tasks=2, seed=3).model, setup.loss, lam=LAM, solver=mn.GradientDescent(0.5, 2),
        learn_lr=mn.InnerRates("tensor", positive),
    )  # fmt: skip
    again.load_state_dict(learner.state_dict())
    assert again.evaluate(setup.tasks).loss.equal(learner.evaluate(setup.tasks).loss)


def test_rates_that_are_frozen_are_used_and_get_no_gradient():
    setup = mlp(tasks=2)
    learner = learner_for(
        setup, mn.GradientDescent(LR, 2), mn.InnerRates("step"), estimator=mn.MAML()
    )
    whole, _ = learner.meta_gradient(setup.tasks)
    learner.log_lr.requires_grad_(False)
    frozen, _ = learner.meta_gradient(setup.tasks)
    assert all(leaf.equal(whole[n]) for n, leaf in frozen.items())
    assert not [n for n in frozen if n.startswith("log_lr.")]


def test_single_precision_and_a_cast_of_the_learner():
    setup = mlp(tasks=2)
    learner = learner_for(
        setup, mn.GradientDescent(LR, 2), mn.InnerRates("parameter"), estimator=mn.MAML()
    )
    exact, _ = learner.meta_gradient(setup.tasks)
    gradient, _ = learner.float().meta_gradient(setup.tasks.to(torch.float32))
    assert {leaf.dtype for leaf in gradient.values()} == {torch.float32}
    assert relative_error({n: leaf.double() for n, leaf in gradient.items()}, exact) < 1e-5


def test_check_gradient_compares_what_knows_them():
    setup = mlp(tasks=2)
    learner = learner_for(
        setup, mn.GradientDescent(LR, 2), mn.InnerRates("tensor"), estimator=mn.MAML()
    )
    report = mn.check_gradient(learner, setup.tasks)
    assert [row.estimator for row in report.rows] == ["MAML"]
    assert any("No implicit gradient: Exact has no gradient" in note for note in report.notes)


# ---------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"learn_lr": "tensors"}, ValueError, "Unknown learn_lr 'tensors'. Did you mean 'tensor'"),
        ({"learn_lr": 0.1}, ValueError, "Unknown learn_lr 0.1"),
        ({"solver": mn.LBFGS(5)}, ValueError, "LBFGS has none of its own. Use GradientDescent"),
        ({"solver": mn.NewtonCG(5)}, ValueError, "NewtonCG has none of its own"),
        ({"solver": mn.GradientDescent(0.1, 5, tol=1e-3)}, ValueError, "has tol=0.001"),
        (
            {"solver": mn.TorchOptimizer(torch.optim.RMSprop, 5)},
            TypeError,
            "those of SGD, Adam and AdamW, but not of RMSprop",
        ),
        (
            {"solver": mn.TorchOptimizer(torch.optim.SGD, 5, {"lr": 0.0})},
            ValueError,
            "starts at the solver's lr, which is 0.0",
        ),
    ],
)
def test_what_cannot_be_learned(options: dict[str, Any], error: Any, message: str):
    with pytest.raises(error, match=message):
        mn.MetaLearner(nn.Linear(2, 1), nn.functional.mse_loss, **{"learn_lr": "tensor", **options})


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        *(
            (kind(), f"{kind.__name__} has no gradient for the inner learning rates")
            for kind in (mn.FOBMAML, mn.FOMAML, mn.IMAML, mn.Reptile, mn.ESMAML, mn.Exact)
        ),
        (mn.FOBMAML(nu="auto"), "FOBMAML has no gradient for the inner learning rates"),
        (mn.MAML(products="unrolled"), "learned from steps taken back one at a time"),
        (mn.MAML(truncate=0), "learned from steps taken back one at a time"),
    ],
)
def test_only_maml_learns_them(estimator: Any, message: str):
    setup = mlp(tasks=2)
    learner = learner_for(
        setup, mn.GradientDescent(LR, 2), mn.InnerRates("tensor"), estimator=estimator
    )
    with pytest.raises(ValueError, match=message):
        learner.backward(setup.tasks)
    assert all(p.grad is None for p in learner.parameters())


def test_other_groups_and_other_solvers_are_refused():
    setup = mlp(tasks=2)
    fixed = mn.MetaLearner(setup.model, setup.loss)
    with pytest.raises(
        ValueError, match=r"rate_lr=0\.1 was given, but inner rates are not learned"
    ):
        fixed.parameter_groups(lr=0.1, rate_lr=0.1)
    learner = learner_for(setup, mn.GradientDescent(LR, 2), mn.InnerRates("tensor"))
    learner.solver = mn.LBFGS(3)
    with pytest.raises(ValueError, match="LBFGS has none of its own"):
        learner.evaluate(setup.tasks)
    learner = learner_for(setup, mn.GradientDescent(LR, 2), mn.InnerRates("tensor"), adapt="2.*")
    learner.adapting = None
    with pytest.raises(ValueError, match=r"No inner rate is learned for 0\.weight"):
        learner.evaluate(setup.tasks)
