"""MAML and the tangent of the K-step adaptation, against implementations written here with plain
autograd.

Nothing in `adapted` or `unrolled` uses `torch.func` transforms or the package: one task at a time,
`torch.autograd.grad`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

import metanudge as mn
from metanudge.engines.randomness import minibatch
from problems import Setup, conv_net, logistic_regression, mlp, relative_error, transformer, vector

LAM, LR = 2.0, 0.1
MODELS = {"MLP": mlp, "conv net with BatchNorm": conv_net, "Transformer": transformer}
ON_MODELS = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)

Parameters = dict[str, Tensor]


def loss_at(setup: Setup, phi: Parameters, batch) -> Tensor:
    x, y = batch
    buffers = {name: buffer.clone() for name, buffer in setup.model.named_buffers()}
    return setup.loss(functional_call(setup.model, {**phi, **buffers}, (x,)), y)


def adapted(
    setup: Setup, theta: Parameters, batches: list, *, truncate: int = 0, beta: float = 0.0
) -> Parameters:
    """φ_K by x⁺ = y − α(∇f̂(y) + λ(y − θ)), y⁺ = x⁺ + β(x⁺ − x), written on φ itself; β = 0 is
    gradient descent.

    There is one batch for each step. The graph is kept for the last `truncate` steps; before them φ
    − θ counts as a constant.
    """
    steps = len(batches)
    x = y = theta
    for step in range(steps + 1):
        if step == steps - truncate:
            x, y = ({n: theta[n] + (p[n] - theta[n]).detach() for n in theta} for p in (x, y))
        if step == steps:
            break
        differentiated = step >= steps - truncate
        at = y if differentiated else {n: leaf.detach().requires_grad_() for n, leaf in y.items()}
        g = torch.autograd.grad(
            loss_at(setup, at, batches[step]), list(at.values()), create_graph=differentiated
        )
        new = {
            n: y[n] - LR * (leaf + LAM * (y[n] - theta[n])) for n, leaf in zip(y, g, strict=True)
        }
        x, y = new, {n: new[n] + beta * (new[n] - x[n]) for n in new}
    return x


def unrolled(
    setup: Setup, *, steps: int, truncate: int | None = None, beta: float = 0.0, draw=None
) -> Parameters:
    """The mean of d f(φ_K(θ))/dθ over the tasks; `draw(task, step)` chooses the support examples of
    a step.
    """
    total = {name: torch.zeros_like(p) for name, p in setup.model.named_parameters()}
    truncate = steps if truncate is None else truncate
    # the only attention kernel on the CPU with second derivatives
    with sdpa_kernel(SDPBackend.MATH):
        for place, task in enumerate(setup.tasks):
            theta = {
                name: p.detach().clone().requires_grad_()
                for name, p in setup.model.named_parameters()
            }
            batches = [
                task.support if draw is None else [t[draw(place, step)] for t in task.support]
                for step in range(steps)
            ]
            phi = adapted(setup, theta, batches, truncate=truncate, beta=beta)
            gradient = torch.autograd.grad(loss_at(setup, phi, task.query), list(theta.values()))
            for name, leaf in zip(total, gradient, strict=True):
                total[name] += leaf / len(setup.tasks)
    return total


def meta_gradient(setup: Setup, estimator, solver, *, seed: int = 0) -> Parameters:
    learner = mn.MetaLearner(
        setup.model, setup.loss, lam=LAM, solver=solver, estimator=estimator, engine="stacked"
    )
    return learner.meta_gradient(setup.tasks, metrics=False, seed=seed)[0]


@ON_MODELS
@pytest.mark.parametrize("steps", [1, 5])
def test_maml_is_the_unrolled_gradient(make: Callable[[], Setup], steps: int):
    setup = make()
    gradient = meta_gradient(setup, mn.MAML(), mn.GradientDescent(lr=LR, steps=steps))
    expected = unrolled(setup, steps=steps)
    assert relative_error(gradient, expected) < 1e-12
    # Second derivatives matter here: the first-order gradient would not pass.
    assert relative_error(unrolled(setup, steps=steps, truncate=0), expected) > 1e-2


@pytest.mark.parametrize("make", [mlp, conv_net], ids=["MLP", "conv net with BatchNorm"])
@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("momentum", [None, 0.5])
def test_maml_through_nesterov(make: Callable[[], Setup], steps: int, momentum: float | None):
    setup, root = make(), (LR * LAM) ** 0.5
    beta = (1 - root) / (1 + root) if momentum is None else momentum
    gradient = meta_gradient(setup, mn.MAML(), mn.Nesterov(lr=LR, steps=steps, momentum=momentum))
    assert relative_error(gradient, unrolled(setup, steps=steps, beta=beta)) < 1e-12


@pytest.mark.parametrize("make", [mlp, conv_net], ids=["MLP", "conv net with BatchNorm"])
@pytest.mark.parametrize("beta", [0.0, 0.6], ids=["GD", "Nesterov"])
def test_truncated_maml(make: Callable[[], Setup], beta: float):
    setup, steps = make(), 3
    solver = (
        mn.Nesterov(lr=LR, steps=steps, momentum=beta)
        if beta
        else mn.GradientDescent(lr=LR, steps=steps)
    )
    gradients = [
        meta_gradient(setup, mn.MAML(truncate=truncate), solver) for truncate in range(steps + 1)
    ]
    for truncate, gradient in enumerate(gradients):
        assert (
            relative_error(gradient, unrolled(setup, steps=steps, truncate=truncate, beta=beta))
            < 1e-12
        )
    for fewer, more in itertools.pairwise(gradients):
        assert relative_error(fewer, more) > 1e-3
    assert relative_error(gradients[0], meta_gradient(setup, mn.FOMAML(), solver)) < 1e-13
    for whole in (mn.MAML(), mn.MAML(truncate=steps + 1)):
        assert relative_error(gradients[steps], meta_gradient(setup, whole, solver)) < 1e-15


@pytest.mark.parametrize("beta", [0.0, 0.6], ids=["GD", "Nesterov"])
def test_maml_on_minibatches(beta: float):
    setup, steps, seed = mlp(), 3, 11
    options = {"lr": LR, "steps": steps, "batch_size": 2}
    solver = mn.Nesterov(**options, momentum=beta) if beta else mn.GradientDescent(**options)

    def draw(place: int, step: int) -> Tensor:
        return minibatch(seed, place, step, size=6, batch_size=2)

    gradient = meta_gradient(setup, mn.MAML(), solver, seed=seed)
    assert relative_error(gradient, unrolled(setup, steps=steps, beta=beta, draw=draw)) < 1e-12
    assert relative_error(gradient, unrolled(setup, steps=steps, beta=beta)) > 1e-2
    first_order = [
        meta_gradient(setup, estimator, solver, seed=seed)
        for estimator in (mn.MAML(truncate=0), mn.FOMAML())
    ]
    assert relative_error(*first_order) < 1e-13


@pytest.mark.parametrize("training", [True, False], ids=["batch statistics", "running statistics"])
def test_maml_is_the_derivative_of_the_adapted_query_loss_with_batch_norm(training: bool):
    """Central differences of f(φ_K(θ)) along random directions, several tasks stacked.

    torch computes wrong second derivatives of `F.batch_norm` under grad(vmap(...)), a few per cent
    off; vmap(grad(...)) is right.
    """
    setup, steps, step_size = conv_net(tasks=3), 3, 1e-4
    setup.model.train(training)
    gradient = vector(meta_gradient(setup, mn.MAML(), mn.GradientDescent(lr=LR, steps=steps)))
    theta = {name: p.detach() for name, p in setup.model.named_parameters()}
    generator = torch.Generator().manual_seed(0)

    def outer(direction: Parameters, t: float) -> float:
        moved = {n: leaf + t * direction[n] for n, leaf in theta.items()}
        losses = [
            loss_at(setup, adapted(setup, moved, [task.support] * steps), task.query)
            for task in setup.tasks
        ]
        return float(sum(losses)) / len(losses)

    for _ in range(4):
        direction = {
            n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in theta.items()
        }
        difference = (
            8 * (outer(direction, step_size) - outer(direction, -step_size))
            - (outer(direction, 2 * step_size) - outer(direction, -2 * step_size))
        ) / (12 * step_size)
        assert float(gradient @ vector(direction)) == pytest.approx(difference, rel=1e-7, abs=1e-9)


@ON_MODELS
def test_one_shifted_tangent_step_with_the_gradient_nudge_is_maml(make: Callable[[], Setup]):
    """One step: φ = θ − α∇f̂(θ), whose Jacobian I − α∇²f̂ is symmetric."""
    setup, solver = make(), mn.GradientDescent(lr=LR, steps=1)
    tangent = meta_gradient(
        setup, mn.FOBMAML(stencil="tangent", nudge="gradient", start="shifted"), solver
    )
    assert relative_error(tangent, meta_gradient(setup, mn.MAML(), solver)) < 1e-12


@pytest.mark.parametrize(
    "make", [logistic_regression, mlp], ids=["logistic regression", "tanh MLP"]
)
@pytest.mark.parametrize("start", ["theta", "shifted", "solution"])
@pytest.mark.parametrize("nudge", ["loss", "gradient"])
@pytest.mark.parametrize(
    "solver",
    [
        mn.GradientDescent(lr=LR, steps=4),
        mn.Nesterov(lr=LR, steps=4),
        mn.GradientDescent(lr=LR, steps=4, batch_size=3),
    ],
    ids=["GD", "Nesterov", "minibatches"],
)
def test_tangent_is_the_limit_of_the_differences(
    make: Callable[[], Setup], nudge: str, start: str, solver
):
    """Few steps, far from converged: what is differentiated is the solver's path, not the
    solution.
    """
    setup = make(tasks=2)
    tangent = meta_gradient(setup, mn.FOBMAML(stencil="tangent", nudge=nudge, start=start), solver)
    for stencil, nu, tolerance in (
        ("five-point", 1e-3, 1e-10),
        ("symmetric", 1e-4, 1e-6),
        ("forward", 1e-6, 1e-4),
    ):
        difference = meta_gradient(
            setup, mn.FOBMAML(nu=nu, stencil=stencil, nudge=nudge, start=start), solver
        )
        assert relative_error(difference, tangent) < tolerance
