"""What every estimator must do on every engine, as checks that a test calls; plus the oracles and
snapshots the tests share.

Estimators, solvers, sources and models are picked up from their registries (`ESTIMATORS`,
`SOLVERS`, `SOURCES`, `MODELS`); what is not listed here is made without arguments. A new setup is
one line in `SETUPS`:

    for estimator in estimators():
        check_engines_agree(estimator, SETUPS["mlp"]())
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import metanudge as mn
from metanudge.estimators import ESTIMATORS, Estimator
from metanudge.estimators.ladder import LADDER
from metanudge.models import MODELS
from metanudge.objective import takes_model
from metanudge.solvers import SOLVERS, Solver
from metanudge.tasks import SOURCES, Episodes, Labelled
from metanudge.tasks.task_rows import Part, TaskRows
from problems import Setup, classification_tasks, conv_net, mlp, relative_error, seeded, transformer

SOLVER = mn.GradientDescent(lr=0.1, steps=2)
# where it is about how tasks are put together, not about the steps
ONE_STEP = mn.GradientDescent(lr=0.1, steps=1)
STENCILS = ("forward", "symmetric", "five-point", "tangent")
NUDGES = ("loss", "gradient")
STARTS = ("theta", "shifted", "solution")

# Options that make an estimator quick or valid; anything not listed is made without arguments.
OPTIONS: dict[type, dict[str, Any]] = {mn.ESMAML: {"samples": 2}, mn.IMAML: {"cg_steps": 3}}

# What the estimators that know no bilevel problem say of it.
NOT_BILEVEL = {
    "Reptile": "no such direction",
    **{f"FOBMAML-{s}-{n}-shifted": "no such centre" for s in STENCILS for n in NUDGES},
}

# Estimators that draw other random numbers for a task when its place in the batch changes, by
# design.
DRAWS_BY_PLACE = (mn.ESMAML,)


def estimators() -> list[Estimator]:
    """Every estimator the package exports, and FOBMAML in all its forms."""
    default = [cls(**OPTIONS.get(cls, {})) for cls in ESTIMATORS]
    forms = [
        mn.FOBMAML(
            nu=None if stencil == "tangent" else 0.1, stencil=stencil, nudge=nudge, start=start
        )
        for stencil, nudge, start in itertools.product(STENCILS, NUDGES, STARTS)
    ]
    return [e for e in default if e not in forms] + forms


def solvers() -> dict[str, Solver]:
    """Every solver in the registry, some in several forms."""
    forms = {
        "gd": mn.GradientDescent(lr=0.1, steps=3),
        "gd-tol": mn.GradientDescent(lr=0.3, steps=20, tol=1e-2),
        "gd-minibatch": mn.GradientDescent(lr=0.1, steps=3, batch_size=3),
        "nesterov": mn.Nesterov(lr=0.1, steps=4),
        "nesterov-minibatch": mn.Nesterov(lr=0.1, steps=4, batch_size=3),
        "sgd-minibatch": mn.TorchOptimizer(
            torch.optim.SGD, 3, {"lr": 0.1, "momentum": 0.9}, batch_size=4
        ),
        "adam": mn.TorchOptimizer(torch.optim.Adam, 3, {"lr": 0.02}),
        "lbfgs": mn.LBFGS(steps=6, tol=1e-13),
        "newton": mn.NewtonCG(steps=3, cg_steps=4),
    }
    listed = {type(solver) for solver in forms.values()}
    return forms | {kind.__name__: kind() for kind in SOLVERS if kind not in listed}


def rows_as_inputs(classes: int = 40, each: int = 30, **options: Any) -> Labelled:
    """A source whose inputs are the row numbers themselves, so that a test sees which examples were
    drawn.
    """
    options = {"ways": 5, "shots": 3, "queries": 4} | options
    return Labelled(np.arange(classes * each), np.arange(classes * each) % classes, **options)


def given_tasks() -> Episodes:
    """Tasks of different sizes, divided at random in training."""
    x = torch.linspace(-1, 1, 1000, dtype=torch.float64)[:, None]
    parts, first = [], 0
    for size in range(20, 40):
        rows = np.arange(first, first := first + size)
        parts.append((Part(rows, size // 2),))
    rows = TaskRows(
        "regression", x, x.square(), tuple(map(str, range(20))), tuple(parts), ("square",)
    )
    return mn.tasks.Given(rows)


def sources() -> dict[str, Callable[[], Episodes]]:
    """Every source in the registry but Omniglot, whose files are not everywhere; and the others."""
    forms: dict[str, Callable[[], Episodes]] = {
        "labelled": rows_as_inputs,
        "labelled, large": lambda: rows_as_inputs(each=200),
        "mnist1d": lambda: mn.tasks.MNIST1D(num_samples=1000, queries=3, cache=False),
        "sinusoid": lambda: mn.tasks.Sinusoid(shots=3, queries=5, noise=0.1),
        "quadratic": lambda: mn.tasks.Quadratic(dim=5),
        "given": given_tasks,
        "labelled, of many sizes": lambda: rows_as_inputs(ways=(2, 4), shots=(1, 3), alike=3),
    }
    return {name: kind for name, kind in SOURCES.items() if name != "omniglot"} | forms


def models() -> dict[str, tuple[dict[str, Any], tuple[int, ...]]]:
    """Options and the shape of a batch of inputs for every model in the registry."""
    cases: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
        "conv1d": ({"ways": 3}, (15, 40)),
        "conv4": ({"ways": 5, "channels": 8}, (5, 1, 28, 28)),
        "mlp": ({"in_features": 6, "out_features": 4, "hidden": (7,)}, (9, 6)),
        "transformer": (
            {"ways": 5, "d_model": 16, "heads": 4, "hidden": 20, "length": 6},
            (4, 6, 16),
        ),
    }

    def sized(model: Callable[..., nn.Module]) -> dict[str, Any]:
        sizes = {"in_features": 6, "out_features": 4, "ways": 4}
        accepted = inspect.signature(model).parameters
        return {name: size for name, size in sizes.items() if name in accepted}

    return {name: cases.get(name) or (sized(model), (9, 6)) for name, model in MODELS.items()}


def name(estimator: Estimator) -> str:
    """A short name for test ids."""
    if isinstance(estimator, mn.FOBMAML):
        return f"FOBMAML-{estimator.stencil}-{estimator.nudge}-{estimator.start}"
    return type(estimator).__name__


def on_both(estimator: Estimator) -> bool:
    """Whether the estimator runs on both engines."""
    return set(estimator.engines) == {"stacked", "inplace"}


class Attention(nn.Module):
    """A Transformer block on `scaled_dot_product_attention`, with dropout on contiguous tensors
    only.

    Both engines draw a mask in memory order; for a transposed tensor they would draw the same
    numbers in another order.
    """

    def __init__(self, width: int, heads: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        n, positions, width = x.shape
        q, k, v = self.qkv(x).view(n, positions, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, positions, width)
        x = self.norm(x + self.dropout(self.out(mixed).contiguous()))
        return self.head(x.mean(1))


def attention(*, dropout: float = 0.0, tasks: int = 3, seed: int = 0) -> Setup:
    """The block above as a classifier."""
    model = seeded(seed, lambda: Attention(4, 2, 3, dropout))
    return Setup(model, F.cross_entropy, classification_tasks((3, 4), 3, tasks, 5, 7, seed))


def small(**options: Any) -> Setup:
    """A perceptron of 17 parameters: small enough for dense Hessians in every check."""
    return mlp(**{"features": 2, "hidden": 3, "classes": 2, "support": 5, "query": 6, **options})


SETUPS: dict[str, Callable[..., Setup]] = {
    "mlp": mlp,
    "conv_net": conv_net,
    "transformer": transformer,
    "mlp-dropout": lambda **options: mlp(dropout=0.4, **options),
    "conv_net-dropout": lambda **options: conv_net(dropout=0.4, **options),
    "attention-dropout": lambda **options: attention(dropout=0.4, **options),
}


def learner_for(
    setup: Setup, estimator: Estimator | None = None, engine: str = "stacked", **options: Any
) -> mn.MetaLearner:
    """A learner with the settings of these tests."""
    options = {"lam": 2.0, "solver": SOLVER, **options}
    return mn.MetaLearner(setup.model, setup.loss, estimator=estimator, engine=engine, **options)


def gradient(
    setup: Setup,
    estimator: Estimator | None = None,
    engine: str = "stacked",
    tasks: Any = None,
    *,
    first: int = 0,
    **options: Any,
) -> dict[str, Tensor]:
    """The meta-gradient of a setup, always with the same draws."""
    learner = learner_for(setup, estimator, engine, **options)
    return learner.meta_gradient(
        setup.tasks if tasks is None else tasks, seed=7, metrics=False, first=first
    )[0]


def rounding(estimator: Estimator | None = None) -> float:
    """How far apart, relatively, two orders of summation may leave a meta-gradient in float64; that
    of the default without an estimator.

    Sums of a few hundred terms come out within 1e-12. A difference divides what rounding does to φ
    by ν: some ten operations in each of a few steps are at most 16 ε, and λ‖φ − θ‖ is at most ten
    times as large as the meta-gradients of these problems.
    """
    nu = getattr(mn.FOBMAML() if estimator is None else estimator, "nu", None)
    smallest = LADDER[-1] if nu == "auto" else nu
    return 1e-12 + (0.0 if smallest is None else 160 * torch.finfo(torch.float64).eps / smallest)


# ------------------------------------------------------------------------------------------- checks


def check_engines_agree(
    estimator: Estimator, setup: Setup, *, tol: float = 1e-10, **options: Any
) -> float:
    """Both engines give the same meta-gradient and the same statistics; returns the relative
    error.
    """
    results = {
        engine: learner_for(setup, estimator, engine, **options).meta_gradient(setup.tasks, seed=7)
        for engine in ("stacked", "inplace")
    }
    (stacked, stats), (inplace, other) = results["stacked"], results["inplace"]
    own = [n for n in stacked if not n.startswith("log_lam.")]
    assert list(stacked) == list(inplace)
    assert own == [n for n, p in setup.model.named_parameters() if p.requires_grad]
    error = relative_error(stacked, inplace)
    assert error < tol, f"the engines differ by {error:.1e}"
    # Rows that stop early still ride along with the others on the stacked engine: there the number
    # of gradients differs.
    different = {"engine", "path", "products", "extra"}
    # Measured between φ_ν and φ_−ν, or at each (`test_metrics.py`): O(ν²) apart.
    if stats.nudged != other.nudged:
        different |= {"nudged", "query_loss", "query_accuracy"}
    # All steps at once keep each gradient's graph; one at a time, a product makes its own.
    if stats.products != other.products:
        different |= {"support_gradients"}
    if getattr(options.get("solver", SOLVER), "tol", None) is not None:
        different |= {"support_gradients", "query_gradients", "hessian_products"}
    for field in fields(stats):
        a, b = getattr(stats, field.name), getattr(other, field.name)
        if field.name not in different and a is not None:
            assert math.isclose(a, b, rel_tol=1e-8, abs_tol=1e-12) or (
                math.isnan(a) and math.isnan(b)
            ), (field.name, a, b)
    return error


def check_chunks(estimator: Estimator, setup: Setup, **options: Any) -> float:
    """`chunk` bounds the memory and does not change the result; returns the largest relative
    error.
    """
    options = {"solver": ONE_STEP, **options}
    whole = gradient(setup, estimator, **options)
    errors = [
        relative_error(gradient(setup, estimator, chunk=chunk, **options), whole)
        for chunk in (1, 2, 3)
    ]
    assert max(errors) < rounding(estimator), f"chunks change the result by {max(errors):.1e}"
    return max(errors)


def ragged(setup: Setup) -> mn.TaskBatch:
    """The setup's tasks cut to different sizes; the first and the last keep theirs."""
    tasks = list(setup.tasks)
    cut = [tasks[0]]
    for shorter, task in enumerate(tasks[1:-1], start=1):
        (x, y), (u, v) = task.support, task.query
        cut.append(mn.Task((x[shorter:], y[shorter:]), (u[: -2 * shorter], v[: -2 * shorter])))
    return mn.TaskBatch.of([*cut, tasks[-1]])


def check_ragged(estimator: Estimator, setup: Setup, engine: str, **options: Any) -> float:
    """Tasks of different sizes give the mean of what each gives alone at its place; returns the
    relative error.
    """
    options = {"solver": ONE_STEP, **options}
    batch = ragged(setup)
    assert len(batch.stacks) == len(batch) - 1, (
        "the first and the last task share a stack, with another between them"
    )
    together = gradient(setup, estimator, engine, batch, **options)
    alone = [
        gradient(setup, estimator, engine, task, first=place, **options)
        for place, task in enumerate(batch)
    ]
    error = relative_error(together, mean(alone))
    assert error < rounding(estimator), f"a ragged batch is {error:.1e} off the mean of its tasks"
    return error


def check_permutation(estimator: Estimator, setup: Setup, engine: str, **options: Any) -> float:
    """The order of the tasks does not matter, also not with tasks of different sizes; returns the
    relative error.
    """
    options = {"solver": ONE_STEP, **options}
    batch = ragged(setup)
    order = [len(batch) - 1, *range(len(batch) - 1)]
    permuted = mn.TaskBatch.of([batch[i] for i in order])
    error = relative_error(
        gradient(setup, estimator, engine, permuted, **options),
        gradient(setup, estimator, engine, batch, **options),
    )
    assert error < rounding(estimator), f"another order changes the result by {error:.1e}"
    return error


def check_pure(estimator: Estimator, setup: Setup, engine: str, **options: Any) -> None:
    """`meta_gradient` changes neither parameters, buffers, `.grad` nor random states, and says the
    same when asked again.
    """
    give_gradients(setup.model)
    learner = learner_for(setup, estimator, engine, **options)
    before = Snapshot(setup.model)
    first, _ = learner.meta_gradient(setup.tasks, seed=3)
    before.assert_unchanged()
    second, _ = learner.meta_gradient(setup.tasks, seed=3, metrics=False)
    before.assert_unchanged()
    assert all(torch.equal(first[n], second[n]) for n in first), (
        "the same seed must give the same bits"
    )


def check_bilevel(
    estimator: Estimator, setup: Setup, *, shared: str = "0.", lam: float = 2.0
) -> float:
    """Written as two functions of (shared layers, the others), a task has the same gradient by the
    shared layers; the relative error.
    """
    model, loss, tasks = setup
    theta = {n: p.detach() for n, p in model.named_parameters()}
    x, init = (
        {n: p for n, p in theta.items() if n.startswith(shared) == wanted}
        for wanted in (True, False)
    )

    def value(batch: Any, x: dict[str, Tensor], phi: dict[str, Tensor]) -> Tensor:
        return loss(functional_call(model, x | phi, (batch[0],)), batch[1])

    def inner(x: dict[str, Tensor], phi: dict[str, Tensor]) -> Tensor:
        return value(tasks[0].support, x, phi) + 0.5 * lam * sum(
            (phi[n] - init[n]).square().sum() for n in phi
        )

    def outer(x: dict[str, Tensor], phi: dict[str, Tensor]) -> Tensor:
        return value(tasks[0].query, x, phi)

    found = mn.hypergradient(inner, outer, x, init, solver=SOLVER, estimator=estimator).gradient
    expected = gradient(setup, estimator, tasks=tasks[0], lam=lam, adapt=[f"{n}*" for n in init])
    error = relative_error(found, {n: expected[n] for n in x})
    assert error < 1e-11, f"the bilevel problem has another gradient: {error:.1e}"
    return error


# ------------------------------------------------------------------------------------------- oracle


def by_hand(
    setup: Setup,
    *,
    tasks: mn.TaskBatch | None = None,
    lam: float = 2.0,
    lr: float = SOLVER.lr,
    steps: int = SOLVER.steps,
    nu: float = 0.1,
) -> dict[str, Tensor]:
    """FO-B-MAML, symmetric loss nudge, as one would write it without the package: plain loops on
    copies, φ itself, no dropout.
    """
    model, loss, batch = setup

    def solve(task: mn.Task, offset: float) -> dict[str, Tensor]:
        phi = copy.deepcopy(model)
        theta = {n: p.detach().clone() for n, p in phi.named_parameters() if p.requires_grad}
        for _ in range(steps):
            phi.zero_grad()
            (
                evaluate(phi, loss, task.support) + offset * evaluate(phi, loss, task.query)
            ).backward()
            with torch.no_grad():
                for n, p in phi.named_parameters():
                    if p.requires_grad:
                        g = torch.zeros_like(p) if p.grad is None else p.grad
                        p -= lr * (g + lam * (p - theta[n]))
        return {n: p.detach() for n, p in phi.named_parameters() if p.requires_grad}

    rows = []
    for task in batch if tasks is None else tasks:
        plus, minus = solve(task, nu), solve(task, -nu)
        rows.append({n: -lam * (plus[n] - minus[n]) / (2 * nu) for n in plus})
    return mean(rows)


def evaluate(model: nn.Module, loss: Callable[..., Tensor], batch: Any) -> Tensor:
    """The loss of a batch, for both forms of loss."""
    if takes_model(loss):
        return loss(model, batch)
    inputs, target = batch
    return loss(model(inputs), target)


def mean(gradients: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of gradients."""
    return {n: torch.stack([g[n] for g in gradients]).mean(0) for n in gradients[0]}


# ---------------------------------------------------------------------------------------- snapshots


def give_gradients(model: nn.Module) -> None:
    """Put a `.grad` on every trainable parameter but the last, as if a user were accumulating."""
    generator = torch.Generator().manual_seed(5)
    trainable = [p for p in model.parameters() if p.requires_grad]
    for p in trainable[:-1]:
        p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p)


class Snapshot:
    """Everything in a module and in the random generators that must come out of a call as it went
    in, bit by bit.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._parameters = [(n, p, p.detach().clone()) for n, p in module.named_parameters()]
        self._buffers = [(n, b, b.detach().clone()) for n, b in module.named_buffers()]
        self._grads = [
            (n, p, p.grad, None if p.grad is None else p.grad.clone())
            for n, p in module.named_parameters()
        ]
        self._flags = self._flags_now()
        self._random = self._random_now()

    def assert_unchanged(self) -> None:
        """Raise where anything differs."""
        assert [n for n, _ in self._module.named_parameters()] == [n for n, *_ in self._parameters]
        assert [n for n, _ in self._module.named_buffers()] == [n for n, *_ in self._buffers]
        now = dict(self._module.named_parameters()) | dict(self._module.named_buffers())
        for kind, kept in (("parameter", self._parameters), ("buffer", self._buffers)):
            for n, tensor, value in kept:
                assert now[n] is tensor, f"{kind} {n} was replaced by another tensor"
                assert identical(tensor, value), f"{kind} {n} has changed"
        for n, parameter, grad, value in self._grads:
            assert parameter.grad is grad, f"the .grad of {n} was replaced by another tensor"
            assert grad is None or identical(grad, value), f"the .grad of {n} has changed"
        assert self._flags_now() == self._flags, (
            "requires_grad, training mode or hooks have changed"
        )
        for (what, state), (_, kept) in zip(self._random_now(), self._random, strict=True):
            assert state == kept, f"the random state of {what} has changed"

    def _flags_now(self) -> tuple[list[bool], ...]:
        modules, parameters = list(self._module.modules()), list(self._module.parameters())
        hooks = [bool(hooks) for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        hooks += [
            bool(hooks)
            for p in parameters
            for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks)
        ]
        return [p.requires_grad for p in parameters], [m.training for m in modules], hooks

    @staticmethod
    def _random_now() -> list[tuple[str, object]]:
        numpy_state = np.random.get_state()  # noqa: NPY002  (the global state is what must not change)
        return [
            ("torch", torch.get_rng_state().tolist()),
            ("random", random.getstate()),
            ("numpy", (numpy_state[1].tolist(), numpy_state[2])),
        ]


def identical(a: Tensor, b: Tensor) -> bool:
    """Same dtype, shape and bits (NaN equals NaN)."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
    )
