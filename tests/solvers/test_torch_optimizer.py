"""Any torch optimizer as a solver, against plain torch loops."""

from __future__ import annotations

import copy

import pytest
import torch

import metanudge as mn
from metanudge.params import flatten
from metanudge.solvers import GradientDescent
from problems import mlp
from solves import ENGINES, one_by_one, solve, uneven

SGD, Adam, RMSprop = torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop
ON_ENGINES = pytest.mark.parametrize("engine", ENGINES)


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
    torch.testing.assert_close(
        flatten(together.displacement), flatten(apart.displacement), rtol=0, atol=1e-13
    )


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
    "L-BFGS with line search": (
        torch.optim.LBFGS,
        {"max_iter": 3, "line_search_fn": "strong_wolfe"},
    ),
}


@ON_ENGINES
@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_torch_optimizers_do_what_a_plain_loop_does(optimizer, options, engine):
    setup, lam, steps = mlp(), 1.5, 4
    solution = solve(
        setup, mn.TorchOptimizer(optimizer, steps=steps, options=options), lam=lam, engine=engine
    )
    theta = [p.detach().clone() for p in setup.model.parameters()]
    for row, task in enumerate(setup.tasks):
        module = copy.deepcopy(setup.model)
        plain = optimizer(module.parameters(), **options)

        def closure(module=module, plain=plain, task=task):
            plain.zero_grad()
            x, y = task.support
            pull = sum(
                ((p - t) ** 2).sum() for p, t in zip(module.parameters(), theta, strict=True)
            )
            value = setup.loss(module(x), y) + lam / 2 * pull
            value.backward()
            return value

        for _ in range(steps):
            plain.step(closure)
        for (name, p), t in zip(module.named_parameters(), theta, strict=True):
            torch.testing.assert_close(
                solution.displacement[name][row], p.detach() - t, rtol=0, atol=1e-12
            )
