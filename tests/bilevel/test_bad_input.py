"""Bad input gets an error that says what, why and what to do."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import metanudge as mn
from bilevel_problems import ridge

PROBLEM = ridge()
DESCENT = mn.GradientDescent(lr=0.1, steps=3)


def attempt(call=mn.hypergradient, **changes):
    arguments = {
        "inner": PROBLEM.inner,
        "outer": PROBLEM.outer,
        "x": PROBLEM.x.clone().requires_grad_(),
        "init": PROBLEM.init,
        **changes,
    }
    return call(
        arguments.pop("inner"),
        arguments.pop("outer"),
        arguments.pop("x"),
        arguments.pop("init"),
        **arguments,
    )


@dataclass(frozen=True)
class AutoNudge:
    """A stand-in for an estimator that nobody here knows."""


NAN = float("nan")
CASES = {
    "x without tensors": (
        {"x": {"a": 1.0}},
        TypeError,
        ["x holds no floating tensor", "dict with no tensors", "differentiate by", "Give a tensor"],
    ),
    "x of integers": (
        {"x": torch.arange(4)},
        TypeError,
        ["x holds no floating tensor", r"\(4,\) int64"],
    ),
    "x is a module": (
        {"x": nn.Linear(2, 1)},
        TypeError,
        ["x holds no floating tensor", "Linear", "named_parameters"],
    ),
    "complex x": (
        {"x": {"z": torch.zeros(2, dtype=torch.complex64)}},
        TypeError,
        [r"x\['z'\] is complex", "view_as_real"],
    ),
    "empty init": (
        {"init": {}},
        TypeError,
        ["init holds no floating tensor", "solve for", "Give a tensor"],
    ),
    "inner without phi": (
        {"inner": lambda x, phi: x.exp().sum()},
        ValueError,
        [r"inner\(x, phi\) does not depend on phi,", "nothing determines", "leave it out of init"],
    ),
    "inner without a part of phi": (
        {
            "init": {"used": PROBLEM.init, "idle": torch.zeros(2)},
            "inner": lambda x, phi: PROBLEM.inner(x, phi["used"]),
            "outer": lambda x, phi: PROBLEM.outer(x, phi["used"]),
        },
        ValueError,
        [r"does not depend on phi\['idle'\],", "leave it out of init"],
    ),
    "inner with detached phi": (
        {"inner": lambda x, phi: PROBLEM.inner(x, phi.detach())},
        ValueError,
        ["inner", "does not depend", "detach"],
    ),
    "outer without phi": (
        {"outer": lambda x, phi: x.exp().sum()},
        ValueError,
        [r"outer\(x, phi\) does not depend on phi", "plain gradient", "Use phi in outer"],
    ),
    "outer without gradients": (
        {"outer": lambda x, phi: PROBLEM.outer(x, phi).detach()},
        ValueError,
        ["outer", "does not depend on phi"],
    ),
    "nobody uses x": (
        {"inner": lambda x, phi: phi.square().sum()},
        ValueError,
        ["Neither inner", "depends on x", "zero", "Use x"],
    ),
    "inner is a vector": (
        {"inner": lambda x, phi: phi.square()},
        TypeError,
        ["inner", "scalar", r"\(4,\) float64", "Reduce it"],
    ),
    "inner has an axis": (
        {"inner": lambda x, phi: phi.square().sum(0, True)},
        TypeError,
        ["inner", "scalar", r"\(1,\) float64"],
    ),
    "outer is a number": (
        {"outer": lambda x, phi: phi.sum().item()},
        TypeError,
        ["outer", "scalar tensor, got float", r"\.item\(\)"],
    ),
    "outer is an integer": (
        {"outer": lambda x, phi: (phi > 0).sum()},
        TypeError,
        ["outer", r"\(\) int64"],
    ),
    "NaN in x": (
        {"x": torch.full((4,), NAN, dtype=torch.float64)},
        mn.NonFiniteError,
        ["NaN or Inf at gradient evaluation 0", "look for NaN in x"],
    ),
    "NaN in init": (
        {"init": torch.full((4,), NAN, dtype=torch.float64)},
        mn.NonFiniteError,
        ["gradient evaluation 0"],
    ),
    "a diverging solve": (
        {"solver": mn.GradientDescent(lr=1e4, steps=200)},
        mn.NonFiniteError,
        [r"NaN or Inf at gradient evaluation [1-9]", "diverge", "smaller lr"],
    ),
    "a diverging unrolled solve": (
        {"solver": mn.GradientDescent(lr=1e4, steps=200), "estimator": mn.MAML()},
        mn.NonFiniteError,
        [r"gradient evaluation [1-9]", "smaller lr"],
    ),
    "a nudge without a minimum": (
        {
            "inner": lambda x, phi: 0.05 * (phi - x).square().sum(),
            "outer": lambda x, phi: (phi**4).sum(),
            "solver": mn.GradientDescent(lr=5.0, steps=200),
            "estimator": mn.FOBMAML(nu=1.0),
        },
        mn.NonFiniteError,
        [r"nudged by ν = 1 became NaN or Inf"],
    ),
    "an infinite derivative": (
        {"outer": lambda x, phi: PROBLEM.outer(x, phi) + (0 * x).sqrt().sum()},
        mn.NonFiniteError,
        ["hypergradient by x is not finite", "overflowed or does not exist"],
    ),
    "reptile": (
        {"estimator": mn.Reptile(), "solver": DESCENT},
        TypeError,
        ["Reptile", "same parameters", "Use FOBMAML"],
    ),
    "an unknown estimator": (
        {"estimator": AutoNudge()},
        TypeError,
        ["must be one of FOBMAML, MAML", "AutoNudge"],
    ),
    "a class for an estimator": (
        {"estimator": mn.MAML},
        TypeError,
        ["must be one of", "Pass an object"],
    ),
    "no solver": ({"solver": torch.optim.SGD}, TypeError, ["solver must be", "mn.LBFGS"]),
    "shifted": (
        {"estimator": mn.FOBMAML(start="shifted")},
        ValueError,
        ["shifted", "no such centre", "start='theta'"],
    ),
    "unshrink": (
        {"estimator": mn.FOBMAML(unshrink=True), "solver": DESCENT},
        ValueError,
        ["unshrink=True", "proximal", "Leave it out"],
    ),
    "tangent of L-BFGS": (
        {"estimator": mn.FOBMAML(stencil="tangent")},
        TypeError,
        ["tangent", "GradientDescent or Nesterov, not LBFGS"],
    ),
    "unrolled L-BFGS": (
        {"estimator": mn.MAML()},
        TypeError,
        ["MAML differentiates the solver's steps", "LBFGS"],
    ),
    "unrolled with tol": (
        {"estimator": mn.MAML(), "solver": mn.GradientDescent(lr=0.1, steps=3, tol=1e-3)},
        ValueError,
        ["tol=0.001"],
    ),
    "minibatches": (
        {"solver": mn.GradientDescent(lr=0.1, steps=3, batch_size=2)},
        ValueError,
        ["batch_size=2", "without examples", "inside inner"],
    ),
    "Nesterov": (
        {"solver": mn.Nesterov(lr=0.1, steps=3)},
        ValueError,
        ["strong convexity", "Give strong_convexity", "momentum=0.9"],
    ),
    "no convexity": (
        {"strong_convexity": -1.0},
        ValueError,
        ["strong_convexity must be a positive number, got -1.0"],
    ),
    "too many parameters": (
        {"estimator": mn.Exact(max_parameters=3)},
        ValueError,
        ["4 × 4", "limit is 3", "IMAML"],
    ),
    "a singular Hessian": (
        {"inner": lambda x, phi: (phi.sum() - x.sum()).square(), "estimator": mn.Exact()},
        ValueError,
        ["Hessian of inner in phi is singular", "does not determine phi", "strictly convex"],
    ),
    "no curvature": (
        {"inner": lambda x, phi: (x * phi).sum(), "solver": DESCENT, "estimator": mn.IMAML()},
        ValueError,
        ["no positive curvature", "residual there is", "strictly convex"],
    ),
}


@pytest.mark.parametrize("call", [mn.hypergradient, mn.solve_bilevel])
@pytest.mark.parametrize("name", CASES)
def test_errors(name, call):
    changes, error, parts = CASES[name]
    changes = dict(changes)
    x = changes.get("x")
    if isinstance(x, torch.Tensor) and x.is_floating_point():
        changes["x"] = x = x.clone().requires_grad_()
    state = torch.get_rng_state()
    with pytest.raises(error) as caught:
        attempt(call, **changes)
    text = str(caught.value)
    for part in parts:
        assert re.search(part, text), f"{part!r} is not in: {text}"
    assert text.rstrip().endswith((".", ")")), "a message is made of sentences"
    assert getattr(x, "grad", None) is None
    assert torch.equal(torch.get_rng_state(), state)


def test_an_error_inside_a_function_says_what_it_was_given():
    with pytest.raises(KeyError) as caught:
        attempt(
            init={"weight": PROBLEM.init}, inner=lambda x, phi: PROBLEM.inner(x, phi["weights"])
        )
    note = "".join(caught.value.__notes__)
    for part in ("inner(x, phi)", "x: (4,) float64", "phi['weight']: (4,) float64"):
        assert part in note
