"""Any pytree, any dtype, any model; and nothing that was given is changed."""

from __future__ import annotations

import copy
from typing import NamedTuple

import pytest
import torch
from torch.func import functional_call
from torch.nn import functional as F

import metanudge as mn
from bilevel_problems import ridge
from metanudge.testing.memory import Allocations
from problems import mlp, relative_error

DOUBLE = {"dtype": torch.float64}


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


def whole(tree) -> torch.Tensor:
    return torch.cat(
        [
            leaf.reshape(-1)
            for leaf in torch.utils._pytree.tree_leaves(tree)
            if isinstance(leaf, torch.Tensor)
        ]
    )


@pytest.mark.parametrize(
    "pack",
    [
        lambda v: v,
        lambda v: {"a": v[:1], "b": v[1:]},
        lambda v: [v[0], v[1:]],
        lambda v: (v[:3], {"deep": [v[3]]}),
        lambda v: Pair(v[:2], v[2:].reshape(2, 1)),
        lambda v: {
            "a": v[:2],
            "name": "text",
            "number": 7,
            "nothing": None,
            "index": torch.arange(2),
            "b": v[2:],
        },
    ],
    ids=["tensor", "dict", "list", "nested", "named tuple", "constants"],
)
@pytest.mark.parametrize(
    "estimator", [mn.FOBMAML(nu=3e-4), mn.Exact(), mn.MAML()], ids=lambda e: type(e).__name__
)
def test_any_structure(pack, estimator):
    problem = ridge(direct=True)

    def plain(tree):
        return whole(
            torch.utils._pytree.tree_map(
                lambda leaf: (
                    leaf if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else None
                ),
                tree,
            )
        )

    def inner(x, phi):
        return problem.inner(plain(x), plain(phi))

    def outer(x, phi):
        return problem.outer(plain(x), plain(phi))

    x, init = pack(problem.x), pack(problem.init)
    solver = (
        mn.GradientDescent(lr=0.4, steps=80)
        if isinstance(estimator, (mn.MAML, mn.FOBMAML))
        else mn.LBFGS()
    )
    result = mn.hypergradient(inner, outer, x, init, solver=solver, estimator=estimator)
    assert relative_error(whole(result.gradient), problem.truth) < 1e-6
    torch.testing.assert_close(plain(result.phi), problem.solution)
    assert torch.utils._pytree.tree_structure(result.phi) == torch.utils._pytree.tree_structure(
        init
    )
    for leaf, gradient in zip(
        *(
            torch.utils._pytree.tree_leaves(t, is_leaf=lambda v: v is None)
            for t in (x, result.gradient)
        ),
        strict=True,
    ):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            assert gradient.shape == leaf.shape
            assert gradient.dtype == leaf.dtype
        else:
            assert gradient is None


def test_nothing_given_is_changed():
    problem = ridge(direct=True)
    x, init = problem.x.clone().requires_grad_(), problem.init.clone().requires_grad_()
    before = copy.deepcopy((x, init))
    state = torch.get_rng_state()
    for estimator in (
        mn.FOBMAML(start="solution"),
        mn.FOBMAML(stencil="tangent"),
        mn.MAML(),
        mn.IMAML(),
        mn.Exact(),
        mn.ESMAML(samples=1),
    ):
        result = mn.hypergradient(
            problem.inner,
            problem.outer,
            x,
            init,
            solver=mn.GradientDescent(lr=0.2, steps=3),
            estimator=estimator,
        )
        assert not result.gradient.requires_grad
        assert not result.phi.requires_grad
    assert x.grad is None
    assert init.grad is None
    assert torch.equal(x, before[0])
    assert torch.equal(init, before[1])
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_gradients_may_be_switched_off_outside(off):
    problem = ridge()
    with off():
        result = mn.hypergradient(problem.inner, problem.outer, problem.x, problem.init)
    assert relative_error(result.gradient, problem.truth) < 1e-5


def test_random_numbers_are_the_same_in_every_solve():
    """A fresh dropout mask in every evaluation would be noise that 1/ν amplifies; and who is
    outside sees none of it.
    """
    problem = ridge()

    def inner(x, phi):
        return problem.inner(x, phi) + 0.1 * ((torch.rand(4, **DOUBLE) - 0.5) * phi).sum()

    state = torch.get_rng_state()
    exact, nudged, again, other = (
        mn.hypergradient(
            inner, problem.outer, problem.x, problem.init, estimator=estimator, seed=seed
        ).gradient
        for estimator, seed in ((mn.Exact(), 0), (None, 0), (None, 0), (None, 1))
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert relative_error(nudged, exact) < 1e-5
    assert torch.equal(nudged, again)
    assert relative_error(other, nudged) > 1e-3


@pytest.mark.parametrize("nudge", ["loss", "gradient"])
def test_gradients_that_share_a_tensor(nudge):
    """a and b enter as a sum, so torch hands out one gradient tensor for both: overwriting it in
    place would count the nudge twice.
    """
    x, init = (
        torch.tensor(0.3, **DOUBLE),
        {"a": torch.zeros(2, **DOUBLE), "b": torch.ones(2, **DOUBLE)},
    )

    def inner(x, phi):
        return 0.5 * (phi["a"] + phi["b"] - x).square().sum()

    def outer(x, phi):
        return ((phi["a"] + phi["b"]) ** 3).sum()

    with torch.enable_grad():
        a, b = (leaf.clone().requires_grad_() for leaf in init.values())
        shared = torch.autograd.grad(inner(x, {"a": a, "b": b}), (a, b))
    assert shared[0].data_ptr() == shared[1].data_ptr()
    solver = mn.GradientDescent(lr=0.3, steps=60)
    result = mn.hypergradient(
        inner, outer, x, init, solver=solver, estimator=mn.FOBMAML(nu=1e-4, nudge=nudge)
    )
    torch.testing.assert_close(result.gradient, 2 * 3 * x**2, rtol=1e-6, atol=0)  # a + b = x


def test_a_module_with_weights_for_its_examples():
    """Data hyper-cleaning in small: the weights of training examples of a tanh network, against the
    dense implicit gradient.
    """
    setup = mlp(tasks=1, features=2, hidden=3, classes=2)
    model = setup.model.double()
    (inputs, labels), (validation, truth) = setup.tasks[0].support, setup.tasks[0].query

    def inner(x, phi):
        losses = F.cross_entropy(functional_call(model, phi, (inputs,)), labels, reduction="none")
        return (torch.sigmoid(x) * losses).mean() + 0.05 * sum(
            p.square().sum() for p in phi.values()
        )

    def outer(x, phi):
        return F.cross_entropy(functional_call(model, phi, (validation,)), truth)

    x, init = torch.zeros(len(labels), **DOUBLE), dict(model.named_parameters())
    exact = mn.hypergradient(inner, outer, x, init, estimator=mn.Exact())
    nudged = mn.hypergradient(inner, outer, x, init)
    implicit = mn.hypergradient(inner, outer, x, init, estimator=mn.IMAML(cg_steps=60))
    assert exact.residual < 1e-8
    assert relative_error(nudged.gradient, exact.gradient) < 1e-4
    assert relative_error(implicit.gradient, exact.gradient) < 1e-6
    assert list(nudged.phi) == list(init)


class FirstOrderOnly(torch.autograd.Function):
    """t² whose derivative cannot be differentiated again, as that of fused kernels."""

    @staticmethod
    def forward(ctx, t):
        ctx.save_for_backward(t)
        return t.square()

    @staticmethod
    def backward(ctx, g):
        return Derivative.apply(*ctx.saved_tensors, g)


class Derivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t, g):
        return 2 * t * g

    @staticmethod
    def backward(ctx, h):
        raise RuntimeError("derivative for fused_square_backward is not implemented")


def test_functions_without_second_derivatives():
    x, init = torch.tensor(0.3, **DOUBLE), torch.zeros(3, **DOUBLE)

    def inner(x, phi):
        return FirstOrderOnly.apply(phi - 1).sum() + x.exp() * FirstOrderOnly.apply(phi).sum()

    def outer(x, phi):
        return phi.sum()

    expected = -3 * x.exp() / (1 + x.exp()) ** 2
    for nudge in ("loss", "gradient"):
        result = mn.hypergradient(inner, outer, x, init, estimator=mn.FOBMAML(nu=1e-4, nudge=nudge))
        torch.testing.assert_close(result.gradient, expected, rtol=1e-6, atol=0)
    descent = mn.GradientDescent(lr=0.2, steps=3)
    for estimator in (
        mn.IMAML(),
        mn.Exact(),
        mn.MAML(products="unrolled"),
        mn.MAML(products="autograd"),
        mn.FOBMAML(stencil="tangent"),
    ):
        with pytest.raises(RuntimeError) as caught:
            mn.hypergradient(inner, outer, x, init, solver=descent, estimator=estimator)
        assert "needs first derivatives only" in "".join(caught.value.__notes__)


@pytest.mark.parametrize(
    ("estimator", "grows"),
    [
        (mn.FOBMAML(), False),
        (mn.FOBMAML(nudge="gradient"), False),
        (mn.FOBMAML(stencil="tangent"), False),
        (mn.MAML(), True),
    ],
    ids=["difference", "gradient nudge", "tangent", "unrolled"],
)
def test_memory_against_steps(estimator, grows):
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(50, 400, generator=generator, **DOUBLE)
    x, init = torch.zeros(400, **DOUBLE), torch.zeros(400, **DOUBLE)

    def inner(x, phi):
        return (A @ phi).tanh().square().mean() + (x.exp() * (phi - 1).square()).mean()

    def outer(x, phi):
        return phi.square().mean()

    peaks = []
    for steps in (5, 40):
        with Allocations() as seen:
            mn.hypergradient(
                inner,
                outer,
                x,
                init,
                solver=mn.GradientDescent(lr=0.1, steps=steps),
                estimator=estimator,
            )
        peaks.append(seen.peak)
    if grows:
        assert peaks[1] > 4 * peaks[0]
    else:
        assert peaks[1] < 1.1 * peaks[0]
