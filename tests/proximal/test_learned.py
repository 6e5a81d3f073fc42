"""Learned stiffness: its meta-gradient against dense implicit differentiation and against autograd
through the steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import metanudge as mn
from conformance import learner_for, small
from implicit import implicit
from metanudge.testing.memory import Allocations, trainable_bytes
from problems import Setup, quadratic, relative_error, seeded

# torch's own forward-mode decompositions are scripted on first use.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)

PRECISE = mn.GradientDescent(lr=0.4, steps=70)
FORMS = ("scalar", "tensor", "parameter")
PROBLEMS: dict[str, Callable[[], Setup]] = {
    "quadratic": lambda: quadratic(5.0, dim=6, split=2, same=False),
    "mlp": small,
}


def start(setup: Setup, per: str) -> float | dict[str, float | Tensor]:
    """Stiffnesses that differ wherever they may."""
    if per == "scalar":
        return 1.5
    generator = torch.Generator().manual_seed(3)
    values: dict[str, float | Tensor] = {}
    for place, (n, p) in enumerate(setup.model.named_parameters()):
        values[n] = (
            1.0 + 0.5 * place
            if per == "tensor"
            else 1.0 + torch.rand(p.shape, generator=generator, dtype=torch.float64)
        )
    return values


def learner(
    setup: Setup, per: str, estimator, solver=PRECISE, engine: str = "stacked"
) -> mn.MetaLearner:
    return learner_for(
        setup, estimator, engine, solver=solver, lam=start(setup, per), learn_lam=per
    )


def truth(setup: Setup, per: str) -> dict[str, Tensor]:
    """By `implicit`, with ρ spread over the parameters as `per` says."""
    shapes = {n: p.shape for n, p in setup.model.named_parameters()}
    rho = {
        k: p.detach().clone()
        for k, p in learner(setup, per, mn.Exact()).named_parameters()
        if k.startswith("log_lam.")
    }

    def term(phi: Tensor, theta: Tensor, rho: dict[str, Tensor]) -> Tensor:
        each = [
            rho["log_lam.all" if per == "scalar" else f"log_lam.{n}"].expand(shape).flatten()
            for n, shape in shapes.items()
        ]
        return 0.5 * (torch.cat(each).exp() * (phi - theta) ** 2).sum()

    return implicit(setup, term, rho=rho)


def errors(estimate: dict[str, Tensor], exact: dict[str, Tensor]) -> tuple[float, float]:
    """Relative errors of the gradient by θ and by log λ."""
    assert list(estimate) == list(exact)
    parts = [{n for n in exact if n.startswith("log_lam.") is learned} for learned in (False, True)]
    assert all(parts)
    return tuple(
        relative_error({n: estimate[n] for n in part}, {n: exact[n] for n in part})
        for part in parts
    )


@pytest.mark.parametrize("per", FORMS)
@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("nudge", ["loss", "gradient"])
def test_symmetric_nudges_match_implicit_differentiation(problem: str, per: str, nudge: str):
    setup = PROBLEMS[problem]()
    exact = truth(setup, per)
    for begin in ("theta", "shifted", "solution") if per == "tensor" else ("theta",):
        estimator = mn.FOBMAML(nu=3e-4, nudge=nudge, start=begin)
        estimate, _ = learner(setup, per, estimator).meta_gradient(setup.tasks)
        assert max(errors(estimate, exact)) < 1e-6, begin


@pytest.mark.parametrize("stencil", ["forward", "five-point"])
@pytest.mark.parametrize("nudge", ["loss", "gradient"])
def test_the_other_stencils_converge_with_their_order(stencil: str, nudge: str):
    setup = small()
    exact = truth(setup, "tensor")
    order = {"forward": 1, "five-point": 4}[stencil]
    sizes = (0.2, 0.1) if stencil == "five-point" else (1e-2, 5e-3)
    for begin in ("theta", "solution"):
        found = [
            errors(
                learner(
                    setup, "tensor", mn.FOBMAML(nu=nu, stencil=stencil, nudge=nudge, start=begin)
                ).meta_gradient(setup.tasks)[0],
                exact,
            )
            for nu in sizes
        ]
        for coarse, fine in zip(*found, strict=True):
            assert coarse / fine == pytest.approx(2**order, rel=0.35)


@pytest.mark.parametrize("per", FORMS)
@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize(
    "estimator",
    [
        mn.Exact(),
        mn.IMAML(cg_steps=40, tol=1e-14),
        mn.FOBMAML(stencil="tangent"),
        mn.FOBMAML(stencil="tangent", nudge="gradient", start="solution"),
    ],
    ids=["Exact", "IMAML", "tangent", "tangent-gradient"],
)
def test_derivatives_without_a_difference_are_exact(problem: str, per: str, estimator):
    setup = PROBLEMS[problem]()
    estimate, _ = learner(setup, per, estimator).meta_gradient(setup.tasks)
    assert max(errors(estimate, truth(setup, per))) < 1e-8


@pytest.mark.parametrize("per", FORMS)
@pytest.mark.parametrize(
    "solver", [mn.GradientDescent(0.1, 3), mn.Nesterov(0.1, 3)], ids=["descent", "nesterov"]
)
def test_maml_is_autograd_through_the_steps(per: str, solver):
    setup = small()
    model, loss, tasks = setup
    own = learner(setup, per, mn.MAML(), solver)
    estimate, _ = own.meta_gradient(tasks)
    h = {n: p.detach().clone().requires_grad_() for n, p in own.named_parameters()}
    names = [n for n, _ in model.named_parameters()]
    whole = nn.ModuleDict({"model": model})
    values = []
    for task in tasks:
        theta = {n: h[f"model.{n}"] for n in names}
        lam = {n: h["log_lam.all" if per == "scalar" else f"log_lam.{n}"].exp() for n in names}
        slow = (0.1 * torch.stack([leaf.min() for leaf in lam.values()]).min()).sqrt()
        beta = (1 - slow) / (1 + slow) if isinstance(solver, mn.Nesterov) else 0.0
        x = y = theta
        for _ in range(3):
            here = functional_loss(whole, loss, y, task.support)
            g = torch.autograd.grad(here, list(y.values()), create_graph=True)
            new = {
                n: y[n] - 0.1 * (slope + lam[n] * (y[n] - theta[n]))
                for n, slope in zip(names, g, strict=True)
            }
            y = {n: new[n] + beta * (new[n] - x[n]) for n in names}
            x = new
        values.append(functional_loss(whole, loss, x, task.query))
    torch.stack(values).mean().backward()
    expected = {n.removeprefix("model."): leaf.grad for n, leaf in h.items()}
    assert max(errors(estimate, expected)) < 1e-10


def functional_loss(whole: nn.ModuleDict, loss, phi: dict[str, Tensor], batch) -> Tensor:
    inputs, target = batch
    return loss(functional_call(whole["model"], phi, (inputs,)), target)


@pytest.mark.parametrize("per", FORMS)
@pytest.mark.parametrize(
    "estimator",
    [
        mn.FOBMAML(nu=0.1),
        mn.FOBMAML(nu=0.1, stencil="forward", nudge="gradient"),
        mn.FOBMAML(nu=0.1, stencil="five-point", start="shifted"),
        mn.FOBMAML(nu=0.1, stencil="forward", start="solution"),
        mn.FOBMAML(nu=0.1, unshrink=True),
        mn.IMAML(cg_steps=3),
    ],
    ids=repr,
)
def test_engines_and_chunks_agree(per: str, estimator):
    setup = small()
    solver = mn.Nesterov(0.1, 3) if per == "tensor" else mn.GradientDescent(0.1, 3)
    (stacked, stats), (inplace, other) = (
        learner(setup, per, estimator, solver, engine).meta_gradient(setup.tasks)
        for engine in ("stacked", "inplace")
    )
    assert max(errors(stacked, inplace)) < 1e-10
    assert stats.delta == pytest.approx(other.delta, rel=1e-9)
    chunked = learner(setup, per, estimator, solver)
    chunked.chunk = 2
    assert max(errors(chunked.meta_gradient(setup.tasks)[0], stacked)) < 1e-11


def test_the_gradient_by_theta_is_that_of_the_same_fixed_stiffness():
    setup = small()
    for per in FORMS:
        learned, _ = learner(
            setup, per, mn.FOBMAML(nu=0.1), mn.GradientDescent(0.1, 3)
        ).meta_gradient(setup.tasks)
        fixed, _ = learner_for(
            setup, mn.FOBMAML(nu=0.1), solver=mn.GradientDescent(0.1, 3), lam=start(setup, per)
        ).meta_gradient(setup.tasks)
        assert relative_error({n: learned[n] for n in fixed}, fixed) < 1e-14


def test_unshrink_divides_the_same_factor_out_of_both():
    """Where the support loss is flat and K steps reach the share r of the solution, both gradients
    are r times too small.
    """
    model = nn.Linear(2, 1, bias=False).double()
    x = torch.randn(2, 4, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, pull = batch
        return pull[0] * (model.weight * inputs.mean(0)).sum()

    setup = Setup(
        model,
        loss,
        mn.TaskBatch(
            (x, torch.ones(2, 4, dtype=torch.float64)),
            (x.flip(1) + 1, torch.ones(2, 4, dtype=torch.float64)),
        ),
    )
    solver = mn.GradientDescent(0.1, 3)
    exact, _ = learner_for(setup, mn.Exact(), solver=PRECISE, learn_lam="scalar").meta_gradient(
        setup.tasks
    )
    plain, _ = learner_for(
        setup, mn.FOBMAML(nu=0.1), solver=solver, learn_lam="scalar"
    ).meta_gradient(setup.tasks)
    whole, _ = learner_for(
        setup, mn.FOBMAML(nu=0.1, unshrink=True), solver=solver, learn_lam="scalar"
    ).meta_gradient(setup.tasks)
    reached = 1 - (1 - 0.1 * 2.0) ** 3
    assert relative_error(plain["weight"] / reached, exact["weight"]) < 1e-10
    assert relative_error(whole["weight"], exact["weight"]) < 1e-10
    # d itself is only `reached` of d*, so one factor of λ's gradient ½d² remains.
    assert float(whole["log_lam.all"] / exact["log_lam.all"]) == pytest.approx(reached, rel=1e-9)


# ------------------------------------------------------------------------------------- as a learner


@pytest.mark.parametrize("per", FORMS)
def test_backward_fills_the_gradients_of_all_parameters(per: str):
    setup = small()
    own = learner(setup, per, mn.FOBMAML(nu=0.1), mn.GradientDescent(0.1, 3))
    gradient, _ = own.meta_gradient(setup.tasks, seed=1)
    own.backward(setup.tasks, seed=1)
    own.backward(setup.tasks, seed=1)
    for n, p in own.named_parameters():
        torch.testing.assert_close(p.grad, 2 * gradient[n.removeprefix("model.")])
    own.zero_grad()
    own(setup.tasks, seed=1).backward()
    for n, p in own.named_parameters():
        torch.testing.assert_close(p.grad, gradient[n.removeprefix("model.")])


def test_stiffness_follows_log_lam_and_stays_positive():
    setup = small()
    own = learner(setup, "tensor", mn.FOBMAML(nu=0.1), mn.GradientDescent(0.1, 3))
    before = own.problem().lam
    with torch.no_grad():
        for p in own.lam_parameters():
            p.sub_(30.0)
    own.backward(setup.tasks)
    after = own.problem().lam
    for n in before:
        assert after[n] is before[n], "the tensors keep their storage"
        assert 0 < float(after[n]) < 1e-12
    assert own.stiffness().keys() == before.keys()


def test_state_dict_keeps_the_stiffness():
    setup = small()
    for per in FORMS:
        own, other = (
            learner(Setup(copy.deepcopy(setup.model), *setup[1:]), per, mn.FOBMAML(nu=0.1))
            for _ in range(2)
        )
        with torch.no_grad():
            for p in own.parameters():
                p.add_(
                    torch.randn(p.shape, generator=torch.Generator().manual_seed(1), dtype=p.dtype)
                )
        other.load_state_dict(own.state_dict())
        assert all(
            torch.equal(a, b)
            for a, b in zip(own.stiffness().values(), other.stiffness().values(), strict=True)
        )
    fixed = learner_for(setup)
    assert [n for n in fixed.state_dict() if not n.startswith("model.")] == ["_extra_state"]


def test_adapt_and_evaluate_use_the_learned_stiffness():
    setup = small()
    own = learner_for(setup, learn_lam="scalar", lam=1.0)
    fixed = learner_for(setup, lam=4.0)
    with torch.no_grad():
        own.log_lam.all.fill_(torch.tensor(4.0).log())
    assert torch.allclose(
        own.evaluate(setup.tasks).loss, fixed.evaluate(setup.tasks).loss, rtol=1e-6
    )
    mine, theirs = (x.adapt(setup.tasks[0].support) for x in (own, fixed))
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_parameter_groups():
    setup = small()
    own = learner(setup, "tensor", mn.FOBMAML(nu=0.1))
    groups = own.parameter_groups(lr=1e-3, lam_lr=1e-1)
    assert [g["lr"] for g in groups] == [1e-3, 1e-1]
    assert groups[1]["params"] == list(own.lam_parameters())
    assert [id(p) for g in groups for p in g["params"]] == [id(p) for p in own.parameters()]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.5)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.5, 0.0]
    assert [g["lr"] for g in own.parameter_groups(lr=1e-3)] == [1e-3, 1e-3]
    assert len(learner_for(setup).parameter_groups(lr=1e-3)) == 1
    with pytest.raises(ValueError, match="λ is not learned"):
        learner_for(setup).parameter_groups(lr=1e-3, lam_lr=1e-2)


def test_a_frozen_log_lam_is_a_fixed_stiffness():
    setup = small()
    own = learner_for(setup, mn.FOMAML(), learn_lam="tensor")
    with pytest.raises(ValueError, match="FOMAML has no gradient for the stiffness"):
        own.backward(setup.tasks)
    own.log_lam.requires_grad_(False)
    own.backward(setup.tasks)
    assert all(p.grad is None for p in own.lam_parameters())
    assert all(p.grad is not None for p in own.model.parameters())


def test_learner_moves_with_its_stiffness():
    setup = small()
    own = learner(setup, "parameter", mn.FOBMAML(nu=0.1), mn.GradientDescent(0.1, 2)).float()
    assert {p.dtype for p in own.parameters()} == {torch.float32}
    own.backward(setup.tasks.to(torch.float32))
    assert all(p.grad.dtype == torch.float32 for p in own.parameters())


@pytest.mark.parametrize(("per", "copies"), [("scalar", 0), ("tensor", 0), ("parameter", 1)])
def test_memory_in_place_grows_by_the_accumulator_alone(per: str, copies: int):
    """One λ a tensor costs nothing; one per parameter an accumulator of the size of the model, and
    a product of one tensor at a time.
    """
    model = seeded(0, lambda: nn.Sequential(*[nn.Linear(40, 40) for _ in range(8)]))
    setup = Setup(
        model, nn.functional.mse_loss, mn.TaskBatch(*[(torch.zeros(2, 2, 40).double(),) * 2] * 2)
    )

    def peak(**options: str) -> int:
        own = learner_for(
            setup, mn.FOBMAML(nu=0.1), "inplace", solver=mn.GradientDescent(0.1, 3), **options
        )
        with Allocations() as seen:
            result = own.meta_gradient(setup.tasks, metrics=False)
        del result
        return seen.peak

    largest = 2 * 40 * 40 * 8
    assert (
        peak(learn_lam=per) <= 1.01 * (peak() + copies * trainable_bytes(model)) + largest * copies
    )


# ---------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learn_lam": "tensors"}, "Unknown learn_lam 'tensors'. Did you mean 'tensor'"),
        ({"learn_lam": "scalar", "lam": "mapping"}, 'learn_lam="scalar" learns one for all'),
        ({"learn_lam": "tensor", "lam": "entries"}, 'learn_lam="tensor" learns one per tensor'),
        ({"learn_lam": "tensor", "lam": lambda d: d}, "lam is an operator"),
        ({"learn_lam": "scalar", "lam": -1.0}, "positive and finite"),
        (
            {"learn_lam": "scalar", "lam": None, "regulariser": lambda phi, theta: phi},
            "learn_lam would have no effect",
        ),
    ],
)
def test_bad_options(options: dict, message: str):
    setup = small()
    if options.get("lam") == "mapping":
        options = {**options, "lam": start(setup, "tensor")}
    if options.get("lam") == "entries":
        options = {**options, "lam": start(setup, "parameter")}
    with pytest.raises(ValueError, match=message):
        learner_for(setup, **options)


@pytest.mark.parametrize(
    "estimator", [mn.FOMAML(), mn.Reptile(), mn.ESMAML(samples=1), mn.MAML(truncate=0)], ids=repr
)
def test_estimators_without_a_gradient_for_lam_say_so(estimator):
    setup = small()
    with pytest.raises(ValueError, match=r"no gradient for the stiffness λ .*Use FOBMAML"):
        learner_for(setup, estimator, learn_lam="scalar").backward(setup.tasks)


def test_parameters_that_begin_to_adapt_later_have_no_stiffness():
    setup = small()
    setup.model[0].weight.requires_grad_(False)
    own = learner_for(setup, learn_lam="tensor")
    setup.model[0].weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"No stiffness is learned for 0\.weight"):
        own.backward(setup.tasks)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "options",
    [{"learn_lam": "tensor"}, {"learn_lam": "scalar", "adapt": "2.*"}],
    ids=["tensor", "shared"],
)
def test_recorded_meta_steps_follow_the_stiffness(options: dict):
    """A CUDA graph that was recorded once sees the λ of every later meta-step."""
    results = []
    for recorded in (True, False):
        setup = small()
        own = learner_for(setup, mn.FOBMAML(nu=0.1), compile=recorded, **options).cuda()
        tasks = setup.tasks.to("cuda")
        optimizer = torch.optim.SGD(own.parameters(), lr=0.5)
        for _ in range(5):
            optimizer.zero_grad()
            own.backward(tasks, seed=1, metrics=False)
            optimizer.step()
        results.append([p.detach() for p in own.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
