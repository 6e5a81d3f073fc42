"""Memory of MAML one step at a time, in place: one step, θ, the meta-gradient, the derivative that
walks back, and the points that are kept. Counted on allocations.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import metanudge as mn
from metanudge.testing.memory import Allocations, trainable_bytes
from problems import Setup, classification_tasks, seeded

TOLERANCE = 0.05
DIFFERENCE = mn.MAML(products="difference", epsilon=1e-5)
AUTOGRAD = mn.MAML(products="autograd")


def perceptron(width: int, examples: int, layers: int = 7) -> Setup:
    """Layers of equal size; more examples make activations weigh more than parameters."""
    model = seeded(
        0,
        lambda: nn.Sequential(
            *(layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.Tanh())),
            nn.Linear(width, 3),
        ),
    )
    tasks = classification_tasks((width,), 3, 2, examples, examples, 0)
    return Setup(model, F.cross_entropy, tasks)


def peak_of(setup: Setup, estimator: mn.MAML, steps: int, **options: Any) -> int:
    solver = options.pop("solver", None) or mn.GradientDescent(lr=0.01, steps=steps)
    learner = mn.MetaLearner(
        setup.model, setup.loss, solver=solver, estimator=estimator, engine="inplace", **options
    )
    learner.meta_gradient(setup.tasks, metrics=False)
    with Allocations() as seen:
        learner.meta_gradient(setup.tasks, metrics=False)
    return seen.peak


def training_step(setup: Setup) -> int:
    """Of which the second half adds to gradients that are there, as where they accumulate."""
    x, y = setup.tasks[0].support
    setup.model.zero_grad()
    with Allocations() as seen:
        for _ in range(2):
            setup.loss(setup.model(x), y).backward()
    setup.model.zero_grad()
    return seen.peak


def double_backward(setup: Setup) -> int:
    x, y = setup.tasks[0].support
    leaves = list(setup.model.parameters())
    with Allocations() as seen:
        g = torch.autograd.grad(setup.loss(setup.model(x), y), leaves, create_graph=True)
        torch.autograd.grad(g, leaves, [torch.ones_like(leaf) for leaf in leaves])
    return seen.peak - trainable_bytes(setup.model)  # the direction, of which the walk has its own


@pytest.mark.parametrize("examples", [4, 200], ids=["parameters", "activations"])
@pytest.mark.parametrize("steps", [1, 4, 16])
def test_differences_take_a_training_step_and_three_copies(steps: int, examples: int):
    setup = perceptron(60, examples)
    limit = training_step(setup) + (3 + steps) * trainable_bytes(setup.model)
    assert peak_of(setup, DIFFERENCE, steps) <= (1 + TOLERANCE) * limit


@pytest.mark.parametrize("examples", [4, 200], ids=["parameters", "activations"])
@pytest.mark.parametrize("steps", [1, 4, 16])
def test_products_take_a_double_backward_and_three_copies(steps: int, examples: int):
    setup = perceptron(60, examples)
    limit = double_backward(setup) + (3 + steps) * trainable_bytes(setup.model)
    assert peak_of(setup, AUTOGRAD, steps) <= (1 + TOLERANCE) * limit


@pytest.mark.parametrize("estimator", [DIFFERENCE, AUTOGRAD], ids=["difference", "autograd"])
def test_activations_do_not_grow_with_the_steps(estimator: mn.MAML):
    """From 1 to 64 steps there are 63 points more, and nothing else."""
    setup = perceptron(30, 300, layers=2)
    few, many = (peak_of(setup, estimator, steps) for steps in (1, 64))
    points = 63 * trainable_bytes(setup.model)
    assert many - few == pytest.approx(points, rel=0.01)


@pytest.mark.parametrize("estimator", [DIFFERENCE, AUTOGRAD], ids=["difference", "autograd"])
def test_points_are_of_what_adapts_and_of_a_root_of_the_steps(estimator: mn.MAML):
    setup = perceptron(60, 4)
    whole = trainable_bytes(setup.model)
    head = trainable_bytes(setup.model[-1])
    few, many = (peak_of(setup, estimator, steps, adapt=["14.*"]) for steps in (1, 64))
    assert many - few <= 63 * (head + 64), "and a few numbers a step"
    kept = mn.MAML(products=estimator.products, epsilon=estimator.epsilon, trajectory="recompute")
    few, many = (peak_of(setup, kept, steps) for steps in (1, 64))
    assert many - few <= 15 * whole, "8 kept, and 8 between two of them"


@pytest.mark.parametrize(
    ("kind", "options", "moments", "gradients"),
    [(torch.optim.SGD, {"momentum": 0.9}, 1, 0), (torch.optim.Adam, {}, 2, 1)],
    ids=["momentum", "Adam"],
)
@pytest.mark.parametrize("estimator", [DIFFERENCE, AUTOGRAD], ids=["difference", "autograd"])
def test_the_optimizers_state_counts_as_what_adapts(
    estimator: mn.MAML, kind: Any, options: dict[str, float], moments: int, gradients: int
):
    """Adam's steps are not linear: each is taken back at its gradient, which is kept, too."""
    setup = perceptron(60, 4)
    once = (double_backward if estimator is AUTOGRAD else training_step)(setup)
    copy, noted = (n * trainable_bytes(setup.model) for n in (1 + moments, gradients))
    peaks = {
        steps: peak_of(
            setup, estimator, 0, solver=mn.TorchOptimizer(kind, steps, {"lr": 0.01, **options})
        )
        for steps in (2, 6)
    }
    for steps, peak in peaks.items():
        assert peak <= (1 + TOLERANCE) * (once + (3 + steps) * copy + steps * noted)
    assert peaks[6] - peaks[2] == pytest.approx(4 * (copy + noted), rel=0.02)
