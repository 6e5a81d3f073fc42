"""Shared layers: parameters that are meta-learned but do not adapt, against dense implicit
differentiation and by hand.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import metanudge as mn
from conformance import (
    Snapshot,
    attention,
    check_chunks,
    check_engines_agree,
    check_pure,
    gradient,
    learner_for,
)
from implicit import implicit, squared_distance
from metanudge.testing.memory import Allocations, trainable_bytes
from problems import Setup, classification_tasks, relative_error, seeded

# torch's own forward-mode decompositions are scripted on first use.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)

PRECISE = mn.GradientDescent(lr=0.4, steps=40)
SHORT = mn.GradientDescent(lr=0.1, steps=3)


class Perceptron(nn.Module):
    """A body and a head, not a chain of layers: the general path of the stacked engine."""

    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.body = nn.Linear(features, hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))


def perceptron() -> Setup:
    return Setup(
        seeded(0, lambda: Perceptron(2, 3, 2)),
        F.cross_entropy,
        classification_tasks((2,), 2, 3, 5, 6, 0),
    )


def chain() -> Setup:
    """The same as a chain of layers."""
    model = seeded(
        0,
        lambda: nn.Sequential(
            OrderedDict(body=nn.Linear(2, 3), tanh=nn.Tanh(), head=nn.Linear(3, 2))
        ),
    )
    return Setup(model, F.cross_entropy, classification_tasks((2,), 2, 3, 5, 6, 0))


def normed() -> Setup:
    """With BatchNorm and dropout in the shared body."""
    layers = OrderedDict(
        conv=nn.Conv2d(1, 2, 3, padding=1),
        norm=nn.BatchNorm2d(2),
        act=nn.Softplus(),
        drop=nn.Dropout(0.3),
        flat=nn.Flatten(),
        head=nn.Linear(32, 2),
    )
    return Setup(
        seeded(0, lambda: nn.Sequential(layers)),
        F.cross_entropy,
        classification_tasks((1, 4, 4), 2, 3, 5, 6, 0),
    )


SETUPS = {"perceptron": perceptron, "chain": chain}
# What adapts: the last layer, the first (so that gradients by shared layers pass through adapted
# ones or not), one tensor of each.
PATTERNS = {"head": "head.*", "body": "body.*", "biases": ["*.bias"]}
EXACT = [
    mn.Exact(),
    mn.IMAML(cg_steps=30, tol=1e-15),
    mn.FOBMAML(stencil="tangent"),
    mn.FOBMAML(stencil="tangent", nudge="gradient"),
]
DIFFERENCES = [
    mn.FOBMAML(nu=5e-3, stencil="five-point"),
    mn.FOBMAML(nu=5e-3, stencil="five-point", nudge="gradient"),
    mn.FOBMAML(nu=5e-3, stencil="five-point", nudge="gradient", start="shifted"),
    mn.FOBMAML(nu=5e-3, stencil="five-point", start="solution"),
]


def truth(setup: Setup, patterns: Any, lam: float = 2.0) -> dict[str, Tensor]:
    part = {"head.*": "head.", "body.*": "body."}.get(
        patterns if isinstance(patterns, str) else "", "bias"
    )
    return implicit(setup, squared_distance(lam), adapts=lambda name: part in name)


@pytest.mark.parametrize("patterns", PATTERNS.values(), ids=PATTERNS)
@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_meta_gradient_is_the_implicit_one(setup, patterns):
    setup = setup()
    exact = truth(setup, patterns)
    for estimator in [*EXACT, *DIFFERENCES]:
        estimate = gradient(setup, estimator, adapt=patterns, solver=PRECISE)
        assert list(estimate) == list(exact) == [n for n, _ in setup.model.named_parameters()]
        for n in exact:
            assert relative_error(estimate[n], exact[n]) < 1e-8, (estimator, n)


@pytest.mark.parametrize(("stencil", "order"), [("forward", 1), ("symmetric", 2)])
@pytest.mark.parametrize("nudge", ["loss", "gradient"])
def test_differences_converge_with_their_order(stencil: str, order: int, nudge: str):
    setup = perceptron()
    exact = truth(setup, "head.*")
    for start in ("theta", "solution"):
        coarse, fine = (
            relative_error(
                gradient(
                    setup,
                    mn.FOBMAML(nu=nu, stencil=stencil, nudge=nudge, start=start),
                    adapt="head.*",
                    solver=PRECISE,
                ),
                exact,
            )
            for nu in (0.04, 0.02)
        )
        assert coarse / fine == pytest.approx(2**order, rel=0.2)


def test_bilevel_gives_the_same():
    """The same problem as a bilevel one: x = (θ, ω), inner = f̂ + ½λ‖φ − θ‖², outer = f."""
    setup = perceptron()
    task = setup.tasks[0]
    names = ("head.weight", "head.bias")
    x = {n: p.detach().clone() for n, p in setup.model.named_parameters()}

    def loss(x: dict[str, Tensor], phi: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(functional_call(setup.model, {**x, **phi}, (batch[0],)), batch[1])

    result = mn.hypergradient(
        lambda x, phi: (
            loss(x, phi, task.support) + sum(((phi[n] - x[n]) ** 2).sum() for n in names)
        ),
        lambda x, phi: loss(x, phi, task.query),
        x,
        {n: x[n].clone() for n in names},
        solver=PRECISE,
        estimator=mn.Exact(),
    )
    estimate = gradient(setup, mn.Exact(), tasks=task, adapt="head.*", solver=PRECISE)
    assert relative_error(estimate, result.gradient) < 1e-8


def test_maml_is_autograd_through_the_steps():
    setup = perceptron()
    model, loss, tasks = setup
    h = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    values = []
    for task in tasks:
        d = {n: torch.zeros_like(p) for n, p in h.items() if n.startswith("head.")}

        def value(d, batch):
            return loss(
                functional_call(model, h | {n: h[n] + leaf for n, leaf in d.items()}, (batch[0],)),
                batch[1],
            )

        for _ in range(3):
            d = {
                n: leaf.clone().requires_grad_() if not leaf.requires_grad else leaf
                for n, leaf in d.items()
            }
            g = torch.autograd.grad(value(d, task.support), list(d.values()), create_graph=True)
            d = {
                n: leaf - 0.1 * (slope + 2.0 * leaf)
                for (n, leaf), slope in zip(d.items(), g, strict=True)
            }
        values.append(value(d, task.query))
    torch.stack(values).mean().backward()
    estimate = gradient(setup, mn.MAML(), adapt="head.*", solver=SHORT)
    assert relative_error(estimate, {n: p.grad for n, p in h.items()}) < 1e-10


def test_fomaml_is_the_query_gradient_at_the_adapted_parameters():
    setup = perceptron()
    learner = learner_for(setup, adapt="head.*", solver=SHORT)
    expected: dict[str, Tensor] = {}
    for task in setup.tasks:
        adapted = learner.adapt(task.support)
        setup.loss(adapted(task.query[0]), task.query[1]).backward()
        expected = {
            n: expected.get(n, 0) + p.grad / len(setup.tasks) for n, p in adapted.named_parameters()
        }
    for engine in ("stacked", "inplace"):
        assert (
            relative_error(
                gradient(setup, mn.FOMAML(), engine, adapt="head.*", solver=SHORT), expected
            )
            < 1e-12
        )


def test_maml_with_no_step_differentiated_is_fomaml():
    setup = perceptron()
    options = {"adapt": "head.*", "solver": SHORT}
    assert (
        relative_error(
            gradient(setup, mn.MAML(truncate=0), **options), gradient(setup, mn.FOMAML(), **options)
        )
        < 1e-12
    )


# ------------------------------------------------------------------------------------------ engines

BOTH = [
    mn.FOBMAML(nu=0.1),
    mn.FOBMAML(nu=0.1, stencil="forward"),
    mn.FOBMAML(nu=0.1, stencil="five-point", nudge="gradient"),
    mn.FOBMAML(nu=0.1, nudge="gradient", start="shifted"),
    mn.FOBMAML(nu=0.1, stencil="forward", start="solution"),
    mn.IMAML(cg_steps=3),
    mn.FOMAML(),
]


@pytest.mark.parametrize("estimator", BOTH, ids=repr)
def test_engines_agree(estimator):
    for setup in (perceptron(), chain(), normed()):
        check_engines_agree(estimator, setup, adapt="head.*", solver=SHORT)
    check_engines_agree(
        estimator,
        perceptron(),
        adapt="*.bias",
        solver=SHORT,
        learn_lam=None if isinstance(estimator, mn.FOMAML) else "tensor",
    )


@pytest.mark.parametrize(
    "estimator", [*BOTH, mn.MAML(), mn.FOBMAML(stencil="tangent"), mn.Exact()], ids=repr
)
def test_chunks_do_not_matter(estimator):
    check_chunks(estimator, perceptron(), adapt="head.*")


@pytest.mark.parametrize("engine", ["stacked", "inplace"])
def test_nothing_in_the_model_changes(engine: str):
    for estimator in (mn.FOBMAML(nu=0.1), mn.FOBMAML(nu=0.1, nudge="gradient"), mn.FOMAML()):
        check_pure(estimator, normed(), engine, adapt="head.*", solver=SHORT)


def test_everything_is_put_back_when_the_loss_raises():
    """Also in the middle of the gradient by the shared layers, which is the last that is asked
    for.
    """
    setup = perceptron()
    before = Snapshot(setup.model)
    calls = 0

    def loss(output: Tensor, target: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise RuntimeError("no more")
        return F.cross_entropy(output, target)

    # tasks × nudges × (steps and the last look, support and query each)
    total = 3 * 2 * (2 * 3 + 2)
    for number in (1, 7, 8, total):
        calls, failing = 0, number
        paper = mn.FOBMAML(nu=0.1)
        learner = mn.MetaLearner(
            setup.model, loss, adapt="head.*", solver=SHORT, estimator=paper, engine="inplace"
        )
        with pytest.raises((RuntimeError, ValueError), match="no more"):
            learner.meta_gradient(setup.tasks, metrics=False)
        before.assert_unchanged()
    failing, calls = 0, 0
    learner.meta_gradient(setup.tasks, metrics=False)
    assert calls == total


def test_cost_is_one_more_look_a_solve():
    setup = perceptron()
    for engine in ("stacked", "inplace"):
        for estimator, support, query in (
            (mn.FOBMAML(nu=0.1), 2 * 3 + 2, 2 * 3 + 2),
            (mn.FOBMAML(nu=0.1, nudge="gradient"), 3 * 3 + 2, 1),
            (mn.FOMAML(), 3, 1),
            (mn.IMAML(cg_steps=2), 3 + 2 + 1, 1),
        ):
            _, stats = learner_for(
                setup, estimator, engine, adapt="head.*", solver=SHORT
            ).meta_gradient(setup.tasks)
            assert (stats.support_gradients, stats.query_gradients) == (support, query), (
                engine,
                estimator,
            )


# ------------------------------------------------------------------------------------- as a learner


def test_all_parameters_get_a_gradient_and_only_the_matching_adapt():
    setup = perceptron()
    learner = learner_for(setup, adapt="head.*", solver=SHORT)
    expected, _ = learner.meta_gradient(setup.tasks, seed=1)
    learner.backward(setup.tasks, seed=1)
    for n, p in setup.model.named_parameters():
        torch.testing.assert_close(p.grad, expected[n])
    adapted = dict(learner.adapt(setup.tasks[0].support).named_parameters())
    for n, p in setup.model.named_parameters():
        assert torch.equal(adapted[n], p) is n.startswith("body.")
    assert all(p.requires_grad for p in adapted.values())


def test_evaluate_adapts_what_adapt_adapts():
    setup = perceptron()
    for engine in ("stacked", "inplace"):
        learner = learner_for(setup, engine=engine, adapt="head.*", solver=SHORT)
        result = learner.evaluate(setup.tasks)
        for place, task in enumerate(setup.tasks):
            adapted = learner.adapt(task.support)
            assert float(result.loss[place]) == pytest.approx(
                setup.loss(adapted(task.query[0]), task.query[1]).item(), rel=1e-10
            )


def test_a_pattern_for_everything_is_the_default():
    setup = perceptron()
    whole = gradient(setup, mn.FOBMAML(nu=0.1))
    for patterns in ("*", ["body.*", "head.*"]):
        assert relative_error(gradient(setup, mn.FOBMAML(nu=0.1), adapt=patterns), whole) == 0


def test_frozen_parameters_are_neither_shared_nor_adapted():
    setup = perceptron()
    setup.model.body.bias.requires_grad_(False)
    estimate = gradient(setup, mn.FOBMAML(nu=0.1), adapt="head.*")
    assert list(estimate) == ["body.weight", "head.weight", "head.bias"]
    assert not setup.model.body.bias.requires_grad


def test_stiffness_by_name_is_asked_for_what_adapts_only():
    setup = perceptron()
    lam = {"head.weight": 2.0, "head.bias": 2.0}
    options = {"adapt": "head.*", "solver": SHORT}
    assert (
        relative_error(
            gradient(setup, mn.FOBMAML(nu=0.1), lam=lam, **options),
            gradient(setup, mn.FOBMAML(nu=0.1), **options),
        )
        < 1e-14
    )
    with pytest.raises(
        ValueError, match=r"unknown: body\.bias.*that adapts: head\.weight, head\.bias"
    ):
        learner_for(setup, lam={**lam, "body.bias": 1.0}, adapt="head.*")


def test_only_the_chosen_parameters_are_part_of_the_learned_stiffness():
    setup = perceptron()
    learner = learner_for(setup, adapt="head.*", learn_lam="tensor")
    assert list(learner.stiffness()) == ["head.weight", "head.bias"]


def test_attention_with_shared_layers_runs_on_both_engines():
    check_engines_agree(
        mn.FOBMAML(nu=0.1, nudge="gradient"), attention(dropout=0.2), adapt="head.*", solver=SHORT
    )


# ------------------------------------------------------------------------------------------- memory


def deep() -> Setup:
    """Layers of equal size, no activations to speak of; the last two adapt."""
    layers = OrderedDict((f"{'body' if i < 6 else 'head'}{i}", nn.Linear(40, 40)) for i in range(8))
    return Setup(
        seeded(0, lambda: nn.Sequential(layers)),
        F.mse_loss,
        mn.TaskBatch(*[(torch.zeros(2, 2, 40).double(),) * 2] * 2),
    )


@pytest.mark.parametrize(
    "estimator", [mn.FOBMAML(nu=0.1), mn.FOBMAML(nu=0.1, nudge="gradient"), mn.FOMAML()], ids=repr
)
def test_memory_in_place_is_a_training_step_and_few_copies(estimator):
    """Of the shared layers: their gradient of the training step and the accumulator, nothing else;
    of the others as ever.
    """
    setup = deep()
    learner = learner_for(setup, estimator, "inplace", adapt="head*", solver=SHORT)
    problem = learner.problem()
    with Allocations() as step:
        for batch in setup.tasks[0].support, setup.tasks[0].query:
            setup.loss(setup.model(batch[0]), batch[1]).backward()
    setup.model.zero_grad()
    with Allocations() as seen:
        result = learner.meta_gradient(setup.tasks, metrics=False)
    del result
    adapting = sum(p.nbytes for p in problem.parameters.values())
    shared = sum(p.nbytes for p in problem.shared.values())
    assert adapting + shared == trainable_bytes(setup.model)
    assert seen.peak <= 1.05 * (step.peak + 3 * adapting + shared)


def test_memory_of_inner_steps_is_that_of_what_adapts():
    """The body's activations are not kept while the head adapts."""
    setup = Setup(
        seeded(
            0,
            lambda: nn.Sequential(
                OrderedDict(
                    a=nn.Linear(4, 256),
                    b=nn.Tanh(),
                    c=nn.Linear(256, 256),
                    d=nn.Tanh(),
                    head=nn.Linear(256, 2),
                )
            ),
        ),
        F.cross_entropy,
        classification_tasks((4,), 2, 1, 600, 2, 0),
    )

    def peak(adapt: str | None) -> int:
        learner = learner_for(setup, engine="inplace", adapt=adapt, solver=SHORT)
        with Allocations() as seen:
            learner.evaluate(setup.tasks)
        return seen.peak

    activations = 600 * 256 * 8
    assert peak("head.*") < peak(None) - activations


# ---------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (
            "heads.*",
            (
                r"adapt='heads\.\*' matches no trainable parameter\. Near matches: head\.weight,"
                r" head\.bias"
            ),
        ),
        (["head.*", "bdy.weight"], r"adapt='bdy\.weight' matches no .* Near matches: body\.weight"),
        ("zzz", r"The trainable parameters are body\.weight, body\.bias, head\.weight, head\.bias"),
        ([], "pattern of parameter names or a list"),
        ([3], "pattern of parameter names or a list"),
        ("", "matches no trainable parameter"),
    ],
)
def test_patterns_that_match_nothing(patterns, message: str):
    with pytest.raises(ValueError, match=message):
        learner_for(perceptron(), adapt=patterns)


def test_a_pattern_that_matches_only_frozen_parameters():
    setup = perceptron()
    setup.model.head.requires_grad_(False)
    with pytest.raises(
        ValueError, match=r"only frozen ones \(head\.weight, head\.bias\)\. Set requires_grad"
    ):
        learner_for(setup, adapt="head.*")


@pytest.mark.parametrize("estimator", [mn.Reptile(), mn.ESMAML(samples=1)], ids=repr)
def test_estimators_without_a_direct_term_say_so(estimator):
    setup = perceptron()
    with pytest.raises(
        ValueError,
        match=r"no gradient for parameters that do not adapt \(body\.weight, body\.bias\)",
    ):
        learner_for(setup, estimator, adapt="head.*").backward(setup.tasks)


def test_unshrink_is_refused():
    setup = perceptron()
    with pytest.raises(ValueError, match="some layers are shared"):
        learner_for(setup, mn.FOBMAML(nu=0.1, unshrink=True), adapt="head.*").backward(setup.tasks)


def test_changing_the_pattern_later_counts():
    setup = perceptron()
    learner = learner_for(setup, adapt="head.*", solver=SHORT)
    before, _ = learner.meta_gradient(setup.tasks, seed=7, metrics=False)
    learner.adapting = "body.*"
    after, _ = learner.meta_gradient(setup.tasks, seed=7, metrics=False)
    assert relative_error(after, gradient(setup, adapt="body.*", solver=SHORT)) == 0
    assert relative_error(after, before) > 1e-3


def test_a_copy_of_the_learner_is_its_own():
    setup = perceptron()
    learner = learner_for(setup, adapt="head.*", learn_lam="scalar", solver=SHORT)
    learner.meta_gradient(setup.tasks)
    twin = copy.deepcopy(learner)
    twin.backward(setup.tasks)
    assert all(p.grad is not None for p in twin.parameters())
    assert all(p.grad is None for p in learner.parameters())
