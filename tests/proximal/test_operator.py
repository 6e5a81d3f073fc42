"""Operators as stiffness: a diagonal one is a λ per parameter, a dense one matches dense implicit
differentiation.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import metanudge as mn
from conformance import (
    check_chunks,
    check_engines_agree,
    check_pure,
    estimators,
    gradient,
    learner_for,
    name,
    rounding,
    small,
)
from implicit import implicit
from problems import Setup, quadratic, relative_error, vector

# torch's own forward-mode decompositions are scripted on first use.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)

PRECISE = mn.GradientDescent(lr=0.35, steps=60)
SHORT = mn.GradientDescent(lr=0.1, steps=3)


def entries(setup: Setup) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        n: 1.0 + torch.rand(p.shape, generator=generator, dtype=torch.float64)
        for n, p in setup.model.named_parameters()
    }


def dense(
    setup: Setup, *, lowest: float = 2.0, highest: float = 3.5
) -> tuple[Tensor, Callable[[dict[str, Tensor]], dict[str, Tensor]]]:
    """A random symmetric matrix with eigenvalues between the two, and its product on dicts."""
    shapes = {n: p.shape for n, p in setup.model.named_parameters() if p.requires_grad}
    size = sum(shape.numel() for shape in shapes.values())
    generator = torch.Generator().manual_seed(5)
    rotation = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64)).Q
    matrix = (rotation * torch.linspace(lowest, highest, size, dtype=torch.float64)) @ rotation.T

    def product(v: dict[str, Tensor]) -> dict[str, Tensor]:
        pieces = (matrix @ torch.cat([v[n].flatten() for n in shapes])).split(
            [shape.numel() for shape in shapes.values()]
        )
        return {
            n: piece.view(shape) for (n, shape), piece in zip(shapes.items(), pieces, strict=True)
        }

    return matrix, product


ESTIMATORS = [
    e for e in estimators() if not (isinstance(e, mn.FOBMAML) and e.stencil == "five-point")
]


@pytest.mark.parametrize("estimator", ESTIMATORS, ids=name)
def test_a_diagonal_operator_is_a_stiffness_per_parameter(estimator):
    setup = small()
    lam = entries(setup)
    expected = gradient(setup, estimator, lam=lam, solver=SHORT)
    for engine in estimator.engines:
        estimate = gradient(
            setup,
            estimator,
            engine,
            lam=lambda v: {n: lam[n] * leaf for n, leaf in v.items()},
            solver=SHORT,
        )
        assert relative_error(estimate, expected) < rounding(estimator)


@pytest.mark.parametrize(
    "solver", [mn.NewtonCG(tol=1e-12), mn.LBFGS(tol=1e-12)], ids=lambda s: type(s).__name__
)
def test_the_solvers_that_look_at_the_objective_find_the_optimum(solver):
    setup = small()
    matrix, product = dense(setup)
    truth = implicit(setup, lambda phi, theta, rho: 0.5 * (phi - theta) @ matrix @ (phi - theta))
    for engine in ("stacked", "inplace"):
        assert (
            relative_error(
                gradient(
                    setup, mn.IMAML(cg_steps=40, tol=1e-14), engine, lam=product, solver=solver
                ),
                truth,
            )
            < 1e-8
        )


@pytest.mark.parametrize(
    "setup", [small, lambda: quadratic(5.0, dim=6, split=2, same=False)], ids=["mlp", "quadratic"]
)
def test_a_dense_operator_matches_implicit_differentiation(setup):
    setup = setup()
    matrix, product = dense(setup)
    truth = implicit(setup, lambda phi, theta, rho: 0.5 * (phi - theta) @ matrix @ (phi - theta))
    for estimator in (mn.Exact(), mn.IMAML(cg_steps=40, tol=1e-14), mn.FOBMAML(stencil="tangent")):
        assert (
            relative_error(gradient(setup, estimator, lam=product, solver=PRECISE), truth) < 1e-8
        ), estimator
    for nudge, start in (
        ("loss", "theta"),
        ("gradient", "theta"),
        ("gradient", "shifted"),
        ("loss", "solution"),
    ):
        estimator = mn.FOBMAML(nu=3e-4, nudge=nudge, start=start)
        assert (
            relative_error(gradient(setup, estimator, lam=product, solver=PRECISE), truth) < 1e-6
        ), estimator


def test_shifted_start_moves_the_centre_by_the_inverse():
    """K = 1, quadratic tasks: φ(ν) = c − α(Âc + b̂ + νq + A(c − θ)) with c = θ − νA⁻¹q, so dφ/dν =
    −(I − αÂ)A⁻¹q.
    """
    setup = quadratic(5.0, dim=6, same=False)
    matrix, product = dense(setup)
    shifted = gradient(
        setup,
        mn.FOBMAML(nu=0.1, nudge="gradient", start="shifted"),
        lam=product,
        solver=mn.GradientDescent(0.1, 1),
    )
    by_hand = torch.zeros(6, dtype=torch.float64)
    theta = setup.model.vector.detach()
    for task in setup.tasks:
        (A_hat, b_hat), (A, b) = task.support, task.query
        phi = theta - 0.1 * (A_hat[0] @ theta + b_hat[0])
        step = torch.eye(6, dtype=torch.float64) - 0.1 * A_hat[0]
        q = A[0] @ phi + b[0]
        by_hand += matrix @ step @ torch.linalg.solve(matrix, q) / len(setup.tasks)
    assert relative_error(vector(shifted), by_hand) < 1e-9


@pytest.mark.parametrize(
    "estimator",
    [
        mn.FOBMAML(nu=0.1),
        mn.FOBMAML(nu=0.1, nudge="gradient", start="shifted"),
        mn.IMAML(cg_steps=2),
        mn.ESMAML(samples=2),
    ],
)
def test_engines_and_chunks_agree(estimator):
    setup = small()
    _, product = dense(setup)
    check_engines_agree(estimator, setup, lam=product, solver=SHORT)
    check_engines_agree(estimator, setup, lam=product, solver=mn.Nesterov(0.1, 3))
    check_chunks(estimator, setup, lam=product)
    check_pure(estimator, setup, "inplace", lam=product)


def test_operators_that_vmap_does_not_know_run_row_by_row():
    setup = small()
    _, product = dense(setup)

    def through_numpy(v: dict[str, Tensor]) -> dict[str, Tensor]:
        return product({n: torch.from_numpy(leaf.numpy().copy()) for n, leaf in v.items()})

    for estimator in (mn.FOBMAML(nu=0.1), mn.Exact()):
        expected = gradient(setup, estimator, lam=product, solver=SHORT)
        assert (
            relative_error(gradient(setup, estimator, lam=through_numpy, solver=SHORT), expected)
            < 1e-13
        )


def test_with_shared_layers_the_operator_sees_what_adapts():
    setup = small()
    head = {n: p.shape for n, p in setup.model.named_parameters() if n.startswith("2.")}
    seen = []

    def product(v: dict[str, Tensor]) -> dict[str, Tensor]:
        seen.append(list(v))
        return {n: 2.0 * leaf for n, leaf in v.items()}

    estimate = gradient(setup, mn.FOBMAML(nu=0.1), lam=product, adapt="2.*", solver=SHORT)
    assert all(names == list(head) for names in seen)
    assert (
        relative_error(
            estimate, gradient(setup, mn.FOBMAML(nu=0.1), lam=2.0, adapt="2.*", solver=SHORT)
        )
        < 1e-12
    )


def test_adapt_and_evaluate_take_operators():
    setup = small()
    lam = entries(setup)
    plain, operator = (
        learner_for(setup, lam=lam),
        learner_for(setup, lam=lambda v: {n: lam[n] * leaf for n, leaf in v.items()}),
    )
    assert torch.allclose(
        plain.evaluate(setup.tasks).loss, operator.evaluate(setup.tasks).loss, rtol=1e-13
    )
    for a, b in zip(
        plain.adapt(setup.tasks[0].support).parameters(),
        operator.adapt(setup.tasks[0].support).parameters(),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    with pytest.raises(TypeError, match="no λ per parameter"):
        operator.stiffness()


def test_the_smallest_curvature_is_found():
    """It decides Nesterov's momentum and the estimate of δ; with as many products as parameters it
    is exact.
    """
    setup = small()
    _, product = dense(setup, lowest=0.7, highest=30.0)
    learner = learner_for(setup, lam=product)
    assert learner.problem().smallest_lam == pytest.approx(0.7, rel=1e-6)
    assert sum(p.numel() for p in setup.model.parameters()) <= 25


# ---------------------------------------------------------------------------------------- bad input


def test_operators_that_are_none():
    setup = small()
    _, product = dense(setup)
    _, indefinite = dense(setup, lowest=-0.1)
    _, singular = dense(setup, lowest=0.0)
    skew = {
        n: torch.linspace(1, 2, p.numel(), dtype=torch.float64).view(p.shape)
        for n, p in setup.model.named_parameters()
    }

    def lopsided(v: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            n: 2 * leaf + 0.01 * (skew[n] * leaf).sum() * torch.ones_like(leaf)
            for n, leaf in v.items()
        }

    bad = {
        "not symmetric": lopsided,
        "not linear": lambda v: {n: 2 * leaf + 1 for n, leaf in v.items()},
        "not positive definite: it has an eigenvalue of at most -": indefinite,
        "not positive definite": singular,
        "NaN or Inf": lambda v: {n: leaf / 0 for n, leaf in v.items()},
        "names and shapes": lambda v: {n: leaf.sum() for n, leaf in v.items()},
        "got Tensor": lambda v: next(iter(v.values())),
        "got dict": lambda v: {},
    }
    for message, operator in bad.items():
        with pytest.raises(ValueError, match=message if message != "got dict" else r"got \{\}"):
            learner_for(setup, lam=operator)
    learner_for(setup, lam=product)


def test_one_wrong_direction_among_many_is_found():
    """A single negative eigenvalue of 400: random quadratic forms would never show it, Lanczos
    does.
    """
    model = torch.nn.Linear(20, 20, bias=False).double()

    def product(v: dict[str, Tensor]) -> dict[str, Tensor]:
        leaf = v["weight"]
        # 1 − 1.5 along the mean
        return {"weight": leaf - 1.5 * leaf.mean() * torch.ones_like(leaf)}

    with pytest.raises(ValueError, match=r"eigenvalue of at most -0\.5"):
        mn.MetaLearner(model, torch.nn.functional.mse_loss, lam=product)


def test_what_an_operator_cannot_do_is_said():
    setup = small()
    _, product = dense(setup)
    with pytest.raises(ValueError, match="the proximal term has none"):
        learner_for(setup, mn.FOBMAML(nu=0.1, unshrink=True), lam=product).backward(setup.tasks)
    _, hopeless = dense(setup, lowest=1e-11, highest=1e3)
    with pytest.raises(ValueError, match=r"start=.shifted. needs A⁻¹∇f"):
        learner_for(
            setup,
            mn.FOBMAML(nu=0.1, nudge="gradient", start="shifted"),
            lam=hopeless,
            solver=mn.GradientDescent(1e-4, 1),
        ).backward(setup.tasks)
