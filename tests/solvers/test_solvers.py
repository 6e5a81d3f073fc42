"""Every solver against closed forms, against each other, and against plain torch loops."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import metanudge as mn
from metanudge.engines import Cost, InplaceEngine, StackedEngine
from metanudge.params import flatten
from metanudge.problem import Objective, Problem
from metanudge.solvers import GradientDescent, Solution, Solver
from metanudge.solvers.base import join
from metanudge.solvers.conjugate_gradient import conjugate_gradient
from problems import Setup, log_slope, logistic_regression, mlp, quadratic, quadratic_solutions, relative_error

SGD, Adam, RMSprop = torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop
ENGINES = {"stacked": StackedEngine(), "inplace": InplaceEngine()}
ON_ENGINES = pytest.mark.parametrize("engine", ENGINES)


def solve(setup: Setup, solver: Solver, *, lam: float, engine: str = "stacked", seed: int = 0) -> Solution:
    """The un-nudged inner problem of every task, in order."""
    problem = Problem(Objective(setup.model, setup.loss), lam)
    with ENGINES[engine].session(problem, setup.tasks, width=1, seed=seed, cost=Cost()) as groups:
        return join([inner.solve(solver) for inner in groups])


def one_by_one(setup: Setup, solver: Solver, *, lam: float) -> Solution:
    return join([solve(setup._replace(tasks=mn.TaskBatch.of(task)), solver, lam=lam) for task in setup.tasks])


def inner_gradient_norms(setup: Setup, displacement: dict[str, Tensor], lam: float) -> Tensor:
    """‖∇f̂(φ) + λ(φ − θ)‖ of every task, by plain autograd on a copy of the model."""
    norms = []
    for row, task in enumerate(setup.tasks):
        model = copy.deepcopy(setup.model)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p += displacement[name][row]
        loss = Objective(model, setup.loss)(task.support)[0]
        gradients = dict(zip(displacement, torch.autograd.grad(loss, list(model.parameters())), strict=True))
        norms.append(torch.cat([(gradients[n] + lam * displacement[n][row]).flatten() for n in displacement]).norm())
    return torch.stack(norms)


# ---------------------------------------------------------------------------------------------- closed form

CONVERGING = {  # for curvatures in [λ + 0.01, λ + 1], λ = 0.1
    "GradientDescent": GradientDescent(lr=1.6, steps=250),
    "Nesterov": mn.Nesterov(lr=0.9, steps=140),
    "NewtonCG": mn.NewtonCG(steps=20, cg_steps=60, tol=1e-12),
    "LBFGS": mn.LBFGS(steps=100, tol=1e-12),
    "SGD with momentum": mn.TorchOptimizer(SGD, steps=200, options={"lr": 0.9, "momentum": 0.6, "nesterov": True}),
    "torch's L-BFGS": mn.TorchOptimizer(torch.optim.LBFGS, steps=10, options={"line_search_fn": "strong_wolfe", "tolerance_change": 0.0}),
}


@ON_ENGINES
@pytest.mark.parametrize("solver", CONVERGING.values(), ids=CONVERGING)
def test_solution_of_a_quadratic(solver, engine):
    setup = quadratic(100, tasks=2)
    reached = solve(setup, solver, lam=0.1, engine=engine).displacement["theta"] + setup.model.theta.detach()
    tolerance = 1e-6 if solver is CONVERGING["torch's L-BFGS"] else 1e-11  # its line search stalls at the rounding of g
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
    [(mn.NewtonCG(steps=50, tol=1e-11), True), (mn.LBFGS(tol=1e-11), True), (mn.NewtonCG(steps=1), False), (mn.LBFGS(steps=2), False)],
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
    assert float(torch.cos(theta - centers).min()) > 0.9  # curvature −3 cos + λ < 0 in every direction
    solution = solve(setup, solver, lam=lam)
    for d, center in zip(solution.displacement["theta"], centers, strict=True):
        before, after = (3 * torch.cos(theta + move - center).sum() + lam / 2 * move @ move for move in (0 * d, d))
        assert after < before - 1e-2
    if converges:
        assert float(inner_gradient_norms(setup, solution.displacement, lam).max()) < 2e-11


# ---------------------------------------------------------------------------------------------- stopping

STOPPING = {
    "GradientDescent": GradientDescent(lr=0.8, steps=500, tol=1e-5),
    "Nesterov": mn.Nesterov(lr=0.6, steps=500, tol=1e-5),
    "NewtonCG": mn.NewtonCG(steps=20, tol=1e-5),
    "LBFGS": mn.LBFGS(steps=100, tol=1e-5),
    "TorchOptimizer": mn.TorchOptimizer(SGD, steps=500, options={"lr": 0.5, "momentum": 0.3}, tol=1e-5),
}


def uneven() -> Setup:
    """Logistic regression on tasks whose inputs differ in size, so that some are solved much sooner than others."""
    setup = logistic_regression(tasks=4)
    (x, y), query = setup.tasks.stacks[0].support, setup.tasks.stacks[0].query
    scale = torch.tensor([0.02, 0.3, 1.0, 2.0], dtype=torch.float64)[:, None, None]
    return setup._replace(tasks=mn.TaskBatch(support=(x * scale, y), query=query))


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


# ---------------------------------------------------------------------------------------------- what they report


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
    torch.testing.assert_close(solution.residual, inner_gradient_norms(setup, solution.displacement, lam), rtol=1e-5, atol=1e-13)


@pytest.mark.parametrize("make", [GradientDescent, mn.Nesterov])
def test_residual_of_fixed_length_belongs_to_the_last_gradient(make):
    """One step less, and its point is where the last gradient of the longer solve was taken (for Nesterov, from rest)."""
    setup, lam = logistic_regression(), 0.3
    longer = solve(setup, make(lr=0.5, steps=1), lam=lam)
    zero = {n: torch.zeros_like(d) for n, d in longer.displacement.items()}
    torch.testing.assert_close(longer.residual, inner_gradient_norms(setup, zero, lam))
    if make is GradientDescent:
        shorter = solve(setup, make(lr=0.5, steps=4), lam=lam)
        longer = solve(setup, make(lr=0.5, steps=5), lam=lam)
        torch.testing.assert_close(longer.residual, inner_gradient_norms(setup, shorter.displacement, lam))
        assert longer.residuals.shape == longer.losses.shape == (5, 3)


# ---------------------------------------------------------------------------------------------- rates


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
    eigenvalues = torch.cat([torch.zeros(1), torch.rand(28, generator=generator), torch.ones(1)]).double()
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


# ---------------------------------------------------------------------------------------------- minibatches


def draws(estimator, *, seed: int | None, batch_size: int = 3, calls: int = 1) -> list[list[list[int]]]:
    """Indices of the support examples of every evaluation, by task; in-place engine, 8 examples, 4 steps a solve."""
    model, loss, tasks = mlp(tasks=2, support=8, query=9)
    seen: list[Tensor] = []

    def watching(model, batch):
        if len(batch[1]) < 9:
            seen.append(batch[0])
        return loss(model(batch[0]), batch[1])

    solver = GradientDescent(lr=0.1, steps=4, batch_size=batch_size)
    learner = mn.MetaLearner(model, watching, solver=solver, estimator=estimator, engine="inplace")
    for _ in range(calls):
        learner.meta_gradient(tasks, metrics=False, seed=seed)
    support = tasks.stacks[0].support[0]
    indices: list[list[list[int]]] = [[], []]
    for x in seen:
        match = (support[:, :, None] == x[None, None]).all(-1).nonzero()  # (task, example, place in the batch)
        (task,) = set(match[:, 0].tolist())
        indices[task].append([int(i) for i in match[match[:, 2].argsort(), 1]])
    return indices


@pytest.mark.parametrize("nudge", ["loss", "gradient"])
def test_all_solves_of_a_stencil_see_the_same_minibatches(nudge):
    solves = 2 if nudge == "loss" else 3
    for task in draws(mn.FOBMAML(nudge=nudge), seed=7):
        assert len(task) == solves * 4
        for solve_ in range(1, solves):
            assert task[4 * solve_ : 4 * solve_ + 4] == task[:4]


def test_minibatches_depend_on_seed_task_and_step():
    first, second = draws(mn.FOMAML(), seed=7)
    assert first != second
    assert len({tuple(batch) for batch in first}) == 4
    assert all(len(batch) == 3 == len(set(batch)) for batch in first + second)  # no example twice
    assert draws(mn.FOMAML(), seed=7) == [first, second]
    assert draws(mn.FOMAML(), seed=8) != [first, second]
    in_turn = draws(mn.FOMAML(), seed=None, calls=2)
    assert in_turn[0][:4] != in_turn[0][4:]  # the learner's own seeds move on
    assert {i for seed in range(20) for batch in draws(mn.FOMAML(), seed=seed)[0] for i in batch} == set(range(8))


def test_minibatches_are_the_same_on_both_engines():
    setup = mlp(support=8)
    for solver in (
        GradientDescent(lr=0.1, steps=4, batch_size=3),
        mn.Nesterov(lr=0.1, steps=4, batch_size=3),
        mn.TorchOptimizer(Adam, steps=4, options={"lr": 0.1}, batch_size=3),
    ):
        a, b = (flatten(solve(setup, solver, lam=1.0, engine=engine, seed=3).displacement) for engine in ENGINES)
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
        whole = flatten(solve(setup, dataclasses.replace(solver, batch_size=None), lam=1.0, seed=3).displacement)
        assert relative_error(a, whole) > 1e-2
        too_large = flatten(solve(setup, dataclasses.replace(solver, batch_size=8), lam=1.0, seed=3).displacement)
        torch.testing.assert_close(too_large, whole, rtol=0, atol=0)


# ---------------------------------------------------------------------------------------------- any torch optimizer


@ON_ENGINES
@pytest.mark.parametrize("batch_size", [None, 3])
def test_sgd_is_gradient_descent(engine, batch_size):
    setup = mlp()
    sgd = mn.TorchOptimizer(SGD, steps=5, options={"lr": 0.1}, batch_size=batch_size)
    plain = GradientDescent(lr=0.1, steps=5, batch_size=batch_size)
    a, b = (solve(setup, solver, lam=2.0, engine=engine) for solver in (sgd, plain))
    torch.testing.assert_close(flatten(a.displacement), flatten(b.displacement), rtol=0, atol=1e-14)
    torch.testing.assert_close(a.residuals, b.residuals)
    assert a.steps.tolist() == b.steps.tolist() == [5] * 3


def test_weight_decay_of_the_optimizer_pulls_towards_theta():
    decayed = mn.TorchOptimizer(SGD, steps=5, options={"lr": 0.1, "weight_decay": 0.5})
    a = solve(mlp(), decayed, lam=1.5).displacement
    b = solve(mlp(), GradientDescent(lr=0.1, steps=5), lam=2.0).displacement
    torch.testing.assert_close(flatten(a), flatten(b), rtol=0, atol=1e-14)


def test_every_task_has_an_optimizer_of_its_own():
    """Steps of NormalizedGD depend on the norm of the whole gradient: of one task's, not of all."""
    solver = mn.TorchOptimizer(mn.optim.NormalizedGD, steps=3, options={"lr": 0.1})
    together, apart = solve(uneven(), solver, lam=1.0), one_by_one(uneven(), solver, lam=1.0)
    torch.testing.assert_close(flatten(together.displacement), flatten(apart.displacement), rtol=0, atol=1e-13)


@pytest.mark.parametrize("optimizer", [Adam, torch.optim.LBFGS], ids=["Adam", "L-BFGS"])
def test_a_function_may_build_the_optimizer(optimizer):
    options = {"lr": 0.05}
    by_class = mn.TorchOptimizer(optimizer, steps=2, options=options)
    by_function = mn.TorchOptimizer(lambda parameters: optimizer(parameters, **options), steps=2)
    a, b = (solve(mlp(), solver, lam=1.5) for solver in (by_class, by_function))
    torch.testing.assert_close(flatten(a.displacement), flatten(b.displacement), rtol=0, atol=0)


OPTIMIZERS = {
    "SGD with momentum": (SGD, {"lr": 0.05, "momentum": 0.9}),
    "Adam": (Adam, {"lr": 0.03}),
    "RMSprop": (RMSprop, {"lr": 0.01}),
    "L-BFGS": (torch.optim.LBFGS, {"lr": 0.5, "max_iter": 3}),
    "L-BFGS with line search": (torch.optim.LBFGS, {"max_iter": 3, "line_search_fn": "strong_wolfe"}),
}


@ON_ENGINES
@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_torch_optimizers_do_what_a_plain_loop_does(optimizer, options, engine):
    setup, lam, steps = mlp(), 1.5, 4
    solution = solve(setup, mn.TorchOptimizer(optimizer, steps=steps, options=options), lam=lam, engine=engine)
    theta = [p.detach().clone() for p in setup.model.parameters()]
    for row, task in enumerate(setup.tasks):
        module = copy.deepcopy(setup.model)
        plain = optimizer(module.parameters(), **options)

        def closure(module=module, plain=plain, task=task):
            plain.zero_grad()
            x, y = task.support
            pull = sum(((p - t) ** 2).sum() for p, t in zip(module.parameters(), theta, strict=True))
            value = setup.loss(module(x), y) + lam / 2 * pull
            value.backward()
            return value

        for _ in range(steps):
            plain.step(closure)
        for (name, p), t in zip(module.named_parameters(), theta, strict=True):
            torch.testing.assert_close(solution.displacement[name][row], p.detach() - t, rtol=0, atol=1e-12)


# ---------------------------------------------------------------------------------------------- conjugate gradient


def linear_systems() -> tuple[Tensor, Tensor]:
    """Four systems of ten unknowns: the identity, three distinct eigenvalues, ten of them, and one without a right-hand side."""
    generator = torch.Generator().manual_seed(3)
    rotation = torch.linalg.qr(torch.randn(4, 10, 10, generator=generator, dtype=torch.float64)).Q
    few = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64).repeat(4)[:10]
    many = torch.linspace(0.5, 10, 10, dtype=torch.float64)
    A = (rotation * torch.stack([torch.ones_like(few), few, many, many])[:, None]) @ rotation.mT
    b = torch.randn(4, 10, generator=generator, dtype=torch.float64)
    b[3] = 0
    return A, b


def cut(matrix: Tensor) -> dict[str, Tensor]:
    """Vectors of ten as a dict of two leaves of different shapes."""
    return {"matrix": matrix[:, :6].reshape(-1, 2, 3), "vector": matrix[:, 6:]}


def product_with(A: Tensor):
    return lambda v: cut((A @ flatten(v).unsqueeze(-1)).squeeze(-1))


def test_conjugate_gradient_solves_row_by_row():
    A, b = linear_systems()
    exact = torch.linalg.solve(A, b)
    for steps, solved in ((1, [0, 3]), (3, [0, 1, 3]), (10, [0, 1, 2, 3]), (40, [0, 1, 2, 3])):
        result = conjugate_gradient(product_with(A), cut(b), steps=steps)
        x = flatten(result.x)
        errors = (x - exact).norm(dim=1)
        assert [row for row in range(4) if errors[row] < 1e-10] == solved
        assert not result.indefinite.any()
        assert result.products == steps
        true_residual = (b - (A @ x.unsqueeze(-1)).squeeze(-1)).norm(dim=1)
        torch.testing.assert_close(result.residual, true_residual, rtol=1e-8, atol=1e-12)


def test_conjugate_gradient_stops_when_the_slowest_row_is_done():
    A, b = linear_systems()
    result = conjugate_gradient(product_with(A), cut(b), steps=40, tol=1e-9)
    assert result.products == 10
    assert (result.residual <= 1e-9 * b.norm(dim=1)).all()
    assert conjugate_gradient(product_with(A[:2]), cut(b[:2]), steps=40, tol=1e-9).products == 3
    alone = [conjugate_gradient(product_with(A[r : r + 1]), cut(b[r : r + 1]), steps=40, tol=1e-9) for r in range(4)]
    assert [one.products for one in alone] == [1, 3, 10, 0]
    torch.testing.assert_close(flatten(result.x), torch.cat([flatten(one.x) for one in alone]), rtol=0, atol=1e-14)


def test_conjugate_gradient_flags_indefinite_rows_and_solves_the_others():
    A, b = linear_systems()
    bad = A.clone()
    bad[0] = -A[0]  # negative at the first direction
    values, vectors = torch.linalg.eigh(A[2])
    values[0] = -0.5  # negative in one direction among ten
    bad[2] = (vectors * values) @ vectors.T
    result = conjugate_gradient(product_with(bad), cut(b), steps=40, tol=1e-12)
    x = flatten(result.x)
    assert result.indefinite.tolist() == [True, False, True, False]
    assert torch.isfinite(x).all()
    assert torch.isfinite(result.residual).all()
    assert (x[0] == 0).all()  # what it had
    assert b[2] @ x[2] > 0  # still downhill
    torch.testing.assert_close(x[1], torch.linalg.solve(A[1], b[1]), rtol=0, atol=1e-10)
