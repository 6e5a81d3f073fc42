"""What `Unrolled` leaves behind: K plain training steps, to the bit, or nothing at all."""

from __future__ import annotations

import copy
import itertools
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import metanudge as mn
from unrolling import OPTIMIZERS, Problem, leaves

HOW: list[Any] = ["autograd", "difference"]


def snapshot(problem: Problem) -> Any:
    """All that a training step may change."""
    model, state = problem.model, problem.optimizer.state
    return copy.deepcopy(
        {
            "model": model.state_dict(),
            "modes": [module.training for module in model.modules()],
            "grad": [p.grad for p in model.parameters()],
            "optimizer": [state.get(p) for p in model.parameters()],
            "random": torch.get_rng_state(),
            "upper": [(leaf.detach(), leaf.grad) for leaf in leaves(problem.upper)],
        }
    )


def assert_same(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


class Spectral(Problem):
    """Its forward pass depends on buffers that every forward pass changes."""

    def __init__(self, optimizer: str) -> None:
        super().__init__("dropout", optimizer)
        torch.manual_seed(0)
        nn.utils.parametrizations.spectral_norm(self.model[-1])
        *first, last = self.model.parameters()
        self.optimizer = OPTIMIZERS[optimizer]([{"params": first}, {"params": [last], "lr": 0.02}])


@pytest.mark.parametrize("products", HOW)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "make", [lambda o: Problem("dropout", o), Spectral], ids=["BN", "spectral"]
)
def test_the_same_as_plain_steps(make: Any, optimizer: str, products: Any):
    live, plain = make(optimizer), make(optimizer)
    loop = live.loop(3, products=products)
    torch.manual_seed(3)
    for first in (0, 3):
        loop.step([live.batch(first + k) for k in range(3)], live.validation)
    for leaf in leaves(live.upper):
        leaf.grad = None
    left = snapshot(live)
    torch.manual_seed(3)
    plain.plainly([plain.batch(k) for k in range(6)])
    assert_same(left, snapshot(plain))


def test_buffers_of_a_step_are_those_it_had():
    """Power iterations in the forward pass, which the oracle takes along."""
    problem = Spectral("momentum")
    problem.warm_up()
    torch.manual_seed(3)
    expected = problem.hypergradient(problem.batches(3))
    torch.manual_seed(3)
    problem.loop(3, products="autograd").step(problem.batches(3), problem.validation)
    (leaf,) = leaves(problem.upper)
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, expected[0], rtol=1e-10, atol=1e-14)


def test_a_mode_that_the_upper_loss_changes():
    """Products are those of training all the same."""
    found = []
    for mode in (True, False):
        problem = Problem("conv", "SGD")

        def upper(batch: Any, problem: Problem = problem, mode: bool = mode) -> Tensor:
            problem.model.train(mode)
            return problem.upper_loss(batch) if mode else problem.upper_loss(batch) * 0.5

        loop = mn.Unrolled(
            problem.model, problem.upper, problem.lower_loss, upper, problem.optimizer, 2
        )
        loop.step(problem.batch(0), problem.validation)
        assert problem.model.training
        found.append(problem)
    assert_same(found[0].model.state_dict(), found[1].model.state_dict())


# ---------------------------------------------------------------------------------- what is a batch


def test_batches_in_every_form():
    gradients = []
    for form in (
        lambda b: b,  # one tuple
        lambda b: [b],
        lambda b: [b, b, b],
        lambda b: itertools.repeat(b),
    ):
        problem = Problem("MLP", "Adam")
        problem.loop(3).step(form(problem.batch(0)), problem.validation)
        gradients.append(leaves(problem.upper)[0].grad)
    for gradient in gradients[1:]:
        assert_same(gradient, gradients[0])


def test_an_iterator_gives_as_many_as_there_are_steps():
    problem = Problem("MLP", "SGD")
    endless: Iterator[Any] = (problem.batch(k) for k in itertools.count())
    problem.loop(3).step(endless, problem.validation)
    assert int(next(endless)[2][0]) == 3


# ---------------------------------------------------------------------------- when something breaks


@pytest.mark.parametrize("products", HOW)
@pytest.mark.parametrize("optimizer", ["SGD", "momentum", "Adam"])
@pytest.mark.parametrize("warm", [0, 2])
def test_an_exception_anywhere_leaves_nothing(optimizer: str, products: Any, warm: int):
    problem = Problem("dropout", optimizer)
    problem.warm_up(warm)
    for leaf in leaves(problem.upper):
        leaf.grad = torch.ones_like(leaf)
    before = snapshot(problem)
    calls, fatal = 0, 0

    def failing(loss: Any) -> Any:
        def evaluate(batch: Any) -> Tensor:
            nonlocal calls
            calls += 1
            if calls == fatal:
                raise LookupError("no such thing")
            return loss(batch)

        return evaluate

    loop = mn.Unrolled(
        problem.model,
        problem.upper,
        failing(problem.lower_loss),
        failing(problem.upper_loss),
        problem.optimizer,
        2,
        products=products,
    )
    total = 2 + 1 + (2 if products == "autograd" else 4)
    for number in range(1, total + 1):
        calls, fatal = 0, number
        with pytest.raises(LookupError, match="no such thing"):
            loop.step(problem.batches(2), problem.validation)
        assert_same(snapshot(problem), before)
    fatal = 0
    loop.step(problem.batches(2), problem.validation)


@pytest.mark.parametrize("call", [1, 2, 3])
def test_ctrl_c_leaves_nothing(call: int):
    problem = Problem("dropout", "Adam")
    before, calls = snapshot(problem), 0

    def lower(batch: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), signal.SIGINT)
        return problem.lower_loss(batch)

    loop = mn.Unrolled(
        problem.model, problem.upper, lower, problem.upper_loss, problem.optimizer, 2
    )
    with pytest.raises(KeyboardInterrupt):
        loop.step(problem.batches(2), problem.validation)
    assert calls == call, "at the next evaluation"
    assert_same(snapshot(problem), before)


@pytest.mark.parametrize(
    ("scale", "where", "said"),
    [
        (1e200, "lower", "lower loss before training step 1"),
        (float("nan"), "upper", "upper loss"),
    ],
)
def test_nan_on_the_way(scale: float, where: str, said: str):
    problem = Problem("MLP", "SGD")
    before = snapshot(problem)

    def lower(batch: Any) -> Tensor:
        return problem.lower_loss(batch) * (scale if where == "lower" else 1)

    def upper(batch: Any) -> Tensor:
        return problem.upper_loss(batch) * (scale if where == "upper" else 1)

    loop = mn.Unrolled(problem.model, problem.upper, lower, upper, problem.optimizer, 3)
    with pytest.raises(mn.NonFiniteError, match=said):
        loop.step(problem.batches(3), problem.validation)
    assert_same(snapshot(problem), before)


# ---------------------------------------------------------------------------------------- bad input


def linear() -> nn.Linear:
    return nn.Linear(2, 1)


X = torch.ones(3, 2)


def attempt(
    model: nn.Module,
    *,
    upper: Any = None,
    optimizer: Any = None,
    lower_loss: Any = None,
    upper_loss: Any = None,
    steps: Any = 2,
    batches: Any = X,
    **options: Any,
) -> None:
    x = torch.zeros((), requires_grad=True)
    mn.Unrolled(
        model,
        x if upper is None else upper,
        lower_loss or (lambda b: (x.exp() * model(b).square()).mean()),
        upper_loss or (lambda b: model(b).mean()),
        torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer,
        steps,
        **options,
    ).step(batches, X)


SHARED = linear()
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "steps": ({"steps": 0}, ValueError, "steps must be a whole number of at least 1, got 0"),
    "products": ({"products": "diff"}, ValueError, "Did you mean 'difference'?"),
    "trajectory": ({"trajectory": "recompute"}, ValueError, "Unknown trajectory 'recompute'"),
    "epsilon": ({"epsilon": -1.0}, ValueError, "epsilon must be a positive number, got -1.0"),
    "lower": ({"lower": "model"}, TypeError, "lower must be a live Module, got 'model'"),
    "a class": ({"optimizer": torch.optim.Adam}, TypeError, "optimizer must be a live Optimizer"),
    "amsgrad": (
        {"optimizer": lambda p: torch.optim.Adam(p, amsgrad=True)},
        TypeError,
        "but not of Adam(amsgrad=True)",
    ),
    "maximize": (
        {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1, maximize=True)},
        TypeError,
        "but not of SGD(maximize=True)",
    ),
    "RMSprop": (
        {"optimizer": lambda p: torch.optim.RMSprop(p)},
        TypeError,
        "SGD, Adam and AdamW, but not of RMSprop",
    ),
    "another model's": (
        {"optimizer": lambda p: torch.optim.SGD(linear().parameters(), lr=0.1)},
        ValueError,
        "no parameters of lower: (1, 2) float32, (1,) float32",
    ),
    "shared": (
        {"lower": SHARED, "upper": SHARED},
        ValueError,
        "lower.weight is in upper, and the optimizer moves it, too",
    ),
    "nothing to learn": ({"upper": torch.zeros(2)}, ValueError, "No tensor in upper requires"),
    "no tensor": ({"upper": {"a": 1}}, TypeError, "upper holds no floating tensor"),
    "computed": (
        {"upper": {"a": torch.zeros(2, requires_grad=True) * 2}},
        ValueError,
        "upper['a'] was computed from other tensors",
    ),
    "loss": ({"lower_loss": 3}, TypeError, "lower_loss must be a function of a batch, got 3"),
    "vector": (
        {"lower_loss": lambda b: b},
        TypeError,
        "lower_loss(batch) must return a floating scalar tensor, got a tensor of shape (3, 2)",
    ),
    "apart from lower": (
        {"lower_loss": lambda b: torch.ones((), requires_grad=True).sum()},
        ValueError,
        "lower_loss(batch) in step 0 depends on no parameter",
    ),
    "detached": (
        {"lower_loss": lambda b: torch.ones(())},
        ValueError,
        "lower_loss(batch) in step 0 depends on no parameter",
    ),
    "upper loss": (
        {"upper_loss": lambda b: torch.ones(())},
        ValueError,
        "upper_loss(validation) depends on no parameter",
    ),
    "apart from upper": (
        {"upper": torch.zeros(2, requires_grad=True)},
        ValueError,
        "Neither lower_loss nor upper_loss depends on upper",
    ),
    "batches": ({"batches": [X, X, X]}, ValueError, "Got 3 batches for 2 steps"),
    "too few": ({"batches": iter([X])}, ValueError, "Got 1 batches for 2 steps"),
}


@pytest.mark.parametrize(("given", "kind", "said"), BAD.values(), ids=BAD)
def test_bad_input(given: dict[str, Any], kind: type[Exception], said: str):
    given = dict(given)
    model = given.pop("lower", None) or linear()
    make = given.get("optimizer")
    if callable(make) and not isinstance(make, type):
        given["optimizer"] = make(model.parameters())
    if isinstance(model, str):
        given["optimizer"] = torch.optim.SGD(linear().parameters(), lr=0.1)
    with pytest.raises(kind, match=re.escape(said)):
        attempt(model, **given)


def test_frozen_and_sparse_parameters():
    model = linear().requires_grad_(False)
    with pytest.raises(ValueError, match="moves no parameter of lower that requires gradients"):
        attempt(model)
    table = nn.Embedding(3, 1, sparse=True)
    with pytest.raises(TypeError, match="sparse gradient"):
        attempt(table, batches=torch.tensor([0, 1]))
    nested = nn.Sequential(linear())
    nested[0].bias.requires_grad_(False)
    attempt(nested)
    assert nested[0].bias.grad is None


def test_an_error_says_where_it_happened():
    with pytest.raises(RuntimeError) as caught:
        attempt(linear(), batches=[X, X[:, :1]])
    assert "in step 1 with (3, 1) float32" in "".join(caught.value.__notes__)
