"""Errors say what happened with its value, why, and what to do; and whatever fails, the model is as
it was.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import metanudge as mn
from conformance import SETUPS, SOLVER, Snapshot, give_gradients, learner_for
from problems import Setup, classification_tasks, conv_net, mlp, seeded, transformer

# torch's own forward-mode decompositions are scripted on first use.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)

ENGINES = ("stacked", "inplace")
CE = F.cross_entropy
LINEAR = seeded(0, lambda: nn.Linear(1, 1))


@contextmanager
def refused(error: type[Exception], *parts: str, model: nn.Module | None = None) -> Iterator[None]:
    """The block raises `error`, its message holds all the parts, and the model and the random
    states are as before.
    """
    model = nn.Identity() if model is None else model
    give_gradients(model)
    before = Snapshot(model)
    with pytest.raises(error) as caught:
        yield
    before.assert_unchanged()
    text = str(caught.value)
    for part in parts:
        assert re.search(part, text), f"{part!r} is not in: {text}"
    assert text.rstrip().endswith((".", ")")), "a message is made of sentences"


def mapping(value: Any) -> Callable[[nn.Module], dict[str, Any]]:
    """A stiffness per tensor or per parameter with one bad value in it."""
    return lambda model: {
        n: value(p) if callable(value) and n == "0.weight" else 1.0
        for n, p in model.named_parameters()
    }


def one_bad(bad: float) -> Callable[[Tensor], Tensor]:
    def build(parameter: Tensor) -> Tensor:
        tensor = torch.ones_like(parameter.detach())
        tensor[1, 1] = bad
        return tensor

    return build


# ---------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("lam", "shown"),
    [
        (0.0, r"lam .*0\.0"),
        (-1.5, r"lam .*-1\.5"),
        (math.nan, r"lam .*nan"),
        (math.inf, r"lam .*inf"),
        (torch.tensor(-2.0), r"lam .*-2\.0"),
        (mapping(lambda p: 0.0), r"lam\['0\.weight'\].*0\.0"),
        (mapping(one_bad(-3.0)), r"lam\['0\.weight'\].*-3\.0"),
        (mapping(one_bad(math.nan)), r"lam\['0\.weight'\].*nan"),
        (mapping(one_bad(math.inf)), r"lam\['0\.weight'\].*inf"),
    ],
    ids=[
        "zero",
        "negative",
        "nan",
        "inf",
        "tensor",
        "per tensor",
        "per parameter",
        "nan inside",
        "inf inside",
    ],
)
def test_lam_must_be_positive(lam: Any, shown: str):
    model = mlp().model
    lam = lam(model) if callable(lam) else lam
    with refused(
        ValueError,
        shown,
        "positive and finite",
        "no unique solution",
        "Start with 2.0",
        model=model,
    ):
        mn.MetaLearner(model, CE, lam=lam)
    learner = mn.MetaLearner(model, CE)
    learner.lam = lam  # also when it is exchanged later
    with refused(ValueError, shown, model=model):
        learner.backward(mlp().tasks)


@pytest.mark.parametrize(
    ("lam", "parts"),
    [
        (
            {"0.weight": 1.0, "nonsense": 1.0},
            ["unknown: nonsense", "missing: 0.bias, 2.bias, 2.weight", "0.weight, 0.bias"],
        ),
        ({}, ["missing: 0.bias, 0.weight, 2.bias, 2.weight"]),
        (torch.ones(3), [r"\(3,\)", "mapping from parameter name"]),
        (
            mapping(lambda p: torch.ones(2)),
            [
                r"lam\['0\.weight'\].*\(2,\).*\(5, 3\)",
                "number or a tensor of the parameter's shape",
            ],
        ),
    ],
    ids=["wrong names", "no names", "one tensor for all", "wrong shape"],
)
def test_lam_must_fit_the_parameters(lam: Any, parts: list[str]):
    model = mlp().model
    with refused(ValueError, *parts, model=model):
        mn.MetaLearner(model, CE, lam=lam(model) if callable(lam) else lam)


BAD_NUMBERS = [0.0, -0.1, math.nan, math.inf, "0.1", None, True]
BAD_COUNTS = [0, -3, 2.5, "3", True, None]


@pytest.mark.parametrize("value", BAD_NUMBERS, ids=repr)
@pytest.mark.parametrize(
    "make", [lambda v: mn.GradientDescent(lr=v, steps=2), lambda v: mn.Nesterov(lr=v, steps=2)]
)
def test_lr_must_be_positive(make: Callable[[Any], Any], value: Any):
    with refused(ValueError, rf"lr must be a positive number, got {re.escape(repr(value))}", "lam"):
        make(value)


@pytest.mark.parametrize("value", BAD_COUNTS, ids=repr)
@pytest.mark.parametrize(
    "make",
    [
        lambda v: mn.GradientDescent(lr=0.1, steps=v),
        lambda v: mn.Nesterov(lr=0.1, steps=v),
        lambda v: mn.TorchOptimizer(torch.optim.SGD, steps=v, options={"lr": 0.1}),
        lambda v: mn.LBFGS(steps=v),
        lambda v: mn.NewtonCG(steps=v),
    ],
    ids=["GradientDescent", "Nesterov", "TorchOptimizer", "LBFGS", "NewtonCG"],
)
def test_steps_must_be_a_positive_count(make: Callable[[Any], Any], value: Any):
    with refused(
        ValueError,
        rf"steps must be a whole number of at least 1, got {re.escape(repr(value))}",
        "usual",
    ):
        make(value)


@pytest.mark.parametrize(
    "value", [v for v in BAD_NUMBERS if v is not None and not isinstance(v, str)], ids=repr
)
def test_nu_must_be_positive(value: Any):
    with refused(
        ValueError, rf"nu must be a positive number, got {re.escape(repr(value))}", "Start with 0.1"
    ):
        mn.FOBMAML(nu=value)


def test_tangent_takes_no_nu():
    with refused(ValueError, r"nu=0\.1", "tangent", "uses none", "Leave nu out"):
        mn.FOBMAML(nu=0.1, stencil="tangent")


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (
            lambda: mn.FOBMAML(nu=0.1, stencil="central"),
            ["Unknown stencil 'central'", "symmetric", "five-point", "tangent"],
        ),
        (
            lambda: mn.FOBMAML(nu=0.1, nudge="hessian"),
            ["Unknown nudge 'hessian'", "loss, gradient"],
        ),
        (
            lambda: mn.FOBMAML(nu=0.1, start="zero"),
            ["Unknown start 'zero'", "theta, shifted, solution"],
        ),
        (
            lambda: mn.MetaLearner(LINEAR, CE, engine="gpu"),
            ["Unknown engine 'gpu'", "auto, stacked, inplace"],
        ),
        (lambda: mn.MetaLearner(LINEAR, CE, chunk=0), ["chunk .* 0", "solves"]),
        (lambda: mn.ESMAML(sigma=0.0), [r"sigma .*0\.0", "usual"]),
        (lambda: mn.ESMAML(samples=0), ["samples .* 0", "usual"]),
        (lambda: mn.IMAML(cg_steps=0), ["cg_steps .* 0", "5"]),
        (lambda: mn.IMAML(tol=-1.0), [r"tol .*-1\.0"]),
        (lambda: mn.IMAML(damping=-1.0), [r"damping .*-1\.0", "22"]),
        (lambda: mn.IMAML(damping=float("nan")), ["damping .*nan"]),
        (lambda: mn.MAML(truncate=-1), ["truncate .* -1", "Leave it out"]),
        (lambda: mn.Reptile(scale=-1.0), [r"scale .*-1\.0", "Leave it out"]),
        (lambda: mn.GradientDescent(0.1, 5, tol=0.0), [r"tol .*0\.0", "leave it out"]),
        (lambda: mn.GradientDescent(0.1, 5, batch_size=0), ["batch_size .* 0", "Leave it out"]),
        (lambda: mn.Nesterov(0.1, 5, momentum=1.0), [r"momentum .*1\.0", "Leave it out"]),
        (lambda: mn.LBFGS(history=0), ["history .* 0"]),
        (lambda: mn.NewtonCG(damping=-1.0), [r"damping .*-1\.0"]),
        (
            lambda: mn.TorchOptimizer(torch.optim.Adam, 5, {"learning_rate": 0.1}),
            ["Adam .*learning_rate", "Check"],
        ),
        (lambda: mn.TorchOptimizer(torch.optim.Adam, 5, {"lr": -1.0}), [r"Adam .*-1\.0"]),
        (
            lambda: mn.TorchOptimizer(torch.optim.Adam, 5, {"differentiable": True}),
            ["differentiable", "in place"],
        ),
    ],
)
def test_wrong_arguments(make: Callable[[], Any], parts: list[str]):
    with refused(ValueError, *parts):
        make()


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (
            lambda: mn.TorchOptimizer(torch.optim.SGD([torch.zeros(1)], 0.1), 5),
            ["not an instance", "torch.optim.Adam"],
        ),
        (lambda: mn.MetaLearner(torch.tanh, CE), ["nn.Module", "builtin"]),
        (lambda: mn.MetaLearner(LINEAR, "mse"), ["callable", "str", "cross_entropy"]),
    ],
)
def test_wrong_types(make: Callable[[], Any], parts: list[str]):
    with refused(TypeError, *parts):
        make()


# -------------------------------------------------------------------- combinations that cannot work


@pytest.mark.parametrize(
    ("estimator", "solver", "error", "parts"),
    [
        (
            mn.MAML(products="unrolled"),
            mn.TorchOptimizer(torch.optim.SGD, 2, {"lr": 0.1}),
            TypeError,
            [
                "MAML differentiates the solver's steps",
                "TorchOptimizer updates in place",
                "GradientDescent",
                "FOBMAML",
            ],
        ),
        (
            mn.MAML(),
            mn.TorchOptimizer(torch.optim.RMSprop, 2, {"lr": 0.1}),
            TypeError,
            ["SGD, Adam and AdamW", "not of RMSprop", "GradientDescent", "FOBMAML"],
        ),
        (
            mn.MAML(products="difference"),
            mn.TorchOptimizer(torch.optim.Adam, 2, {"amsgrad": True}),
            TypeError,
            [r"not of Adam\(amsgrad=True\)", "FOBMAML"],
        ),
        (
            mn.MAML(products="autograd"),
            mn.TorchOptimizer(torch.optim.SGD, 2, {"lr": 0.1, "maximize": True}),
            TypeError,
            [r"not of SGD\(maximize=True\)", "FOBMAML"],
        ),
        (
            mn.MAML(),
            mn.TorchOptimizer(torch.optim.Adam, 2, tol=1e-3),
            ValueError,
            ["tol=0.001", "Leave tol out"],
        ),
        (mn.MAML(), mn.LBFGS(), TypeError, ["LBFGS", "GradientDescent", "FOBMAML", "IMAML"]),
        (mn.MAML(), mn.NewtonCG(), TypeError, ["NewtonCG", "GradientDescent"]),
        (
            mn.MAML(),
            mn.GradientDescent(0.1, 5, tol=1e-3),
            ValueError,
            ["tol=0.001", "fixed number of steps", "Leave tol out"],
        ),
        (
            mn.FOBMAML(stencil="tangent"),
            mn.LBFGS(),
            TypeError,
            ["tangent", "LBFGS", "GradientDescent or Nesterov", "symmetric"],
        ),
        (
            mn.FOBMAML(stencil="tangent"),
            mn.GradientDescent(0.1, 5, tol=1e-3),
            ValueError,
            ["tol=0.001", "Leave tol out"],
        ),
        (
            mn.FOBMAML(nu=0.1, unshrink=True),
            mn.NewtonCG(),
            TypeError,
            ["unshrink", "NewtonCG", "GradientDescent"],
        ),
        (mn.Reptile(), mn.NewtonCG(), TypeError, ["learning rate", "NewtonCG", r"Reptile\(scale="]),
    ],
    ids=lambda value: (
        repr(value)[:40] if hasattr(value, "steps") or hasattr(value, "accumulate") else ""
    ),
)
def test_estimators_and_solvers_that_do_not_fit(
    estimator: Any, solver: Any, error: type[Exception], parts: list[str]
):
    setup = mlp()
    learner = learner_for(setup, estimator, "auto", solver=solver)
    with refused(error, *parts, model=setup.model):
        learner.backward(setup.tasks)


@pytest.mark.parametrize(
    "estimator",
    [mn.MAML(products="unrolled"), mn.Exact(), mn.FOBMAML(stencil="tangent")],
    ids=lambda e: type(e).__name__,
)
def test_estimators_that_need_the_stacked_engine(estimator: Any):
    setup = mlp()
    learner = learner_for(setup, estimator, "inplace")
    name = type(estimator).__name__
    with refused(
        ValueError,
        rf"{name} runs on stacked, not on inplace",
        'engine="stacked"',
        "FOBMAML",
        model=setup.model,
    ):
        learner.backward(setup.tasks)


def test_exact_refuses_large_models():
    setup = mlp()
    learner = learner_for(setup, mn.Exact(max_parameters=10))
    with refused(ValueError, "38 × 38", "limit is 10", "IMAML", model=setup.model):
        learner.backward(setup.tasks)


class Quantised(Tensor):
    """int8 numbers and a scale, which says of itself that it is float32."""

    @staticmethod
    def __new__(cls, whole: Tensor, scale: Tensor) -> Quantised:
        return Tensor._make_wrapper_subclass(cls, whole.shape, dtype=torch.float32)

    def __init__(self, whole: Tensor, scale: Tensor) -> None:
        self.whole, self.scale = whole, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["whole", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> Quantised:
        return Quantised(inner["whole"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Quantised(args[0].whole, args[0].scale)
        args = [a.whole * a.scale if isinstance(a, Quantised) else a for a in args]
        return func(*args, **(kwargs or {}))


class OnQuantised(nn.Module):
    """A layer whose matrix is quantised, and one that is not."""

    def __init__(self, matrix: Tensor, *, adapts: bool) -> None:
        super().__init__()
        self.matrix = nn.Parameter(matrix, requires_grad=adapts)
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x @ self.matrix.to(x.dtype))


@pytest.mark.parametrize(
    ("matrix", "kind"),
    [
        (lambda: Quantised(torch.ones(3, 3).to(torch.int8), torch.tensor(0.1)), "Quantised"),
        (lambda: torch.ones(3, 3).to(torch.float8_e4m3fn), "torch.float8_e4m3fn"),
    ],
    ids=["quantised", "float8"],
)
def test_numbers_too_coarse_to_adapt(matrix: Callable[[], Tensor], kind: str):
    """They would be moved to the next one or not at all; frozen they are welcome."""
    tasks = mlp().tasks.to(torch.float32)
    options: Any = {"estimator": mn.MAML(products="difference"), "engine": "inplace"}
    model = OnQuantised(matrix(), adapts=True)
    with pytest.raises(TypeError, match=rf"matrix cannot adapt: .*{kind}.*requires_grad_\(False\)"):
        mn.MetaLearner(model, CE, **options).backward(tasks)
    assert all(p.grad is None for p in model.parameters())
    model = OnQuantised(matrix(), adapts=False)
    assert mn.MetaLearner(model, CE, **options).backward(tasks).gradient_norm > 0


def test_whole_numbers_do_not_adapt():
    model = OnQuantised(torch.ones(3, 3, dtype=torch.int8), adapts=False)
    options: Any = {"estimator": mn.MAML(products="difference"), "adapt": ["matrix"]}
    with refused(ValueError, r"only frozen ones \(matrix\)", model=model):
        mn.MetaLearner(model, CE, **options).backward(mlp().tasks.to(torch.float32))


def test_no_parameter_requires_grad():
    setup = mlp()
    learner = learner_for(setup)
    setup.model.requires_grad_(False)
    with refused(
        ValueError, "No parameter", "nothing to meta-learn", "requires_grad=True", model=setup.model
    ):
        mn.MetaLearner(setup.model, CE)
    with refused(ValueError, "No parameter", "requires_grad=True", model=setup.model):
        learner.backward(setup.tasks)
    with refused(ValueError, "No parameter"):
        mn.MetaLearner(nn.Tanh(), CE)


# -------------------------------------------------------------------- models that cannot be stacked


class Item(nn.Module):
    """Reads a number out of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (1 + x.detach().abs().max().item())


class Branch(nn.Module):
    """Chooses its way by its data."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if x.sum() > 0 else x


class Choice(nn.Module):
    """Output whose shape depends on the data."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x[x > 0].mean()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x.unsqueeze(1))[0][:, -1]


@pytest.mark.parametrize("block", [Item, Branch, Choice, Recurrent])
@pytest.mark.parametrize(
    "estimator",
    [mn.FOBMAML(nu=0.1), mn.MAML(), mn.FOBMAML(stencil="tangent")],
    ids=["fd", "maml", "tangent"],
)
def test_a_module_that_cannot_be_stacked_is_named(block: type[nn.Module], estimator: Any):
    model = seeded(
        0,
        lambda: nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Tanh(), block()), nn.Linear(3, 3)),
    )
    learner = learner_for(Setup(model, CE, mlp().tasks), estimator)
    expected = (
        r"1\.1\.lstm \(LSTM\)|1\.1 \(Recurrent\)"
        if block is Recurrent
        else rf"1\.1 \({block.__name__}\)"
    )
    with refused(mn.StackingError, expected, "vmap", 'engine="inplace"', model=model):
        learner.backward(mlp().tasks)


def test_a_loss_that_cannot_be_stacked_is_not_blamed_on_a_module():
    setup = mlp()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return CE(output, target) * (2 if output.sum() > 0 else 1)

    learner = learner_for(Setup(setup.model, loss, setup.tasks))
    with refused(mn.StackingError, "loss", 'engine="inplace"', model=setup.model):
        learner.backward(setup.tasks)


# ------------------------------------------------------------------------------------------- losses


def float_loss(output: Tensor, target: Tensor) -> Any:
    return CE(output, target).item()


def tuple_loss(output: Tensor, target: Tensor) -> Any:
    return CE(output, target), output


def none_loss(output: Tensor, target: Tensor) -> Any:
    return None


def unreduced_loss(output: Tensor, target: Tensor) -> Tensor:
    return CE(output, target, reduction="none")


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (unreduced_loss, r"shape \([69],\)"),
        (float_loss, "float"),
        (tuple_loss, "tuple"),
        (none_loss, "NoneType"),
    ],
    ids=["not a scalar", "a number", "a tuple", "nothing"],
)
def test_the_loss_must_be_a_scalar_tensor(loss: Any, got: str, engine: str):
    setup = mlp()
    learner = learner_for(Setup(setup.model, loss, setup.tasks), engine=engine)
    with refused(ValueError, "scalar", got, "Reduce it over the examples", model=setup.model):
        learner.backward(setup.tasks)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("batch", "got"),
    [
        (lambda x, y: {"x": x, "y": y}, "dict"),
        (lambda x, y: x, "Tensor"),
        (lambda x, y: (x, y, y), "tuple"),
    ],
    ids=["dict", "tensor", "three"],
)
def test_batches_must_be_pairs_for_a_loss_of_output_and_target(batch: Any, got: str, engine: str):
    setup = mlp()
    support, query = (
        batch(*part) for part in (setup.tasks.stacks[0].support, setup.tasks.stacks[0].query)
    )
    learner = learner_for(setup, engine=engine)
    with refused(
        TypeError, r"\(inputs, targets\)", got, r"loss\(model, batch\)", model=setup.model
    ):
        learner.backward(mn.TaskBatch(support, query))


# -------------------------------------------------------------------------------------------- tasks


X, Y = torch.zeros(2, 4, 3), torch.zeros(2, 4, dtype=torch.long)


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (
            lambda: mn.Task((X[0, :0], Y[0, :0]), (X[0], Y[0])),
            ["support set is empty", r"\(0, 3\)", "at least one"],
        ),
        (
            lambda: mn.Task((X[0], Y[0]), (X[0, :0], Y[0, :0])),
            ["query set is empty", r"\(0, 3\)", "at least one"],
        ),
        (
            lambda: mn.TaskBatch((X[:, :0], Y[:, :0]), (X, Y)),
            ["support set is empty", r"\(2, 0, 3\)", "at least one"],
        ),
        (
            lambda: mn.TaskBatch((X, Y), (X[:, :0], Y[:, :0])),
            ["query set is empty", "at least one"],
        ),
        (
            lambda: mn.Task((X[0], Y[0, :3]), (X[0], Y[0])),
            ["support set", "disagree", r"\(4, 3\).*\(3,\)"],
        ),
        (
            lambda: mn.TaskBatch((X, Y), (X[:1], Y[:1])),
            ["number of tasks", r"\(2, 4, 3\)", "TaskBatch.of"],
        ),
        (lambda: mn.TaskBatch((X[:0], Y[:0]), (X[:0], Y[:0])), ["no task", "at least one"]),
        (lambda: mn.TaskBatch.of([]), ["no task", "at least one"]),
        (
            lambda: mn.Task((), (X[0], Y[0])),
            ["support set holds no tensor", "tuple", r"\(inputs, targets\)"],
        ),
        (lambda: mn.Task((X[0], torch.tensor(1.0)), (X[0], Y[0])), [r"shape \(\)", "leading axis"]),
        (lambda: mn.TaskBatch((X, Y[0]), (X, Y)), [r"shape \(4,\)", "after the task axis"]),
    ],
)
def test_tasks_that_are_no_tasks(make: Callable[[], Any], parts: list[str]):
    with refused(ValueError, *parts):
        make()


def test_other_things_than_tasks():
    setup = mlp()
    learner = learner_for(setup)
    for wrong, name in (([(X[0], Y[0])], "tuple"), (X, "Tensor"), ([1], "int")):
        with refused(TypeError, "Expected tasks", name, r"mn\.Task\(support", model=setup.model):
            learner.backward(wrong)


def wide_inputs(setup: Setup) -> mn.TaskBatch:
    (x, y), (u, v) = setup.tasks.stacks[0].support, setup.tasks.stacks[0].query
    return mn.TaskBatch((torch.cat([x, x], -1), y), (torch.cat([u, u], -1), v))


def wide_queries(setup: Setup) -> mn.TaskBatch:
    (x, y), (u, v) = setup.tasks.stacks[0].support, setup.tasks.stacks[0].query
    return mn.TaskBatch((x, y), (torch.cat([u, u], -1), v))


@pytest.mark.parametrize("engine", ["auto", *ENGINES])
@pytest.mark.parametrize("estimator", [mn.FOBMAML(nu=0.1), mn.FOMAML()], ids=["FOBMAML", "FOMAML"])
@pytest.mark.parametrize(
    ("spoil", "which", "shape"), [(wide_inputs, "", r"6\)"), (wide_queries, "query", r"\(9, 6\)")]
)
def test_inputs_of_another_shape(spoil: Any, which: str, shape: str, engine: str, estimator: Any):
    setup = mlp()
    learner = learner_for(setup, estimator, engine)
    with refused(
        ValueError,
        rf"{which} data",
        shape,
        r"0 \(Linear\)",
        "Check that the tasks' shapes",
        model=setup.model,
    ):
        learner.backward(spoil(setup))
    with refused(ValueError, r"0 \(Linear\)", model=setup.model):
        learner.evaluate(spoil(setup))


@pytest.mark.parametrize("engine", ENGINES)
def test_inputs_of_another_shape_deep_inside(engine: str):
    """The sub-module is named where the model fails, not where it begins."""
    setup = conv_net()
    tasks = classification_tasks((1, 8, 8), 3, 2, 6, 9, 0)
    learner = learner_for(setup, engine=engine)
    with refused(ValueError, r"\((6|9), 1, 8, 8\)", r"8 \(Linear\)", "Check", model=setup.model):
        learner.backward(tasks)


@pytest.mark.parametrize("engine", ENGINES)
def test_inputs_that_a_module_asserts_against(engine: str):
    """torch's attention answers a wrong width with an AssertionError; it needs the same help."""
    setup = transformer()
    tasks = classification_tasks((3, 6), 3, 2, 6, 9, 0)
    learner = learner_for(setup, engine=engine)
    with refused(
        ValueError,
        r"\((6|9), 3, 6\)",
        r"encoder\.self_attn \(MultiheadAttention\)",
        "Check",
        model=setup.model,
    ):
        learner.backward(tasks)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "targets",
    [lambda y: y + 3, lambda y: y.unsqueeze(-1).expand(*y.shape, 2), lambda y: y.double()],
    ids=["no such class", "one axis too many", "numbers"],
)
def test_targets_that_do_not_fit_the_loss(targets: Callable[[Tensor], Tensor], engine: str):
    setup = mlp()
    (x, y), (u, v) = setup.tasks.stacks[0].support, setup.tasks.stacks[0].query
    tasks = mn.TaskBatch((x, targets(y).contiguous()), (u, targets(v).contiguous()))
    learner = learner_for(setup, engine=engine)
    with refused(
        ValueError,
        "failed on the (support|query) data of a task",
        "loss",
        "Check",
        model=setup.model,
    ):
        learner.backward(tasks)


@pytest.mark.parametrize("engine", ENGINES)
def test_more_targets_than_outputs(engine: str):
    """torch itself answers this one with a ValueError; it needs the same help as its
    RuntimeErrors.
    """
    setup = mlp()
    model = nn.Sequential(setup.model, Halve())
    learner = learner_for(Setup(model, CE, setup.tasks), engine=engine)
    with refused(ValueError, "failed on the (support|query) data of a task", "Check", model=model):
        learner.backward(setup.tasks)


class Halve(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[: len(x) // 2]


@pytest.mark.parametrize("engine", ["auto", *ENGINES])
@pytest.mark.parametrize("call", ["backward", "evaluate", "adapt"])
def test_data_of_another_dtype(call: str, engine: str):
    setup = mlp()
    tasks = setup.tasks.to(torch.float32)
    learner = learner_for(setup, engine=engine)
    data = tasks[0].support if call == "adapt" else tasks
    parts = [r"torch\.float32", r"\(\d.*3\)", r"torch\.float64", r"tasks\.to\(torch\.float64\)"]
    with refused(ValueError, *parts, model=setup.model):
        getattr(learner, call)(data)


@pytest.mark.parametrize("engine", ["auto", *ENGINES])
@pytest.mark.parametrize("call", ["backward", "evaluate", "adapt"])
def test_data_on_another_device(call: str, engine: str):
    setup = mlp()
    tasks = setup.tasks.to("meta")
    learner = learner_for(setup, engine=engine)
    data = tasks[0].support if call == "adapt" else tasks
    with refused(
        ValueError, "lie on meta", "model on cpu", r"tasks\.to\('cpu'\)", model=setup.model
    ):
        getattr(learner, call)(data)


@pytest.mark.parametrize("engine", ENGINES)
def test_one_task_of_another_dtype_or_device(engine: str):
    """In a batch of tasks that differ, the odd one out is found."""
    setup = mlp()
    learner = learner_for(setup, engine=engine)
    for odd, part in (
        (setup.tasks[1].to(torch.float32), "float32"),
        (setup.tasks[1].to("meta"), "meta"),
    ):
        with refused(ValueError, part, model=setup.model):
            learner.backward([setup.tasks[0], odd, setup.tasks[2]])


def test_parameters_on_several_devices():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match=r"several devices \(cpu, meta\).*one device.*fully_shard"):
        mn.MetaLearner(model, CE)


# --------------------------------------------------------------------------- NaN and Inf in a solve


class Scaled(nn.Module):
    """φ·x, for a loss whose steps can be followed by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 1.0))
        self.spectator = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def blows_up(output: Tensor, target: Tensor) -> Tensor:
    """A mean of squares; gradient descent on a large input overflows after a known number of
    steps.
    """
    return ((output - target) ** 2).mean()


def diverging(bad: int = 2, tasks: int = 4) -> Setup:
    """The support set of one task has inputs of 1e20: its error grows by a factor of about 1e39 a
    step, the loss by 1e78.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tasks, 6, 2, generator=generator, dtype=torch.float64)
    y = torch.randn(tasks, 6, generator=generator, dtype=torch.float64)
    support = x[:, :3].clone()
    support[bad] *= 1e20
    return Setup(
        seeded(0, Scaled), blows_up, mn.TaskBatch((support, y[:, :3]), (x[:, 3:], y[:, 3:]))
    )


def first_bad_step(setup: Setup, task: int, lr: float, lam: float) -> int:
    """The inner step at which loss or gradient of the diverging task stop being finite, found by
    hand.
    """
    x, y = setup.tasks[task].support
    theta = setup.model.weight.detach()
    phi = theta.clone()
    for step in range(100):
        error = x @ phi - y
        loss = (error**2).mean()
        gradient = 2 * x.T @ error / len(y) + lam * (phi - theta)
        if not math.isfinite(loss) or not math.isfinite(torch.linalg.vector_norm(gradient)):
            return step
        phi = phi - lr * gradient
    raise AssertionError("does not diverge")


DIVERGING = {
    "FOBMAML": mn.FOBMAML(nu=0.1),
    "FOBMAML-forward": mn.FOBMAML(nu=0.1, stencil="forward"),
    "FOBMAML-gradient": mn.FOBMAML(nu=0.1, nudge="gradient"),
    "FOBMAML-solution": mn.FOBMAML(nu=0.1, nudge="gradient", start="solution"),
    "tangent": mn.FOBMAML(stencil="tangent"),
    "tangent-gradient": mn.FOBMAML(stencil="tangent", nudge="gradient"),
    "FOMAML": mn.FOMAML(),
    "Reptile": mn.Reptile(),
    "IMAML": mn.IMAML(),
    "MAML": mn.MAML(),
    "Exact": mn.Exact(),
    "ESMAML": mn.ESMAML(samples=1),
}
DIVERGING_RUNS = [(name, engine) for name, e in DIVERGING.items() for engine in e.engines]


@pytest.mark.parametrize(
    ("estimator", "engine", "chunk"),
    [(*run, None) for run in DIVERGING_RUNS]
    + [(*run, 1) for run in DIVERGING_RUNS if run[1] == "stacked"],
)
def test_a_diverging_solve_names_task_step_and_quantity(
    estimator: str, engine: str, chunk: int | None
):
    setup = diverging()
    step = first_bad_step(setup, 2, lr=0.1, lam=2.0)
    assert step == 3, "not the first step, and not the last"
    learner = learner_for(
        setup, DIVERGING[estimator], engine, solver=mn.GradientDescent(0.1, 6), chunk=chunk
    )
    said = [
        f"inner step {step}",
        "(support|nudged) loss|gradient",
        "smaller lr",
        r"Nothing was written to \.grad",
    ]
    with refused(mn.NonFiniteError, "task 2", *said, model=setup.model):
        learner.backward(setup.tasks)


@pytest.mark.parametrize("where", ["inputs", "targets"])
@pytest.mark.parametrize(
    ("estimator", "engine"),
    [r for r in DIVERGING_RUNS if r[0] in ("FOBMAML", "FOMAML", "MAML", "IMAML")],
)
def test_nan_in_the_support_data_shows_at_step_0(estimator: str, engine: str, where: str):
    setup = diverging()
    (x, y), query = setup.tasks.stacks[0].support, setup.tasks.stacks[0].query
    x = x.clamp(-3, 3)
    (x if where == "inputs" else y)[2, 1] = math.nan
    learner = learner_for(setup, DIVERGING[estimator], engine)
    with refused(
        mn.NonFiniteError, "task 2", "inner step 0", "loss", "NaN in the data", model=setup.model
    ):
        learner.backward(mn.TaskBatch((x, y), query))


QUERY_USERS = (
    "FOBMAML",
    "FOBMAML-gradient",
    "tangent",
    "FOMAML",
    "MAML",
    "IMAML",
    "Exact",
    "ESMAML",
)


@pytest.mark.parametrize(
    ("estimator", "engine"), [r for r in DIVERGING_RUNS if r[0] in QUERY_USERS]
)
def test_nan_in_the_query_data_names_the_task(estimator: str, engine: str):
    setup = diverging()
    (x, y), (u, v) = setup.tasks.stacks[0].support, setup.tasks.stacks[0].query
    v[2, 1] = math.inf
    learner = learner_for(setup, DIVERGING[estimator], engine)
    with refused(
        mn.NonFiniteError,
        "task 2",
        "query|nudged|tangent",
        r"Nothing was written to \.grad",
        model=setup.model,
    ):
        learner.backward(mn.TaskBatch((x.clamp(-3, 3), y), (u, v)))


@pytest.mark.parametrize("engine", ENGINES)
def test_the_place_of_a_task_in_a_ragged_batch_is_its_own(engine: str):
    """Tasks of equal shape are stacked together; the error still counts as the user does."""
    setup = diverging()
    (x, y), query = setup.tasks[1].support, setup.tasks[1].query
    tasks = [setup.tasks[0], mn.Task((x[:2], y[:2]), query), setup.tasks[2], setup.tasks[3]]
    learner = learner_for(setup, engine=engine, solver=mn.GradientDescent(0.1, 6))
    with refused(mn.NonFiniteError, "task 2", "inner step 3", model=setup.model):
        learner.backward(tasks)


@pytest.mark.parametrize(
    "solver",
    [mn.Nesterov(0.1, 8), mn.TorchOptimizer(torch.optim.SGD, 8, {"lr": 0.1})],
    ids=["nesterov", "sgd"],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_other_solvers_that_diverge(solver: Any, engine: str):
    setup = diverging()
    learner = learner_for(setup, mn.FOMAML(), engine, solver=solver)
    with refused(mn.NonFiniteError, "task 2", r"inner step [1-7]", "smaller lr", model=setup.model):
        learner.backward(setup.tasks)


@pytest.mark.parametrize("engine", ENGINES)
def test_parameters_that_are_nan(engine: str):
    setup = mlp()
    learner = learner_for(setup, engine=engine)
    with torch.no_grad():
        setup.model[0].weight[0, 0] = math.nan
    with refused(
        mn.NonFiniteError, "task 0", "inner step 0", "the model's parameters", model=setup.model
    ):
        learner.backward(setup.tasks)


def test_adapt_says_that_it_diverges():
    setup = diverging()
    learner = learner_for(setup, solver=mn.GradientDescent(0.1, 6))
    with refused(mn.NonFiniteError, "NaN or Inf", "smaller lr", model=setup.model):
        learner.adapt(setup.tasks[2].support)


@pytest.mark.parametrize("engine", ENGINES)
def test_statistics_say_that_the_residual_grew(engine: str):
    """Short of NaN, the user is told all the same."""
    setup = diverging()
    learner = learner_for(setup, engine=engine, solver=mn.GradientDescent(0.1, 2))
    with pytest.warns(mn.DivergenceWarning):
        stats = learner.backward(setup.tasks)
    assert stats.diverged
    assert "try a smaller lr" in str(stats)
    assert not learner_for(mlp(), engine=engine).backward(mlp().tasks).diverged


def test_a_forward_call_that_fails_leaves_no_graph_behind():
    setup = diverging()
    learner = learner_for(setup, engine="inplace", solver=mn.GradientDescent(0.1, 6))
    with refused(mn.NonFiniteError, "task 2", model=setup.model):
        learner(setup.tasks)


def test_the_setups_of_this_file_are_sound():
    """Without its fault every setup works, so the errors above are about the faults."""
    setup = diverging(bad=0, tasks=1)
    assert first_bad_step(setup, 0, lr=0.1, lam=2.0) == 3
    for engine in ENGINES:
        learner_for(mlp(), engine=engine, solver=SOLVER).backward(SETUPS["mlp"]().tasks)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_nudge_that_goes_too_far_alone_says_so(engine: str):
    setup = mlp()
    far = learner_for(setup, mn.FOBMAML(nu=1e200, start="shifted"), engine)
    with refused(
        mn.NonFiniteError,
        "nudged problem",
        "Without the nudge all was finite",
        'start="theta"',
        model=setup.model,
    ):
        far.backward(setup.tasks)
