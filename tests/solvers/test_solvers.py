"""Every solver against closed forms, against each other, and in what it reports."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import metanudge as mn
from metanudge.engines import Cost, StackedEngine
from metanudge.objective import Objective
from metanudge.params import flatten
from metanudge.problem import Problem
from metanudge.solvers import GradientDescent
from problems import (
    Setup,
    log_slope,
    logistic_regression,
    quadratic,
    quadratic_solutions,
    relative_error,
)
from solves import ENGINES, one_by_one, solve, uneven

SGD = torch.optim.SGD


def inner_gradient_norms(setup: Setup, displacement: dict[str, Tensor], lam: float) -> Tensor:
    """‖∇f̂(φ) + λ(φ − θ)‖ of every task, by plain autograd on a copy of the model."""
    norms = []
    for row, task in enumerate(setup.tasks):
        model = copy.deepcopy(setup.model)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p += displacement[name][row]
        loss = Objective(model, setup.loss)(task.support)[0]
        gradients = dict(
            zip(displacement, torch.autograd.grad(loss, list(model.parameters())), strict=True)
        )
        norms.append(
            torch.cat(
                [(gradients[n] + lam * displacement[n][row]).flatten() for n in displacement]
            ).norm()
        )
    return torch.stack(norms)


# -------------------------------------------------------------------------------------- closed form

CONVERGING = {  # for curvatures in [λ + 0.01, λ + 1], λ = 0.1
    "GradientDescent": GradientDescent(lr=1.6, steps=250),
    "Nesterov": mn.Nesterov(lr=0.9, steps=140),
    "NewtonCG": mn.NewtonCG(steps=20, cg_steps=60, tol=1e-12),
    "LBFGS": mn.LBFGS(steps=100, tol=1e-12),
    "SGD with momentum": mn.TorchOptimizer(
        SGD, steps=200, options={"lr": 0.9, "momentum": 0.6, "nesterov": True}
    ),
    "torch's L-BFGS": mn.TorchOptimizer(
        torch.optim.LBFGS,
        steps=10,
        options={"line_search_fn": "strong_wolfe", "tolerance_change": 0.0},
    ),
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("solver", CONVERGING.values(), ids=CONVERGING)
def test_solution_of_a_quadratic(solver, engine):
    setup = quadratic(100, tasks=2)
    reached = (
        solve(setup, solver, lam=0.1, engine=engine).displacement["theta"]
        + setup.model.theta.detach()
    )
    # its line search stalls at the rounding of g
    tolerance = 1e-6 if solver is CONVERGING["torch's L-BFGS"] else 1e-11
    assert relative_error(reached, quadratic_solutions(setup, 0.1)) < tolerance


def test_lbfgs_reaches_high_precision_on_a_badly_conditioned_quadratic():
    setup = quadratic(100, tasks=3)
    solution = solve(setup, mn.LBFGS(tol=1e-10), lam=1e-3, engine="inplace")  # condition number 92
    assert float(solution.residual.max()) <= 1e-10
    assert float(inner_gradient_norms(setup, solution.displacement, 1e-3).max()) <= 1.01e-10
    reached = solution.displacement["theta"] + setup.model.theta.detach()
    assert float((reached - quadratic_solutions(setup, 1e-3)).norm(dim=1).max()) < 1e-10 / 0.011


def test_solvers_agree_on_logistic_regression():
    setup, lam = logistic_regression(), 0.3
    solvers = [
        mn.NewtonCG(tol=1e-12),
        mn.LBFGS(tol=1e-12),
        GradientDescent(lr=0.8, steps=2000, tol=1e-12),
        mn.Nesterov(lr=0.6, steps=2000, tol=1e-12),
    ]
    newton, *others = [solve(setup, solver, lam=lam) for solver in solvers]
    assert float(inner_gradient_norms(setup, newton.displacement, lam).max()) < 2e-12
    for solution in others:
        distances = (flatten(solution.displacement) - flatten(newton.displacement)).norm(dim=1)
        assert float(distances.max()) < 2 * 2e-12 / lam


@pytest.mark.parametrize(
    ("solver", "converges"),
    [
        (mn.NewtonCG(steps=50, tol=1e-11), True),
        (mn.LBFGS(tol=1e-11), True),
        (mn.NewtonCG(steps=1), False),
        (mn.LBFGS(steps=2), False),
    ],
    ids=["NewtonCG", "LBFGS", "NewtonCG, one step", "LBFGS, two steps"],
)
def test_second_order_solvers_go_downhill_where_the_hessian_is_indefinite(solver, converges):
    """f̂ = 3 Σ cos(φ − c) from near its top: the gradient has to grow before it can vanish."""

    def loss(model, batch):
        return 3 * torch.cos(model.theta - batch[1].mean(0)).sum()

    setup, lam = quadratic(10, dim=6, tasks=2), 0.2
    theta = setup.model.theta.detach()
    centers = theta + 0.1 * setup.tasks.stacks[0].support[1]  # (tasks, 1, dim)
    data = (setup.tasks.stacks[0].support[0], centers)
    setup = Setup(setup.model, loss, mn.TaskBatch(support=data, query=data))
    # curvature −3 cos + λ < 0 in every direction
    assert float(torch.cos(theta - centers).min()) > 0.9
    solution = solve(setup, solver, lam=lam)
    for d, center in zip(solution.displacement["theta"], centers, strict=True):
        before, after = (
            3 * torch.cos(theta + move - center).sum() + lam / 2 * move @ move
            for move in (0 * d, d)
        )
        assert after < before - 1e-2
    if converges:
        assert float(inner_gradient_norms(setup, solution.displacement, lam).max()) < 2e-11


# ----------------------------------------------------------------------------------------- stopping

STOPPING = {
    "GradientDescent": GradientDescent(lr=0.8, steps=500, tol=1e-5),
    "Nesterov": mn.Nesterov(lr=0.6, steps=500, tol=1e-5),
    "NewtonCG": mn.NewtonCG(steps=20, tol=1e-5),
    "LBFGS": mn.LBFGS(steps=100, tol=1e-5),
    "TorchOptimizer": mn.TorchOptimizer(
        SGD, steps=500, options={"lr": 0.5, "momentum": 0.3}, tol=1e-5
    ),
}


@pytest.mark.parametrize("solver", STOPPING.values(), ids=STOPPING)
def test_rows_stop_independently(solver):
    setup, lam = uneven(), 0.3
    together, apart = solve(setup, solver, lam=lam), one_by_one(setup, solver, lam=lam)
    assert together.steps.tolist() == apart.steps.tolist()
    assert len(set(together.steps.tolist())) > 1
    assert int(together.steps.max()) < solver.steps
    for name, d in together.displacement.items():
        torch.testing.assert_close(d, apart.displacement[name], rtol=0, atol=1e-12)
    torch.testing.assert_close(together.residual, apart.residual, rtol=1e-6, atol=1e-12)
    assert float(together.residual.max()) <= 1e-5


@pytest.mark.parametrize("name", STOPPING)
@pytest.mark.parametrize("steps", [1, 3])
def test_no_more_than_the_given_steps_are_taken(name, steps):
    solver = dataclasses.replace(STOPPING[name], steps=steps, tol=1e-14)
    solution = solve(logistic_regression(), solver, lam=0.3)
    assert solution.steps.tolist() == [steps] * 3


@pytest.mark.parametrize("solver", STOPPING.values(), ids=STOPPING)
def test_a_solve_that_starts_at_the_solution_stays_there(solver):
    setup = logistic_regression(tasks=2)
    problem = Problem(Objective(setup.model, setup.loss), 0.3)
    with StackedEngine().session(problem, setup.tasks, width=1, seed=0, cost=Cost()) as groups:
        inner = next(iter(groups))
        exact = inner.solve(mn.NewtonCG(tol=1e-12)).displacement
        again = inner.solve(solver, start={n: d.clone() for n, d in exact.items()})
    assert again.steps.tolist() == [0, 0]
    for name, d in exact.items():
        torch.testing.assert_close(again.displacement[name], d, rtol=0, atol=0)


# --------------------------------------------------------------------------------- what they report


@pytest.mark.parametrize(
    "solver",
    [
        *(GradientDescent(lr=0.9, steps=k) for k in (1, 5, 30)),
        *(mn.Nesterov(lr=0.9, steps=k) for k in (5, 30)),
        mn.TorchOptimizer(SGD, steps=10, options={"lr": 0.5}),
        mn.NewtonCG(steps=2, cg_steps=3),
        mn.NewtonCG(tol=1e-6),
        mn.LBFGS(tol=1e-6),
    ],
    ids=repr,
)
def test_delta_bounds_the_distance_to_the_solution(solver):
    setup, lam = quadratic(100, tasks=3), 0.1
    solution = solve(setup, solver, lam=lam)
    phi = solution.displacement["theta"] + setup.model.theta.detach()
    distance = (phi - quadratic_solutions(setup, lam)).norm(dim=1)
    assert (solution.delta >= distance).all()
    torch.testing.assert_close(solution.delta, solution.residual / lam)


@pytest.mark.parametrize(
    "solver",
    [
        mn.NewtonCG(tol=1e-6),
        mn.NewtonCG(steps=2, tol=1e-12),
        mn.LBFGS(tol=1e-6),
        mn.LBFGS(steps=3, tol=1e-12),
        mn.TorchOptimizer(torch.optim.LBFGS, steps=2, options={"max_iter": 3}),
    ],
    ids=repr,
)
def test_residual_belongs_to_the_point_returned(solver):
    setup, lam = logistic_regression(), 0.3
    solution = solve(setup, solver, lam=lam)
    torch.testing.assert_close(
        solution.residual,
        inner_gradient_norms(setup, solution.displacement, lam),
        rtol=1e-5,
        atol=1e-13,
    )


@pytest.mark.parametrize("make", [GradientDescent, mn.Nesterov])
def test_residual_of_fixed_length_belongs_to_the_last_gradient(make):
    """One step less, and its point is where the last gradient of the longer solve was taken (for
    Nesterov, from rest).
    """
    setup, lam = logistic_regression(), 0.3
    longer = solve(setup, make(lr=0.5, steps=1), lam=lam)
    zero = {n: torch.zeros_like(d) for n, d in longer.displacement.items()}
    torch.testing.assert_close(longer.residual, inner_gradient_norms(setup, zero, lam))
    if make is GradientDescent:
        shorter = solve(setup, make(lr=0.5, steps=4), lam=lam)
        longer = solve(setup, make(lr=0.5, steps=5), lam=lam)
        torch.testing.assert_close(
            longer.residual, inner_gradient_norms(setup, shorter.displacement, lam)
        )
        assert longer.residuals.shape == longer.losses.shape == (5, 3)


# -------------------------------------------------------------------------------------------- rates


@dataclass(frozen=True)
class DenseOracle:
    """½ dᵀAd + bᵀd + λ/2 ‖d‖² as a solver sees it."""

    A: Tensor  # (rows, n, n)
    b: Tensor  # (rows, n)
    lam: float

    @property
    def rows(self) -> int:
        return len(self.b)

    @property
    def strong_convexity(self) -> float:
        return self.lam

    def zeros(self) -> dict[str, Tensor]:
        return {"d": torch.zeros_like(self.b)}

    def gradient(self, d, step=0, batch_size=None):
        product = (self.A @ d["d"].unsqueeze(-1)).squeeze(-1)
        loss = (0.5 * product + self.b).mul(d["d"]).sum(1)
        return loss, {"d": product + self.b + self.lam * d["d"]}


def test_nesterov_needs_the_root_of_the_steps_of_gradient_descent():
    """About κ log(1/ε) steps against √κ log(1/ε) (paper, Table 1)."""
    generator = torch.Generator().manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(1, 30, 30, generator=generator, dtype=torch.float64)).Q
    eigenvalues = torch.cat(
        [torch.zeros(1), torch.rand(28, generator=generator), torch.ones(1)]
    ).double()
    A = (rotation * eigenvalues) @ rotation.mT
    b = rotation.sum(2)  # every eigenvector with weight one: the slowest is there
    kappas = (20, 60, 180, 540)
    steps: dict[type, list[int]] = {GradientDescent: [], mn.Nesterov: []}
    for kappa in kappas:
        lam = 1 / (kappa - 1)
        for make, taken in steps.items():
            solution = make(lr=1 / (1 + lam), steps=100_000, tol=1e-3).solve(DenseOracle(A, b, lam))
            taken.append(int(solution.steps))
    assert log_slope(kappas, steps[GradientDescent]) == pytest.approx(1, abs=0.05)
    assert log_slope(kappas, steps[mn.Nesterov]) == pytest.approx(0.5, abs=0.1)
