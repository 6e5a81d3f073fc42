"""Every estimator against the closed form of quadratic tasks (paper, App. "Quadratic objective
experiment").

The inner solves reach 1e-12, so what is left of an error belongs to the estimator.
"""

from __future__ import annotations

import math

import pytest
import torch

import metanudge as mn
from problems import (
    Setup,
    log_slope,
    quadratic,
    quadratic_meta_gradient,
    quadratic_solutions,
    relative_error,
    vector,
)

LAM = 0.5
NEWTON = mn.NewtonCG(steps=10, cg_steps=60, tol=1e-12)
NESTEROV = mn.Nesterov(lr=0.66, steps=36)  # 0.66 ≈ 1/(L̂ + λ)
SOLVERS = pytest.mark.parametrize("solver", [NEWTON, NESTEROV], ids=["NewtonCG", "Nesterov"])
STARTS = pytest.mark.parametrize("start", ["theta", "shifted", "solution"])
NUDGES = pytest.mark.parametrize("nudge", ["loss", "gradient"])
STENCILS = pytest.mark.parametrize("stencil", ["forward", "symmetric", "five-point"])

# the paper has f = f̂, which would hide a mix-up of the two
TASKS = {
    "condition 10": {"condition": 10},
    "condition 100": {"condition": 100},
    "query of its own": {"condition": 100, "same": False},
}


@pytest.fixture(params=TASKS.values(), ids=TASKS)
def setup(request: pytest.FixtureRequest) -> Setup:
    return quadratic(dim=20, tasks=2, **request.param)


def meta_gradient(setup: Setup, solver, estimator, *, lam=LAM, engine="stacked"):
    learner = mn.MetaLearner(
        setup.model, setup.loss, lam=lam, solver=solver, estimator=estimator, engine=engine
    )
    return learner.meta_gradient(setup.tasks, metrics=False)


def error(setup: Setup, solver, estimator, *, lam=LAM, engine="stacked") -> float:
    gradient, _ = meta_gradient(setup, solver, estimator, lam=lam, engine=engine)
    return relative_error(gradient, quadratic_meta_gradient(setup, lam))


@SOLVERS
def test_inner_solves_reach_1e_12(setup, solver):
    _, stats = meta_gradient(setup, solver, mn.FOMAML())
    assert stats.residual < 1e-12
    assert stats.residual_start > 1


@SOLVERS
@pytest.mark.parametrize("estimator", [mn.Exact(), mn.IMAML(cg_steps=25)], ids=["Exact", "IMAML"])
def test_implicit_gradients(setup, solver, estimator):
    assert error(setup, solver, estimator) < 1e-12


@pytest.mark.parametrize("estimator", [mn.Exact(), mn.IMAML(cg_steps=60)], ids=["Exact", "IMAML"])
def test_implicit_gradients_of_a_badly_conditioned_inner_problem(estimator):
    setup = quadratic(100, tasks=2)
    assert error(setup, NEWTON, estimator, lam=1e-3) < 1e-10  # condition number 92


@pytest.mark.parametrize(
    "solver", [NESTEROV, mn.GradientDescent(lr=1.0, steps=60)], ids=["Nesterov", "GD"]
)
def test_maml_of_many_steps(setup, solver):
    assert error(setup, solver, mn.MAML()) < 1e-12


def test_first_order_baselines_are_biased(setup):
    # The closed form is no gradient that every method would match.
    assert error(setup, NESTEROV, mn.FOMAML(), engine="inplace") > 0.1
    assert error(setup, NESTEROV, mn.IMAML(cg_steps=1), engine="inplace") > 0.01


@SOLVERS
def test_symmetric_nudges(setup, solver):
    engine = "inplace" if solver is NEWTON else "stacked"  # where each is quicker
    assert error(setup, solver, mn.FOBMAML(nu=1e-3), engine=engine) < 1e-5
    assert error(setup, solver, mn.FOBMAML(nu=1e-3, nudge="gradient"), engine=engine) < 1e-10


@STARTS
def test_every_start_leads_to_the_same_solution(setup, start):
    assert error(setup, NESTEROV, mn.FOBMAML(nu=1e-3, start=start), engine="inplace") < 1e-5


@STARTS
@STENCILS
def test_gradient_nudge_has_no_truncation_error(stencil, start):
    setup = quadratic(tasks=2, **TASKS["query of its own"])
    # φ_ν is linear in ν, so that any ν will do.
    estimator = mn.FOBMAML(nu=0.5, nudge="gradient", stencil=stencil, start=start)
    assert error(setup, NESTEROV, estimator, engine="inplace") < 1e-11


@STENCILS
def test_loss_nudge_is_its_stencil_of_nudged_solutions(setup, stencil):
    """At a large ν the estimate is −λ times the textbook difference of φ_ν = (Â + νA + λ)⁻¹(λθ − b̂
    − νb).
    """
    nu, theta = 0.1, setup.model.vector.detach()

    def phi(nu: float) -> torch.Tensor:
        rows = []
        for task in setup.tasks:
            (A_hat, b_hat), (A, b) = task.support, task.query
            system = A_hat[0] + nu * A[0] + LAM * torch.eye(20, dtype=torch.float64)
            rows.append(torch.linalg.solve(system, LAM * theta - b_hat[0] - nu * b[0]))
        return torch.stack(rows).mean(0)

    difference = {
        "forward": lambda: (phi(nu) - phi(0)) / nu,
        "symmetric": lambda: (phi(nu) - phi(-nu)) / (2 * nu),
        "five-point": lambda: (phi(-2 * nu) - 8 * phi(-nu) + 8 * phi(nu) - phi(2 * nu)) / (12 * nu),
    }[stencil]()
    gradient, stats = meta_gradient(
        setup, NEWTON, mn.FOBMAML(nu=nu, stencil=stencil), engine="inplace"
    )
    assert stats.nu == nu
    assert relative_error(gradient, -LAM * difference) < 1e-11


@NUDGES
@STARTS
@pytest.mark.parametrize("case", ["condition 100", "query of its own"])
def test_tangent(case, nudge, start):
    setup = quadratic(tasks=1, **TASKS[case])
    assert error(setup, NESTEROV, mn.FOBMAML(stencil="tangent", nudge=nudge, start=start)) < 1e-10


PER_PARAMETER = torch.logspace(-0.5, 0.5, 20, dtype=torch.float64)
STIFFNESSES = {
    "per tensor": (
        {"theta": 0.5, "rest": 3.0},
        torch.tensor([0.5] * 8 + [3.0] * 12, dtype=torch.float64),
    ),
    "per parameter": ({"theta": PER_PARAMETER[:8], "rest": PER_PARAMETER[8:]}, PER_PARAMETER),
}

SLOWER = mn.Nesterov(lr=0.24, steps=65)  # 0.24 ≈ 1/(L̂ + the largest λ)


@pytest.mark.parametrize(("lam", "expanded"), STIFFNESSES.values(), ids=STIFFNESSES)
@pytest.mark.parametrize(
    ("solver", "estimator", "tolerance"),
    [
        (NEWTON, mn.Exact(), 1e-12),
        (NEWTON, mn.IMAML(cg_steps=40), 1e-12),
        (SLOWER, mn.MAML(), 1e-8),
        (NEWTON, mn.FOBMAML(nu=1e-3), 1e-5),
        (SLOWER, mn.FOBMAML(nu=1e-3, start="shifted"), 1e-5),
        (NEWTON, mn.FOBMAML(nu=0.5, nudge="gradient"), 1e-11),
        (SLOWER, mn.FOBMAML(nu=0.5, nudge="gradient", start="shifted", stencil="five-point"), 1e-8),
        (SLOWER, mn.FOBMAML(stencil="tangent"), 1e-8),
        (SLOWER, mn.FOBMAML(stencil="tangent", nudge="gradient", start="shifted"), 1e-8),
    ],
    ids=lambda value: repr(value) if hasattr(value, "accumulate") else None,
)
def test_stiffness_per_tensor_and_per_parameter(lam, expanded, solver, estimator, tolerance):
    """∇F = Λ(Â + Λ)⁻¹∇f with a diagonal Λ."""
    setup = quadratic(100, tasks=1, same=False, split=8)
    gradient, _ = meta_gradient(setup, solver, estimator, lam=lam, engine=estimator.engines[-1])
    assert list(gradient) == ["theta", "rest"]
    assert relative_error(gradient, quadratic_meta_gradient(setup, expanded)) < tolerance


def test_closed_form_is_the_derivative_of_the_outer_objective():
    """The oracle itself, against central differences of F(θ) = f(φ*(θ)), which are exact for a
    quadratic F.
    """
    setup = quadratic(100, tasks=2, same=False, split=8)
    model, lam, step = setup.model, PER_PARAMETER, 1e-2

    def outer(theta: torch.Tensor) -> float:
        with torch.no_grad():
            model.theta.copy_(theta[:8])
            model.rest.copy_(theta[8:])
        values = [
            0.5 * phi @ task.query[0][0] @ phi + task.query[1][0] @ phi
            for task, phi in zip(setup.tasks, quadratic_solutions(setup, lam), strict=True)
        ]
        return float(sum(values)) / len(values)

    theta, closed_form = model.vector.detach().clone(), quadratic_meta_gradient(setup, lam)
    basis = torch.eye(20, dtype=torch.float64)
    difference = torch.tensor(
        [(outer(theta + step * e) - outer(theta - step * e)) / (2 * step) for e in basis],
        dtype=theta.dtype,
    )
    assert relative_error(difference, closed_form) < 1e-10


def test_error_of_es_maml_falls_as_one_over_the_root_of_the_samples():
    setup = quadratic(10, dim=20, tasks=1, same=False)
    # F(θ) = f(φ_K(θ)) for the K steps that are run, so its gradient is MAML's. It is quadratic: σ
    # adds no error.
    solver = mn.GradientDescent(lr=0.5, steps=2)
    truth, _ = meta_gradient(setup, solver, mn.MAML())
    counts, seeds = (4, 16, 64), range(10)
    root_mean_squares = []
    for samples in counts:
        estimators = [mn.ESMAML(sigma=0.1, samples=samples, seed=seed) for seed in seeds]
        gradients = [
            meta_gradient(setup, solver, estimator, engine="inplace")[0] for estimator in estimators
        ]
        squares = [relative_error(gradient, truth) ** 2 for gradient in gradients]
        root_mean_squares.append(math.sqrt(sum(squares) / len(squares)))
    assert log_slope(counts, root_mean_squares) == pytest.approx(-0.5, abs=0.1)
    # The estimate is the mean of n matrices εεᵀ times the gradient, whose variance is (d + 1)/n of
    # its square.
    assert root_mean_squares == pytest.approx(
        [math.sqrt((20 + 1) / samples) for samples in counts], rel=0.2
    )


def test_samples_of_es_maml_in_different_meta_steps_are_independent():
    """The mean over m meta-steps of one sample has the error of m samples in one."""
    setup, meta_steps, seeds = quadratic(10, dim=20, tasks=1, same=False), 16, range(10)
    solver = mn.GradientDescent(lr=0.5, steps=2)
    truth, _ = meta_gradient(setup, solver, mn.MAML())
    squares = []
    for seed in seeds:
        estimator = mn.ESMAML(sigma=0.1, samples=1, seed=seed)
        learner = mn.MetaLearner(
            setup.model, setup.loss, lam=LAM, solver=solver, estimator=estimator, engine="inplace"
        )
        gradients = [vector(learner.meta_gradient(setup.tasks)[0]) for _ in range(meta_steps)]
        squares.append(relative_error(torch.stack(gradients).mean(0), truth) ** 2)
    assert math.sqrt(sum(squares) / len(squares)) == pytest.approx(
        math.sqrt((20 + 1) / meta_steps), rel=0.2
    )
