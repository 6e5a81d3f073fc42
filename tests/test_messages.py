"""What a slip in Python is answered with: at once, with the value, and with what to write."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import metanudge as mn
from metanudge.objective import takes_model
from metanudge.solvers import EXAMPLES


def some_tasks(scale: float = 1.0) -> mn.TaskBatch:
    x = scale * torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(0))
    return mn.TaskBatch(support=(x, x[..., :1]), query=(x, x[..., :1]))


def a_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 1)


SLIPS: list[tuple[dict[str, Any], str]] = [
    ({"estimator": "maml"}, "got 'maml'. Write estimator=mn.MAML()."),
    ({"estimator": "fo-maml"}, "got 'fo-maml'. Write estimator=mn.FOMAML()."),
    ({"estimator": mn.FOBMAML}, "got the class FOBMAML. Write estimator=mn.FOBMAML()."),
    (
        {"estimator": mn.GradientDescent(0.1, 1)},
        "got an object of GradientDescent. Write estimator=mn.FOBMAML().",
    ),
    (
        {"solver": "sgd"},
        "got 'sgd'. Write solver=mn.TorchOptimizer(torch.optim.SGD, steps=5, options={'lr': 0.1}).",
    ),
    ({"solver": "newton"}, "got 'newton'. Write solver=mn.GradientDescent(lr=0.1, steps=5)."),
    (
        {"solver": mn.GradientDescent},
        "got the class GradientDescent. Write solver=mn.GradientDescent(lr=0.1, steps=5).",
    ),
    (
        {"solver": torch.optim.Adam},
        "got the class Adam. Write solver=mn.TorchOptimizer(torch.optim.Adam, steps=5",
    ),
    ({"lam": "2"}, "lam must be a number or a tensor, got '2'. Write e.g. lam=2.0."),
    ({"lam": {"weight": 1.0, "bias": "2"}}, "lam['bias'] must be a number or a tensor, got '2'."),
    ({"lam": 10**400}, "lam must be a number or a tensor, got a int that is too large."),
    ({"seed": "a"}, "seed must be a whole number, got 'a'."),
]


@pytest.mark.parametrize(("options", "said"), SLIPS, ids=[str(options) for options, _ in SLIPS])
def test_slips_are_answered_at_construction(options: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=re.escape(said)):
        mn.MetaLearner(a_model(), F.mse_loss, **options)


@pytest.mark.parametrize(("name", "value"), [("estimator", mn.MAML), ("solver", "sgd")])
def test_and_at_assignment(name: str, value: object) -> None:
    learner = mn.MetaLearner(a_model(), F.mse_loss)
    before = getattr(learner, name)
    with pytest.raises(TypeError, match=f"Write {name}=mn"):
        setattr(learner, name, value)
    assert getattr(learner, name) is before


@pytest.mark.parametrize("example", EXAMPLES.values())
def test_what_to_write_works(example: str) -> None:
    mn.MetaLearner(a_model(), F.mse_loss, solver=eval(example, {"mn": mn, "torch": torch}))


def test_adapt_wants_patterns() -> None:
    with pytest.raises(
        ValueError, match="adapt must be a pattern of parameter names or a list of them, got 3"
    ):
        mn.MetaLearner(a_model(), F.mse_loss, adapt=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("use", ["backward", "meta_gradient", "evaluate", "forward"])
@pytest.mark.parametrize(("value", "kind"), [(None, "NoneType"), (3, "int")])
def test_what_are_no_tasks(use: str, value: Any, kind: str) -> None:
    learner = mn.MetaLearner(a_model(), F.mse_loss)
    with pytest.raises(
        TypeError, match=rf"Expected tasks, got {kind}\. Build them with mn\.Task\(support="
    ):
        getattr(learner, use)(value)


def of_net(net: Any, batch: Any) -> Tensor:
    return F.mse_loss(net(batch[0]), batch[1])


def of_text(m: nn.Linear, batch: Any) -> Tensor:
    return F.mse_loss(m(batch[0]), batch[1])


def of_perhaps(m: nn.Module | None, batch: Any) -> Tensor:
    assert m is not None
    return F.mse_loss(m(batch[0]), batch[1])


def of_unknown(m: Any, batch: Any) -> Tensor:
    return F.mse_loss(m(batch[0]), batch[1])


@pytest.mark.parametrize("loss", [of_net, of_text, of_perhaps])
def test_losses_that_take_the_model(loss: Any) -> None:
    assert takes_model(loss)
    tasks = some_tasks()
    (g, _), (expected, _) = (
        mn.MetaLearner(a_model(), kind).meta_gradient(tasks) for kind in (loss, F.mse_loss)
    )
    assert all(torch.allclose(leaf, expected[name]) for name, leaf in g.items())


@pytest.mark.parametrize("engine", ["stacked", "inplace", "auto"])
def test_a_loss_that_takes_the_model_without_saying_so(engine: Any) -> None:
    with pytest.raises(
        ValueError,
        match=(
            r"calls its first argument as if it were the model.*named 'model'.*annotated as an"
            r" nn.Module"
        ),
    ):
        mn.MetaLearner(a_model(), of_unknown, engine=engine).backward(some_tasks())


def test_a_stiffness_that_is_itself_too_much_is_not_to_be_raised() -> None:
    solver = mn.GradientDescent(lr=0.1, steps=400)
    with pytest.raises(
        mn.NonFiniteError, match=r"smaller lr in the solver or a smaller lam: lr·λ = 3"
    ) as error:
        mn.MetaLearner(a_model(), F.mse_loss, lam=30.0, solver=solver).backward(some_tasks())
    assert "larger lam" not in str(error.value)


@pytest.mark.parametrize("through", ["backward", "forward"])
def test_inner_steps_that_diverge_are_mentioned_once(through: str) -> None:
    learner = mn.MetaLearner(a_model(), F.mse_loss, estimator=mn.FOMAML())
    tasks = some_tasks(scale=10)
    with pytest.warns(
        mn.DivergenceWarning, match=r"residual grew from .* smaller lr in the solver.*standardise"
    ) as said:
        getattr(learner, through)(tasks)
    assert len(said) == 1
    getattr(learner, through)(tasks)  # warnings are errors here


def test_some_growth_is_mentioned_when_it_goes_on() -> None:
    learner = mn.MetaLearner(
        a_model(),
        F.mse_loss,
        lam=35.0,
        estimator=mn.FOMAML(),
        solver=mn.GradientDescent(lr=0.1, steps=2),
    )
    tasks = some_tasks(scale=0.1)
    for _ in range(9):
        stats = learner.backward(tasks)
        assert 2 * stats.residual_start < stats.residual < 10 * stats.residual_start
    with pytest.warns(mn.DivergenceWarning, match="smaller lam: lr·λ = 3.5"):
        learner.backward(tasks)


def test_healthy_training_says_nothing() -> None:
    learner = mn.MetaLearner(a_model(), F.mse_loss)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(12):
            learner.backward(some_tasks())
