"""FO-MAML, Reptile, iMAML and ES-MAML against their formulas, evaluated here with plain autograd at
a φ_K found by a plain loop.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

import metanudge as mn
from problems import Setup, conv_net, logistic_regression, mlp, quadratic, relative_error, vector

LAM, LR, STEPS = 2.0, 0.1, 4
GD = mn.GradientDescent(lr=LR, steps=STEPS)
ENGINES = pytest.mark.parametrize("engine", ["stacked", "inplace"])
WITH_OR_WITHOUT_TERM = pytest.mark.parametrize("lam", [LAM, 0.0])
MODELS = pytest.mark.parametrize("make", [mlp, conv_net], ids=["MLP", "conv net with BatchNorm"])

Parameters = dict[str, Tensor]


def meta_gradient(setup: Setup, estimator, solver=GD, *, lam=LAM, engine="stacked") -> Parameters:
    learner = mn.MetaLearner(
        setup.model, setup.loss, lam=lam, solver=solver, estimator=estimator, engine=engine
    )
    return learner.meta_gradient(setup.tasks, metrics=False)[0]


def parameters(setup: Setup) -> Parameters:
    return {name: p.detach().clone() for name, p in setup.model.named_parameters()}


def loss_at(setup: Setup, phi: Parameters, batch) -> Tensor:
    buffers = {name: buffer.clone() for name, buffer in setup.model.named_buffers()}
    return setup.loss(functional_call(setup.model, {**phi, **buffers}, (batch[0],)), batch[1])


def gradient_at(setup: Setup, phi: Parameters, batch) -> Parameters:
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in phi.items()}
    gradients = torch.autograd.grad(loss_at(setup, leaves, batch), list(leaves.values()))
    return dict(zip(leaves, gradients, strict=True))


def adapted(setup: Setup, theta: Parameters, batch, lam: float = LAM) -> Parameters:
    """φ_K by gradient descent."""
    phi = theta
    for _ in range(STEPS):
        g = gradient_at(setup, phi, batch)
        phi = {n: phi[n] - LR * (g[n] + lam * (phi[n] - theta[n])) for n in phi}
    return phi


def mean(rows: list[Parameters]) -> Parameters:
    return {name: torch.stack([row[name] for row in rows]).mean(0) for name in rows[0]}


@MODELS
@ENGINES
@WITH_OR_WITHOUT_TERM
def test_fomaml_is_the_query_gradient_at_the_adapted_parameters(lam, make, engine):
    setup = make()
    theta = parameters(setup)
    expected = mean(
        [
            gradient_at(setup, adapted(setup, theta, task.support, lam), task.query)
            for task in setup.tasks
        ]
    )
    found = meta_gradient(setup, mn.FOMAML(), lam=lam, engine=engine)
    assert relative_error(found, expected) < 1e-12


@pytest.mark.parametrize(
    ("estimator", "solver", "factor"),
    [
        (mn.Reptile(), GD, 1 / (STEPS * LR)),
        (
            mn.Reptile(),
            mn.TorchOptimizer(torch.optim.SGD, steps=STEPS, options={"lr": LR}),
            1 / (STEPS * LR),
        ),
        (mn.Reptile(scale=0.7), GD, 0.7),
    ],
    ids=["GD", "SGD of torch", "own scale"],
)
@ENGINES
@WITH_OR_WITHOUT_TERM
def test_reptile_is_the_scaled_way_back(lam, estimator, solver, factor, engine):
    """(θ − φ_K)/(Kα), paper, eq. 5."""
    setup = mlp()
    theta = parameters(setup)
    phis = mean([adapted(setup, theta, task.support, lam) for task in setup.tasks])
    expected = {n: factor * (theta[n] - phis[n]) for n in theta}
    found = meta_gradient(setup, estimator, solver, lam=lam, engine=engine)
    assert relative_error(found, expected) < 1e-12


def test_reptile_of_one_step_is_the_support_gradient():
    setup = mlp()
    expected = mean([gradient_at(setup, parameters(setup), task.support) for task in setup.tasks])
    assert (
        relative_error(
            meta_gradient(setup, mn.Reptile(), mn.GradientDescent(lr=0.3, steps=1)), expected
        )
        < 1e-12
    )


def test_reptile_needs_a_learning_rate():
    with pytest.raises(TypeError, match=r"NewtonCG has no learning rate.*Reptile\(scale="):
        meta_gradient(mlp(), mn.Reptile(), mn.NewtonCG())


def implicit_systems(setup: Setup, lam: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(∇²f̂ + Λ, ∇f) at φ_K of every task, the Hessian by one backward pass per row."""
    systems = []
    theta = parameters(setup)
    for task in setup.tasks:
        phi = {n: leaf.requires_grad_() for n, leaf in adapted(setup, theta, task.support).items()}
        g = torch.autograd.grad(
            loss_at(setup, phi, task.support), list(phi.values()), create_graph=True
        )
        flat = torch.cat([leaf.flatten() for leaf in g])
        rows = [torch.autograd.grad(entry, list(phi.values()), retain_graph=True) for entry in flat]
        hessian = torch.stack([torch.cat([leaf.flatten() for leaf in row]) for row in rows])
        systems.append((hessian + torch.diag(lam), vector(gradient_at(setup, phi, task.query))))
    return systems


@ENGINES
@pytest.mark.parametrize("make", [logistic_regression, mlp], ids=["logistic regression", "MLP"])
def test_imaml_and_exact_solve_the_implicit_system_at_the_point_reached(make, engine):
    """φ_K is far from converged; the formula is taken there, not at φ*."""
    setup = make(tasks=2)
    size = vector(parameters(setup)).numel()
    systems = implicit_systems(setup, torch.full((size,), LAM, dtype=torch.float64))
    expected = LAM * torch.stack([torch.linalg.solve(A, b) for A, b in systems]).mean(0)
    for estimator in [
        mn.IMAML(cg_steps=size),
        mn.IMAML(cg_steps=2 * size, tol=1e-13),
        *([mn.Exact()] if engine == "stacked" else []),
    ]:
        assert relative_error(meta_gradient(setup, estimator, engine=engine), expected) < 1e-11


@ENGINES
def test_damping_stiffens_the_linear_system_alone(engine):
    """λ (∇²f̂ + λ + damping)⁻¹∇f; the inner problem and the factor λ stay as they are."""
    setup, damping = mlp(tasks=2), 3.0
    size = vector(parameters(setup)).numel()
    systems = implicit_systems(setup, torch.full((size,), LAM, dtype=torch.float64))
    expected = LAM * torch.stack(
        [
            torch.linalg.solve(A + damping * torch.eye(size, dtype=torch.float64), b)
            for A, b in systems
        ]
    ).mean(0)
    assert (
        relative_error(
            meta_gradient(setup, mn.IMAML(cg_steps=size, damping=damping), engine=engine), expected
        )
        < 1e-11
    )


@pytest.mark.parametrize("cg_steps", [1, 2, 3])
def test_imaml_of_few_steps_is_the_best_in_the_krylov_space(cg_steps):
    """x_k minimises ½xᵀAx − bᵀx over span{b, Ab, …, A^(k−1)b}."""
    setup = mlp(tasks=2)
    size = vector(parameters(setup)).numel()
    expected = []
    for A, b in implicit_systems(setup, torch.full((size,), LAM, dtype=torch.float64)):
        krylov = [b]
        for _ in range(cg_steps - 1):
            krylov.append(A @ krylov[-1])
        basis = torch.linalg.qr(torch.stack(krylov, 1)).Q
        expected.append(LAM * basis @ torch.linalg.solve(basis.T @ A @ basis, basis.T @ b))
    assert (
        relative_error(
            meta_gradient(setup, mn.IMAML(cg_steps=cg_steps)), torch.stack(expected).mean(0)
        )
        < 1e-10
    )


def test_es_maml_is_the_antithetic_average_of_the_adapted_query_losses():
    """The perturbations are read off the points at which the model is evaluated first in every
    solve.
    """
    setup, sigma, samples = mlp(tasks=2), 0.05, 3
    theta = parameters(setup)
    seen: list[tuple[int, Tensor]] = []

    def watching(model, batch):
        seen.append((len(batch[1]), torch.cat([p.detach().flatten() for p in model.parameters()])))
        return setup.loss(model(batch[0]), batch[1])

    estimator = mn.ESMAML(sigma=sigma, samples=samples, seed=5)
    gradient = meta_gradient(Setup(setup.model, watching, setup.tasks), estimator, engine="inplace")

    # A solve is STEPS support evaluations and one query evaluation; each task takes 2·samples of
    # them.
    assert len(seen) == 2 * 2 * samples * (STEPS + 1)
    starts = [(place - vector(theta)) / sigma for _, place in seen[:: STEPS + 1]]
    assert {size for size, _ in seen[STEPS :: STEPS + 1]} == {setup.tasks[0].num_query}
    noise = torch.stack(starts).view(2, samples, 2, -1)  # task, sample, sign
    torch.testing.assert_close(noise[:, :, 0], -noise[:, :, 1], rtol=0, atol=1e-12)
    epsilon = noise[:, :, 0].flatten(0, 1)
    assert torch.linalg.matrix_rank(epsilon) == len(epsilon)  # every task and sample has its own
    assert 0.8 < float(epsilon.square().mean()) < 1.2

    total = torch.zeros_like(vector(theta))
    for task, directions in zip(setup.tasks, noise[:, :, 0], strict=True):
        for direction in directions:
            values = []
            for sign in (1, -1):
                moved = unflattened(vector(theta) + sign * sigma * direction, theta)
                values.append(loss_at(setup, adapted(setup, moved, task.support), task.query))
            total += (
                (values[0] - values[1]) / (2 * sigma) * direction / (samples * len(setup.tasks))
            )
    assert relative_error(gradient, total.detach()) < 1e-10
    assert relative_error(meta_gradient(setup, estimator, engine="stacked"), gradient) < 1e-10
    assert (
        relative_error(
            meta_gradient(setup, mn.ESMAML(sigma=sigma, samples=samples, seed=6)), gradient
        )
        > 0.1
    )


def test_es_maml_draws_anew_in_every_meta_step():
    setup = mlp(tasks=2)

    def learner() -> mn.MetaLearner:
        return mn.MetaLearner(
            setup.model, setup.loss, lam=LAM, solver=GD, estimator=mn.ESMAML(samples=2, seed=5)
        )

    one, another = learner(), learner()
    steps = [one.meta_gradient(setup.tasks)[0] for _ in range(3)]
    assert all(relative_error(a, b) > 0.1 for a, b in itertools.combinations(steps, 2))
    assert all(
        relative_error(another.meta_gradient(setup.tasks)[0], step) == 0 for step in steps
    ), "seeded all the same"
    given = [one.meta_gradient(setup.tasks, seed=7)[0] for _ in range(2)]
    assert relative_error(*given) == 0
    assert relative_error(given[0], steps[0]) > 0.1


def unflattened(flat: Tensor, like: Parameters) -> Parameters:
    pieces = flat.split([leaf.numel() for leaf in like.values()])
    return {n: piece.view_as(leaf) for (n, leaf), piece in zip(like.items(), pieces, strict=True)}


def flat_support(slope: float, curvature: float) -> Setup:
    """Support losses without curvature (constant, or linear with a slope), query losses quadratic
    or linear.
    """
    setup = quadratic(10, dim=6, tasks=2, same=False, split=2)
    (A_hat, b_hat), (A, b) = setup.tasks.stacks[0].support, setup.tasks.stacks[0].query
    tasks = mn.TaskBatch(support=(0 * A_hat, slope * b_hat), query=(curvature * A, b))
    return setup._replace(tasks=tasks)


def reached(solver, lam: Tensor, momentum: float) -> Tensor:
    """What K steps on λd + 1 = 0 reach of the solution d = −1/λ."""
    x = y = torch.zeros_like(lam)
    for _ in range(solver.steps):
        new = y - solver.lr * (lam * y + 1)
        x, y = new, new + momentum * (new - x)
    return x * -lam


LAMS = {
    "one λ": (0.7, torch.full((6,), 0.7, dtype=torch.float64)),
    "λ per parameter": (
        {
            "theta": torch.tensor([0.5, 1.0], dtype=torch.float64),
            "rest": torch.tensor([0.3, 2.0, 4.0, 0.8], dtype=torch.float64),
        },
        torch.tensor([0.5, 1.0, 0.3, 2.0, 4.0, 0.8], dtype=torch.float64),
    ),
}


@pytest.mark.parametrize(("lam", "stiffness"), LAMS.values(), ids=LAMS)
@pytest.mark.parametrize(
    "solver",
    [mn.GradientDescent(lr=0.15, steps=5), mn.Nesterov(lr=0.15, steps=5)],
    ids=["GD", "Nesterov"],
)
@pytest.mark.parametrize(
    ("nudge", "slope", "curvature"),
    [
        ("loss", 0.0, 0.0),  # φ_K = θ, and the pull ν∇f is the same everywhere
        ("gradient", 0.0, 1.0),
        ("gradient", 1.0, 1.0),  # the un-nudged solution moves; the true gradient is ∇f(φ_K)
    ],
    ids=["loss", "gradient, constant support loss", "gradient, linear support loss"],
)
@pytest.mark.parametrize("stencil", ["forward", "symmetric", "five-point", "tangent"])
def test_unconverged_nudges_shrink_by_a_known_factor_where_the_support_loss_is_flat(
    stencil, nudge, slope, curvature, solver, lam, stiffness
):
    setup = flat_support(slope, curvature)
    true = vector(meta_gradient(setup, mn.FOMAML(), solver, lam=lam))  # λ(0 + λ)⁻¹∇f(φ_K)
    root = math.sqrt(solver.lr * float(stiffness.min()))
    momentum = (1 - root) / (1 + root) if isinstance(solver, mn.Nesterov) else 0.0
    factor = reached(solver, stiffness, momentum)
    if isinstance(solver, mn.GradientDescent):
        torch.testing.assert_close(factor, 1 - (1 - solver.lr * stiffness) ** solver.steps)
    # momentum may also overshoot the stiffest parameters
    assert float((1 - factor).abs().max()) > 0.1
    for start in ("theta", "solution"):
        options = {
            "nu": None if stencil == "tangent" else 0.1,
            "stencil": stencil,
            "nudge": nudge,
            "start": start,
        }
        shrunk = meta_gradient(setup, mn.FOBMAML(**options), solver, lam=lam)
        assert relative_error(shrunk, factor * true) < 1e-12
        assert (
            relative_error(
                meta_gradient(setup, mn.FOBMAML(**options, unshrink=True), solver, lam=lam), true
            )
            < 1e-12
        )
    for unshrink in (False, True):  # starting at the shifted centre nothing is left to reach
        estimator = mn.FOBMAML(**{**options, "start": "shifted"}, unshrink=unshrink)
        assert relative_error(meta_gradient(setup, estimator, solver, lam=lam), true) < 1e-12


@pytest.mark.parametrize(("lam", "stiffness"), LAMS.values(), ids=LAMS)
def test_unshrunk_tangent_of_the_loss_nudge_is_exact_for_any_query_loss(lam, stiffness):
    """With a constant support loss φ stays at θ, so that even a curved query loss pulls with ∇f(θ)
    all the way.
    """
    setup = flat_support(slope=0.0, curvature=1.0)
    solver = mn.GradientDescent(lr=0.15, steps=5)
    true = vector(meta_gradient(setup, mn.FOMAML(), solver, lam=lam))
    factor = 1 - (1 - solver.lr * stiffness) ** solver.steps
    assert (
        relative_error(
            meta_gradient(setup, mn.FOBMAML(stencil="tangent"), solver, lam=lam), factor * true
        )
        < 1e-12
    )
    assert (
        relative_error(
            meta_gradient(setup, mn.FOBMAML(stencil="tangent", unshrink=True), solver, lam=lam),
            true,
        )
        < 1e-12
    )


def test_a_singular_system_is_named():
    """A support loss of curvature −λ: every φ solves the inner problem."""
    setup = quadratic()
    learner = mn.MetaLearner(
        setup.model,
        lambda model, batch: -0.5 * LAM * model.vector.square().sum() + 0 * batch[0].sum(),
        lam=LAM,
        solver=GD,
        estimator=mn.Exact(),
        engine="stacked",
    )
    with pytest.raises(torch.linalg.LinAlgError, match=r"task 0 is singular.*larger lam"):
        learner.meta_gradient(setup.tasks, metrics=False)
