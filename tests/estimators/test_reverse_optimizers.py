"""MAML through SGD, Adam and AdamW inside, against autograd through functional ones written down
here.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import metanudge as mn
from problems import Setup, conv_net, mlp, relative_error, vector
from walks import (
    LAM,
    MODELS,
    ON_PRODUCTS,
    OPTIMIZERS,
    PRODUCTS,
    Inside,
    Parameters,
    engines,
    loss_at,
    quadratic_force,
    reversed_gradient,
    solver_of,
)


def unrolled(setup: Setup, force: Callable[..., Parameters], name: str, steps: int) -> Parameters:
    """The mean over the tasks of d f(φ_K)/dθ."""
    adapting = {n: p.detach() for n, p in setup.model.named_parameters() if p.requires_grad}
    total = {n: torch.zeros_like(p) for n, p in adapting.items()}
    with sdpa_kernel(SDPBackend.MATH):
        for task in setup.tasks:
            theta = {n: p.clone().requires_grad_() for n, p in adapting.items()}
            d = {n: torch.zeros_like(p) for n, p in theta.items()}
            inside = Inside(name)
            for _ in range(steps):
                phi = {n: theta[n] + leaf for n, leaf in d.items()}
                g = torch.autograd.grad(
                    loss_at(setup, phi, task.support), list(phi.values()), create_graph=True
                )
                pull = force(phi, theta)
                whole = {n: leaf + pull[n] for n, leaf in zip(phi, g, strict=True)}
                d = inside.step(d, whole)
            outer = loss_at(setup, {n: theta[n] + leaf for n, leaf in d.items()}, task.query)
            for name_, leaf in zip(
                theta, torch.autograd.grad(outer, list(theta.values())), strict=True
            ):
                total[name_] += leaf / len(setup.tasks)
    return total


FIVE_STEPS = [(name, 5) for name in OPTIMIZERS]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("lam", LAM)
@pytest.mark.parametrize(
    ("name", "steps"),
    [*((name, k) for name in ("momentum", "Adam", "AdamW") for k in (1, 20)), *FIVE_STEPS],
)
def test_optimizers_walked_back(steps: int, name: str, lam: str, model: str):
    setup = MODELS[model](tasks=2)
    for n, p in setup.model.named_parameters():
        # The key's bias changes nothing. Its gradient is rounding, which Adam makes steps of and λ
        # feeds back, times α λ/eps a step: no two orders of summation agree on it.
        p.requires_grad_(not n.endswith("in_proj_bias"))
    stiffness = LAM[lam](setup.model)
    expected = unrolled(setup, quadratic_force(stiffness), name, steps)
    # on the stacked engine λ acts through the same code as in place
    on = engines(model) if lam == "scalar" else ("inplace",)
    for (estimator, tolerance), engine in itertools.product(PRODUCTS.values(), on):
        gradient, stats = reversed_gradient(
            setup, estimator, solver_of(name, steps), engine, lam=stiffness
        )
        error = relative_error(gradient, expected)
        assert error < tolerance, f"{estimator.products}, {engine}"
        each = 3 if estimator.products == "difference" else 2
        assert (stats.support_gradients, stats.query_gradients) == (each * steps, 1)


# --------------------------------------------------------- where Adam has no derivative to speak of


def adam(setup: Setup, estimator: mn.MAML, steps: int, **options: Any) -> Tensor:
    solver = mn.TorchOptimizer(torch.optim.Adam, steps=steps, options={"lr": 0.01})
    return vector(reversed_gradient(setup, estimator, solver, "inplace", **options)[0]).double()


@pytest.mark.parametrize("engine", ["inplace", "stacked"])
@ON_PRODUCTS
def test_units_that_are_dead(estimator: mn.MAML, tolerance: float, engine: str):
    """Their gradient is zero, where the root in Adam's step has no derivative."""
    setup = mlp(nn.ReLU, tasks=2, hidden=6)
    with torch.no_grad():
        setup.model[0].bias[:3] = -100.0
    gradient, _ = reversed_gradient(setup, estimator, solver_of("Adam", 5), engine, lam=0.0)
    expected = unrolled(setup, quadratic_force(0.0), "Adam", 5)
    assert relative_error(gradient, expected) < tolerance
    assert bool(torch.isfinite(vector(gradient)).all())


@pytest.mark.parametrize("steps", [5, 20])
def test_a_bias_before_batch_norm_in_single_precision(steps: int):
    """Its gradient is what rounding leaves of a zero: as a derivative it would be noise, 1/eps
    times as large. Measured relative errors: 2e-6 by autograd, 4e-5 by differences, without the
    definition 1e-3.
    """
    exact = adam(conv_net(), mn.MAML(products="autograd"), steps, lam=0.0)
    double = conv_net()
    single = Setup(double.model.float(), double.loss, double.tasks.to(torch.float32))
    for estimator, tolerance in (
        (mn.MAML(products="autograd"), 1e-5),
        (mn.MAML(products="difference", epsilon=1e-3), 3e-4),
    ):
        assert relative_error(adam(single, estimator, steps, lam=0.0), exact) < tolerance


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_steps_are_those_of_torch(name: str):
    setup, solver = mlp(tasks=2), solver_of(name, 4)
    adapted = [
        reversed_gradient(setup, estimator, solver, engine, lam=2.0)[1]
        for estimator, engine in (
            (mn.FOMAML(), "inplace"),
            (mn.MAML(truncate=0), "inplace"),
            (mn.MAML(truncate=0), "stacked"),
        )
    ]
    for stats in adapted[1:]:
        assert stats.gradient_norm == pytest.approx(adapted[0].gradient_norm, rel=1e-13)
        assert stats.residual == pytest.approx(adapted[0].residual, rel=1e-13)


def in_groups(kind: Any, apart: dict[str, Any], **options: Any) -> Callable[..., Any]:
    """Biases with options of their own."""

    def build(tensors: list[Tensor]) -> torch.optim.Optimizer:
        first, second = ([t for t in tensors if (t.ndim > 1) is big] for big in (True, False))
        return kind([{"params": first}, {"params": second, **apart}], **options)

    return build


GROUPS = {
    "SGD": in_groups(torch.optim.SGD, {"lr": 0.02, "momentum": 0.0}, lr=0.1, momentum=0.8),
    "AdamW": in_groups(torch.optim.AdamW, {"lr": 0.003, "weight_decay": 0.0}, lr=0.03),
    "without biases": lambda tensors: torch.optim.Adam([t for t in tensors if t.ndim > 1], 0.03),
    "each": lambda tensors: torch.optim.SGD(
        [{"params": [t], "lr": 0.2 / (1 + place)} for place, t in enumerate(tensors)]
    ),
}


def assert_slope(setup: Setup, solver: Any, seed: int = 0) -> None:
    """Against a difference of what torch's own optimizers arrive at. Its step h of 10⁻⁴ leaves
    rounding over h, 10⁻¹⁰ of the slope, and the fourth power of h times what Adam curves: at 10⁻³
    that is 3·10⁻⁵ of the slope.
    """
    parameters = dict(setup.model.named_parameters())
    generator = torch.Generator().manual_seed(5)
    along = {
        n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in parameters.items()
    }

    def loss_beside(step: float) -> float:
        beside = copy.deepcopy(setup.model)
        with torch.no_grad():
            for n, p in beside.named_parameters():
                p.add_(along[n], alpha=step)
        learner = mn.MetaLearner(beside, setup.loss, lam=2.0, solver=solver, engine="inplace")
        return learner.evaluate(setup.tasks, seed=seed).mean_loss

    near, far = (loss_beside(h) - loss_beside(-h) for h in (1e-4, 2e-4))
    expected = (8 * near - far) / (12 * 1e-4)
    for (estimator, _), engine in itertools.product(PRODUCTS.values(), ("inplace", "stacked")):
        gradient, _ = reversed_gradient(setup, estimator, solver, engine, lam=2.0, seed=seed)
        slope = sum(float((gradient[n] * along[n]).sum()) for n in along)
        assert slope == pytest.approx(expected, rel=1e-7), (estimator.products, engine)


@pytest.mark.parametrize("name", GROUPS)
def test_groups_with_options_of_their_own(name: str):
    assert_slope(mlp(tasks=2), mn.TorchOptimizer(GROUPS[name], 4))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_minibatches_and_dropout_masks_are_replayed(name: str):
    kind, options = OPTIMIZERS[name]
    solver = mn.TorchOptimizer(kind, 4, options, batch_size=3)
    assert_slope(mlp(tasks=2, dropout=0.4), solver, seed=11)


def test_rates_that_are_learned_start_at_one():
    setup, solver = mlp(tasks=2), mn.TorchOptimizer(GROUPS["SGD"], 4)
    with pytest.raises(ValueError, match="its optimizer's groups have several"):
        reversed_gradient(setup, mn.MAML(), solver, "inplace", learn_lr="tensor")


@pytest.mark.parametrize("variant", ["foreach", "fused"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_variants_are_walked_back_alike(name: str, variant: str):
    """torch's own takes the steps of FO-MAML; rounding."""
    setup, (kind, given) = mlp(tasks=2), OPTIMIZERS[name]
    solver = mn.TorchOptimizer(kind, steps=4, options={**given, variant: True})
    torchs, ours = (
        reversed_gradient(setup, estimator, solver, "inplace", lam=2.0)[0]
        for estimator in (mn.FOMAML(), mn.MAML(truncate=0))
    )
    assert relative_error(torchs, ours) < 1e-12
    estimator = mn.MAML(products="autograd")
    whole, plain = (
        reversed_gradient(setup, estimator, each, "inplace", lam=2.0)[0]
        for each in (solver, solver_of(name, 4))
    )
    assert relative_error(whole, plain) < 1e-12


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("keep", ["host", "recompute"])
def test_a_trajectory_with_the_optimizers_state(keep: Any, name: str):
    setup, solver = mlp(tasks=2), solver_of(name, 7)
    gradients = [
        reversed_gradient(
            setup, mn.MAML(products="autograd", trajectory=where), solver, "inplace", lam=2.0
        )[0]
        for where in (keep, "device")
    ]
    assert relative_error(*gradients) < 1e-13
