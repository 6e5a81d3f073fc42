"""MAML one step at a time, the last one first, against autograd through the whole adaptation.

Nothing in `unrolled` uses the package: one task at a time, `torch.autograd.grad` through a loop of
plain tensor operations.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import conformance
import metanudge as mn
from metanudge.engines.randomness import minibatch
from problems import Setup, conv_net, mlp, relative_error, transformer
from walks import (
    LAM,
    LR,
    MODELS,
    ON_PRODUCTS,
    PRODUCTS,
    Parameters,
    engines,
    loss_at,
    quadratic_force,
    reversed_gradient,
)


def unrolled(
    setup: Setup,
    force: Callable[[Parameters, Parameters], Parameters],
    *,
    steps: int,
    beta: Callable[[], Any] = lambda: 0.0,
    also: Parameters | None = None,
    shared: tuple[str, ...] = (),
    draw: Callable[[int, int], Tensor] | None = None,
) -> Parameters:
    """The mean of d f(φ_K)/dh over the tasks for h = θ and, of the same graph, `also`; x⁺ = y −
    α(∇f̂(y) + force), y⁺ = x⁺ + β(x⁺ − x).
    """
    also = {} if also is None else also
    names = [*dict(setup.model.named_parameters()), *also]
    total = {n: torch.zeros(()) for n in names}
    # the only attention kernel on the CPU with second derivatives
    with sdpa_kernel(SDPBackend.MATH):
        for place, task in enumerate(setup.tasks):
            h = {n: p.detach().clone().requires_grad_() for n, p in setup.model.named_parameters()}
            theta = {n: p for n, p in h.items() if n not in shared}
            fixed = {n: h[n] for n in shared}
            x = y = theta
            share = beta()
            for step in range(steps):
                batch = (
                    task.support if draw is None else [t[draw(place, step)] for t in task.support]
                )
                g = torch.autograd.grad(
                    loss_at(setup, {**y, **fixed}, batch), list(y.values()), create_graph=True
                )
                pull = force(y, theta)
                new = {n: y[n] - LR * (leaf + pull[n]) for n, leaf in zip(y, g, strict=True)}
                x, y = new, {n: new[n] + share * (new[n] - x[n]) for n in new}
            outer = loss_at(setup, {**x, **fixed}, task.query)
            found = torch.autograd.grad(
                outer, [*h.values(), *also.values()], materialize_grads=True
            )
            for name, leaf in zip(names, found, strict=True):
                total[name] = total[name] + leaf / len(setup.tasks)
    return total


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("lam", LAM)
@pytest.mark.parametrize("momentum", [None, 0.5], ids=["GD", "Nesterov"])
@pytest.mark.parametrize("steps", [1, 5, 20])
def test_steps_walked_back_are_the_unrolled_gradient(
    steps: int, momentum: float | None, lam: str, model: str
):
    setup = MODELS[model](tasks=2)
    stiffness = LAM[lam](setup.model)
    solver: Any = mn.GradientDescent(lr=LR, steps=steps)
    if momentum is not None:
        solver = mn.Nesterov(lr=LR, steps=steps, momentum=momentum)
    expected = unrolled(
        setup, quadratic_force(stiffness), steps=steps, beta=lambda: momentum or 0.0
    )
    for (estimator, tolerance), engine in itertools.product(PRODUCTS.values(), engines(model)):
        gradient, _ = reversed_gradient(setup, estimator, solver, engine, lam=stiffness)
        error = relative_error(gradient, expected)
        assert error < tolerance, f"{estimator.products}, {engine}"
    first_order, _ = reversed_gradient(setup, mn.FOMAML(), solver, "inplace", lam=stiffness)
    assert relative_error(first_order, expected) > 1e-2


# ------------------------------------------------------------------------ what else is learned, too

SOLVERS = {
    "GD": lambda steps: mn.GradientDescent(lr=LR, steps=steps),
    "Nesterov": lambda steps: mn.Nesterov(lr=LR, steps=steps),
}
ON_ENGINES = pytest.mark.parametrize("engine", ["inplace", "stacked"])
ON_SOLVERS = pytest.mark.parametrize("solver", SOLVERS)


def momentum(solver: str, mu: Tensor) -> Tensor:
    root = (LR * mu).sqrt()
    return (1 - root) / (1 + root) if solver == "Nesterov" else torch.zeros_like(mu)


@ON_PRODUCTS
@ON_ENGINES
@ON_SOLVERS
@pytest.mark.parametrize("per", ["scalar", "tensor", "parameter"])
def test_a_learned_stiffness(
    estimator: mn.MAML, tolerance: float, per: str, solver: str, engine: str
):
    """Nesterov's momentum is made from the smallest λ, so that it is learned through that, too."""
    setup, steps = mlp(tasks=2), 4
    shapes = {n: p.shape for n, p in setup.model.named_parameters()}
    each: Any = {
        n: 0.5 + 0.1 * place if per == "tensor" else torch.full(shape, 0.5 + 0.1 * place).double()
        for place, (n, shape) in enumerate(shapes.items())
    }
    lam = 1.5 if per == "scalar" else each
    gradient, _ = reversed_gradient(
        setup, estimator, SOLVERS[solver](steps), engine, lam=lam, learn_lam=per
    )

    start = {"all": 1.5} if per == "scalar" else each
    rho = {
        f"log_lam.{n}": torch.as_tensor(value, dtype=torch.float64).log().requires_grad_()
        for n, value in start.items()
    }

    def stiffness(name: str) -> Tensor:
        return rho["log_lam.all" if per == "scalar" else f"log_lam.{name}"].exp()

    def smallest() -> Tensor:
        return torch.stack([stiffness(n).min() for n in shapes]).min()

    expected = unrolled(
        setup,
        lambda phi, theta: {n: stiffness(n) * (p - theta[n]) for n, p in phi.items()},
        steps=steps,
        beta=lambda: momentum(solver, smallest()),
        also=rho,
    )
    assert relative_error(gradient, expected) < tolerance
    learned = {n: leaf for n, leaf in expected.items() if n in rho}
    assert relative_error({n: gradient[n] for n in learned}, learned) < 10 * tolerance


@ON_PRODUCTS
@ON_ENGINES
@ON_SOLVERS
def test_an_operator_as_stiffness(estimator: mn.MAML, tolerance: float, solver: str, engine: str):
    setup = mlp(tasks=2)
    size = sum(p.numel() for p in setup.model.parameters())
    root = torch.randn(size, size, generator=torch.Generator().manual_seed(3)).double()
    matrix = root @ root.T / size + torch.eye(size)

    def product(v: Parameters) -> Parameters:
        flat = matrix.to(v["0.weight"]) @ torch.cat([leaf.flatten() for leaf in v.values()])
        pieces = flat.split([leaf.numel() for leaf in v.values()])
        return {n: p.view_as(leaf) for (n, leaf), p in zip(v.items(), pieces, strict=True)}

    steps, options = 4, {} if solver == "GD" else {"momentum": 0.4}
    made: Any = (mn.GradientDescent if solver == "GD" else mn.Nesterov)(LR, steps, **options)
    gradient, _ = reversed_gradient(setup, estimator, made, engine, lam=product)
    expected = unrolled(
        setup,
        lambda phi, theta: product({n: p - theta[n] for n, p in phi.items()}),
        steps=steps,
        beta=lambda: options.get("momentum", 0.0),
    )
    assert relative_error(gradient, expected) < tolerance


@ON_PRODUCTS
@ON_ENGINES
def test_any_regulariser(estimator: mn.MAML, tolerance: float, engine: str):
    """Of φ and θ, not of their difference alone."""

    def regulariser(phi: Parameters, theta: Parameters) -> Tensor:
        apart = [(p - theta[n]).square().sum() for n, p in phi.items()]
        bent = [(p.square() * torch.cos(theta[n])).sum() for n, p in phi.items()]
        return torch.stack(apart).sum() + 0.3 * torch.stack(bent).sum()

    setup, steps = mlp(tasks=2), 4

    def force(phi: Parameters, theta: Parameters) -> Parameters:
        found = torch.autograd.grad(regulariser(phi, theta), list(phi.values()), create_graph=True)
        at_theta = next(p is theta[n] for n, p in phi.items())
        if at_theta:  # autograd gives the derivative by both then
            apart = {n: p.clone() for n, p in phi.items()}
            return force(apart, theta)
        return dict(zip(phi, found, strict=True))

    gradient, _ = reversed_gradient(
        setup,
        estimator,
        mn.GradientDescent(lr=LR, steps=steps),
        engine,
        regulariser=regulariser,
    )
    assert relative_error(gradient, unrolled(setup, force, steps=steps)) < tolerance


@ON_PRODUCTS
@ON_ENGINES
@ON_SOLVERS
@pytest.mark.parametrize("model", ["MLP", "conv"])
def test_shared_layers(estimator: mn.MAML, tolerance: float, model: str, solver: str, engine: str):
    setup, steps = MODELS[model](tasks=2), 4
    names = [n for n, _ in setup.model.named_parameters()]
    adapting = names[-2:]
    gradient, _ = reversed_gradient(
        setup, estimator, SOLVERS[solver](steps), engine, lam=2.0, adapt=adapting
    )
    expected = unrolled(
        setup,
        quadratic_force(2.0),
        steps=steps,
        beta=lambda: momentum(solver, torch.tensor(2.0).double()),
        shared=tuple(n for n in names if n not in adapting),
    )
    assert relative_error(gradient, expected) < tolerance
    first_order, _ = reversed_gradient(
        setup, mn.FOMAML(), SOLVERS[solver](steps), engine, lam=2.0, adapt=adapting
    )
    assert relative_error(first_order, expected) > 1e-2


class Checkpointed(nn.Module):
    """A Transformer whose attention runs again in the backward pass."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = model.encoder, model.head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.encoder, x, use_reentrant=False).mean(1))


@pytest.mark.parametrize("options", [{}, {"adapt": ["head.*"]}], ids=["all adapt", "shared layers"])
def test_attention_in_a_checkpoint(options: dict[str, Any]):
    """It is recomputed with the kernel that it was computed with, which torch checks."""
    plain = transformer(tasks=2)
    kept = plain._replace(model=Checkpointed(plain.model))
    solver = mn.GradientDescent(lr=LR, steps=3)
    for estimator, tolerance in PRODUCTS.values():
        found, expected = (
            reversed_gradient(setup, estimator, solver, "inplace", lam=2.0, **options)[0]
            for setup in (kept, plain)
        )
        assert relative_error(found, expected) < tolerance


# -------------------------------------------------------------------- randomness, cost, bad numbers


@ON_PRODUCTS
@ON_ENGINES
@pytest.mark.parametrize("shared", [False, True], ids=["all adapt", "shared layers"])
def test_minibatches_are_replayed(estimator: mn.MAML, tolerance: float, shared: bool, engine: str):
    setup, steps, seed = mlp(tasks=2), 4, 11
    solver = mn.GradientDescent(lr=LR, steps=steps, batch_size=2)
    fixed = ("0.weight", "0.bias") if shared else ()
    options = {"adapt": ["2.*"]} if shared else {}
    gradient, _ = reversed_gradient(setup, estimator, solver, engine, lam=2.0, seed=seed, **options)

    def draw(place: int, step: int) -> Tensor:
        return minibatch(seed, place, step, size=6, batch_size=2)

    force = quadratic_force(2.0)
    expected = unrolled(setup, force, steps=steps, draw=draw, shared=fixed)
    assert relative_error(gradient, expected) < tolerance


@ON_PRODUCTS
@ON_ENGINES
def test_dropout_masks_are_replayed(estimator: mn.MAML, tolerance: float, engine: str):
    """As they are in the unrolled gradient, whose masks are those of the stacked engine."""
    setup = mlp(tasks=2, dropout=0.4)
    solver = mn.GradientDescent(lr=LR, steps=4)
    gradient, _ = reversed_gradient(setup, estimator, solver, engine, lam=2.0, seed=5)
    whole = mn.MAML(products="unrolled")
    expected, _ = reversed_gradient(setup, whole, solver, "stacked", lam=2.0, seed=5)
    assert relative_error(gradient, expected) < tolerance


@ON_PRODUCTS
@ON_ENGINES
@pytest.mark.parametrize("truncate", [0, 1, 3, 4, 9])
def test_truncated(estimator: mn.MAML, tolerance: float, engine: str, truncate: int):
    setup, solver = mlp(tasks=2), mn.Nesterov(lr=LR, steps=4)
    cut = mn.MAML(truncate, estimator.products, estimator.epsilon)
    gradient, _ = reversed_gradient(setup, cut, solver, engine, lam=2.0)
    whole = mn.MAML(truncate, products="unrolled")
    expected, _ = reversed_gradient(setup, whole, solver, "stacked", lam=2.0)
    assert relative_error(gradient, expected) < tolerance


@ON_ENGINES
@pytest.mark.parametrize("shared", [False, True], ids=["all adapt", "shared layers"])
@pytest.mark.parametrize("keep", ["device", "host", "recompute"])
@pytest.mark.parametrize("steps", [1, 5, 9])
def test_what_it_costs(steps: int, keep: Any, shared: bool, engine: str):
    setup = mlp(tasks=2)
    options = {"adapt": ["2.*"]} if shared else {}
    solver = mn.GradientDescent(lr=LR, steps=steps)
    # √K-th points are kept: of 5 steps 0 and 3, of 9 steps 0, 3 and 6
    again = {1: 0, 5: 3, 9: 6}[steps] if keep == "recompute" else 0
    difference = mn.MAML(products="difference", epsilon=1e-5, trajectory=keep)
    _, stats = reversed_gradient(setup, difference, solver, engine, lam=2.0, **options)
    assert stats.support_gradients == 3 * steps + again
    assert (stats.query_gradients, stats.hessian_products) == (1, 0)
    autograd = mn.MAML(products="autograd", trajectory=keep)
    _, stats = reversed_gradient(setup, autograd, solver, engine, lam=2.0, **options)
    assert stats.support_gradients == 2 * steps + again
    assert (stats.query_gradients, stats.hessian_products) == (1, steps)


@ON_PRODUCTS
@ON_ENGINES
@ON_SOLVERS
@pytest.mark.parametrize("learn_lam", [None, "tensor"])
@pytest.mark.parametrize("keep", ["host", "recompute"])
def test_where_the_trajectory_is_kept_does_not_matter(
    estimator: mn.MAML, tolerance: float, keep: Any, learn_lam: Any, solver: str, engine: str
):
    setup, made = conv_net(tasks=2), SOLVERS[solver](7)
    options = {"lam": 2.0, "learn_lam": learn_lam}
    gradients = [
        reversed_gradient(
            setup,
            mn.MAML(products=estimator.products, epsilon=estimator.epsilon, trajectory=where),
            made,
            engine,
            **options,
        )[0]
        for where in (keep, "device")
    ]
    assert relative_error(*gradients) < 1e-13


class Spiked(torch.autograd.Function):
    """The identity, whose derivative is NaN where an entry is above 10."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return torch.where(x > 10, torch.full_like(x, torch.nan), grads[0])


class Brittle(nn.Module):
    """Its gradient is NaN a little beyond where the last inner step of a task with x = 1 begins."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([9.0], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return Spiked.apply(self.weight) * x


def test_nan_on_the_way_back_names_step_and_task():
    model = Brittle()
    x = torch.tensor([[[0.1]], [[1.0]]], dtype=torch.float64)
    tasks = mn.TaskBatch(support=(x, 9.99 * x), query=(x, 0 * x))
    learner = mn.MetaLearner(
        model,
        lambda output, target: 0.5 * (output - target).square().mean(),
        lam=0.0,
        solver=mn.GradientDescent(lr=0.9, steps=2),
        estimator=mn.MAML(products="difference", epsilon=2e-2),
        engine="inplace",
    )
    with pytest.raises(
        mn.NonFiniteError, match="Hessian product of inner step 1, on the way back, of task 1"
    ):
        learner.backward(tasks)
    assert model.weight.grad is None
    assert model.weight.item() == 9.0


@ON_PRODUCTS
@ON_ENGINES
def test_nothing_is_changed(estimator: mn.MAML, tolerance: float, engine: str):
    setup = conformance.SETUPS["conv_net-dropout"](tasks=2)
    conformance.check_pure(estimator, setup, engine)


@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_differences_side_by_side_or_not(chunk: int):
    """Two rows a task; the tolerance is rounding, divided by ε."""
    setup, estimator = conv_net(tasks=3), mn.MAML(products="difference", epsilon=1e-5)
    solver = mn.GradientDescent(lr=LR, steps=3)
    whole, _ = reversed_gradient(setup, estimator, solver, "stacked")
    parts, _ = reversed_gradient(setup, estimator, solver, "stacked", chunk=chunk)
    assert relative_error(parts, whole) < 1e-8


def test_numbers_of_eight_bits_cannot_adapt():
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(model.weight.to(torch.float8_e4m3fn))
    differences = mn.MAML(products="difference")
    with pytest.raises(TypeError, match=r"weight cannot adapt: .*\(torch.float8_e4m3fn\).*.*LoRA"):
        mn.MetaLearner(model, nn.functional.mse_loss, estimator=differences)
