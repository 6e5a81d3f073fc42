"""Any regulariser in place of the squared distance: the squared distance itself, and one that is
not quadratic.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import metanudge as mn
from conformance import (
    check_chunks,
    check_engines_agree,
    check_pure,
    estimators,
    gradient,
    learner_for,
    name,
    small,
)
from implicit import implicit
from metanudge.engines.randomness import mix
from problems import relative_error

# torch's own forward-mode decompositions are scripted on first use.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)

PRECISE = mn.GradientDescent(lr=0.25, steps=70)
SHORT = mn.GradientDescent(lr=0.1, steps=3)
Params = dict[str, Tensor]


def squared(phi: Params, theta: Params) -> Tensor:
    return sum(((phi[n] - theta[n]) ** 2).sum() for n in phi)


def curved(phi: Params, theta: Params) -> Tensor:
    """Smooth, not quadratic, not symmetric in φ and θ, and with a θ that matters by itself."""
    return sum(
        (
            (1 + theta[n] ** 2) * ((phi[n] - theta[n]) ** 2 + 0.1 * (phi[n] - theta[n]) ** 4)
            + 0.3 * phi[n] ** 2
        ).sum()
        for n in phi
    )


def curved_vector(phi: Tensor, theta: Tensor, rho: Params) -> Tensor:
    return curved({"": phi}, {"": theta})


ESTIMATORS = [
    e
    for e in estimators()
    if not (isinstance(e, mn.FOBMAML) and (e.stencil == "five-point" or e.start == "shifted"))
]


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=name)
def test_the_squared_distance_is_plain_lam(estimator):
    setup = small()
    expected = gradient(setup, estimator, lam=2.0, solver=SHORT)
    for engine in estimator.engines:
        assert (
            relative_error(
                gradient(setup, estimator, engine, lam=None, regulariser=squared, solver=SHORT),
                expected,
            )
            < 1e-10
        )


@pytest.mark.parametrize(
    "solver",
    [mn.NewtonCG(tol=1e-12), mn.LBFGS(tol=1e-12), mn.Nesterov(0.2, 80)],
    ids=lambda s: type(s).__name__,
)
def test_the_squared_distance_with_other_solvers(solver):
    setup = small()
    estimator = mn.FOMAML()
    expected = gradient(setup, estimator, lam=2.0, solver=solver)
    for engine in ("stacked", "inplace"):
        assert (
            relative_error(
                gradient(setup, estimator, engine, lam=None, regulariser=squared, solver=solver),
                expected,
            )
            < 1e-9
        )


def test_another_regulariser_matches_implicit_differentiation():
    setup = small()
    truth = implicit(setup, curved_vector)
    options = {"lam": None, "regulariser": curved, "solver": PRECISE}
    for estimator in (mn.Exact(), mn.IMAML(cg_steps=40, tol=1e-14), mn.FOBMAML(stencil="tangent")):
        assert relative_error(gradient(setup, estimator, **options), truth) < 1e-8, estimator
    for nudge, start in (("loss", "theta"), ("gradient", "theta"), ("loss", "solution")):
        assert (
            relative_error(
                gradient(setup, mn.FOBMAML(nu=3e-4, nudge=nudge, start=start), **options), truth
            )
            < 1e-6
        )


def test_together_with_shared_layers():
    setup = small()
    truth = implicit(setup, curved_vector, adapts=lambda n: n.startswith("2."))
    options = {"lam": None, "regulariser": curved, "solver": PRECISE, "adapt": "2.*"}
    for estimator, tolerance in (
        (mn.Exact(), 1e-8),
        (mn.FOBMAML(stencil="tangent"), 1e-8),
        (mn.FOBMAML(nu=3e-4), 1e-6),
    ):
        assert relative_error(gradient(setup, estimator, **options), truth) < tolerance


def test_maml_is_autograd_through_the_steps():
    setup = small()
    model, loss, tasks = setup
    theta = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    values = []
    for task in tasks:
        phi = {n: p * 1 for n, p in theta.items()}
        for _ in range(3):
            value = loss(functional_call(model, phi, (task.support[0],)), task.support[1]) + curved(
                phi, {n: p * 1 for n, p in theta.items()}
            )
            g = torch.autograd.grad(value, list(phi.values()), create_graph=True)
            phi = {n: p - 0.1 * slope for (n, p), slope in zip(phi.items(), g, strict=True)}
        values.append(loss(functional_call(model, phi, (task.query[0],)), task.query[1]))
    torch.stack(values).mean().backward()
    estimate = gradient(setup, mn.MAML(), lam=None, regulariser=curved, solver=SHORT)
    assert relative_error(estimate, {n: p.grad for n, p in theta.items()}) < 1e-10


@pytest.mark.parametrize(
    "estimator",
    [
        mn.FOBMAML(nu=0.1),
        mn.FOBMAML(nu=0.1, nudge="gradient", stencil="forward"),
        mn.IMAML(cg_steps=2),
        mn.ESMAML(samples=2),
    ],
)
def test_engines_and_chunks_agree(estimator):
    setup = small()
    options = {"lam": None, "regulariser": curved}
    check_engines_agree(estimator, setup, solver=SHORT, **options)
    check_chunks(estimator, setup, **options)
    check_pure(estimator, setup, "inplace", **options)


def test_es_maml_moves_the_centre_too():
    """F(θ ± σε) is the query loss of a learner that stands at θ ± σε, regulariser and all."""
    setup = small(tasks=1)
    estimate = gradient(
        setup, mn.ESMAML(samples=1, sigma=0.1), lam=None, regulariser=curved, solver=SHORT
    )
    theta = {n: p.detach().clone() for n, p in setup.model.named_parameters()}
    # as ES-MAML draws for the first sample of the first task
    generator = torch.Generator().manual_seed(mix(0, 7, 0, 0, 3))
    noise = {
        n: torch.randn(p.shape, generator=generator, dtype=torch.float64) for n, p in theta.items()
    }
    losses = []
    for sign in (1, -1):
        setup.model.load_state_dict({n: theta[n] + sign * 0.1 * noise[n] for n in theta})
        losses.append(
            learner_for(setup, lam=None, regulariser=curved, solver=SHORT)
            .evaluate(setup.tasks)
            .mean_loss
        )
    assert (
        relative_error(
            estimate, {n: (losses[0] - losses[1]) / 0.2 * leaf for n, leaf in noise.items()}
        )
        < 1e-9
    )


def test_adapt_and_evaluate_take_regularisers():
    setup = small()
    plain, own = learner_for(setup, lam=2.0), learner_for(setup, lam=None, regulariser=squared)
    assert torch.allclose(
        plain.evaluate(setup.tasks).loss, own.evaluate(setup.tasks).loss, rtol=1e-12
    )
    for a, b in zip(
        plain.adapt(setup.tasks[0].support).parameters(),
        own.adapt(setup.tasks[0].support).parameters(),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    assert own.problem().smallest_lam == pytest.approx(2.0)
    assert "regulariser=" in repr(own)


# ---------------------------------------------------------------------------------------- bad input


def test_bad_regularisers():
    setup = small()
    bad = {
        "scalar tensor, got a tensor of shape": lambda phi, theta: phi["0.bias"] - theta["0.bias"],
        "scalar tensor, got float": lambda phi, theta: 0.0,
        "not finite at φ = θ": lambda phi, theta: squared(phi, theta).sqrt(),
    }
    for message, regulariser in bad.items():
        with pytest.raises(ValueError, match=message):
            learner_for(setup, lam=None, regulariser=regulariser)
    with pytest.raises(ValueError, match="lam would have no effect"):
        learner_for(setup, lam=2.0, regulariser=squared)
    with pytest.raises(TypeError, match="function of"):
        learner_for(setup, lam=None, regulariser=3.0)


def test_parameters_of_a_regulariser_are_not_learned():
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

        def forward(self, phi: Params, theta: Params) -> Tensor:
            return self.weight * squared(phi, theta)

    setup = small()
    with pytest.raises(ValueError, match="parameters that require grad"):
        learner_for(setup, lam=None, regulariser=Weighted())
    own = Weighted().requires_grad_(False)
    expected = gradient(setup, mn.FOBMAML(nu=0.1), solver=SHORT)
    assert (
        relative_error(
            gradient(setup, mn.FOBMAML(nu=0.1), lam=None, regulariser=own, solver=SHORT), expected
        )
        < 1e-10
    )


def test_what_a_regulariser_cannot_do_is_said():
    setup = small()
    options = {"lam": None, "regulariser": squared}
    with pytest.raises(ValueError, match=r"start=.shifted. moves the centre"):
        learner_for(
            setup, mn.FOBMAML(nu=0.1, nudge="gradient", start="shifted"), **options
        ).backward(setup.tasks)
    with pytest.raises(ValueError, match="unshrink=True"):
        learner_for(setup, mn.FOBMAML(nu=0.1, unshrink=True), **options).backward(setup.tasks)
    flat = learner_for(
        setup,
        lam=None,
        regulariser=lambda phi, theta: squared(phi, theta) ** 2,
        solver=mn.Nesterov(0.1, 3),
    )
    with pytest.raises(ValueError, match="momentum"):
        flat.backward(setup.tasks)
