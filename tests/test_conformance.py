"""Every estimator × engine × model: one answer, whatever the chunk, the order of the tasks, their
sizes and their form.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import conformance
import metanudge as mn
from bilevel_problems import ridge
from conformance import (
    NOT_BILEVEL,
    SETUPS,
    SOLVER,
    by_hand,
    gradient,
    learner_for,
    name,
    on_both,
    rounding,
    small,
)
from metanudge.estimators import ESTIMATORS, Estimator
from problems import Setup, mlp, relative_error, seeded

pytestmark = [
    # torch says this once a process when vmap meets CPU flash attention: slower, and right.
    pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning"),
    # torch's own forward-mode decompositions are scripted on first use.
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]

ALL = conformance.estimators()
BOTH = [e for e in ALL if on_both(e)]
RUNS = [(e, engine) for e in ALL for engine in e.engines]
# One of every kind: the FOBMAML forms share their code, so the slower checks take a few of them.
FEW = [
    *(e for e in ALL if not isinstance(e, mn.FOBMAML)),
    mn.FOBMAML(nu=0.1),
    mn.FOBMAML(nu=0.1, stencil="forward", nudge="gradient", start="solution"),
    mn.FOBMAML(nu=0.1, stencil="five-point", start="shifted"),
    mn.FOBMAML(stencil="tangent"),
]
FEW_RUNS = [(e, engine) for e in FEW for engine in e.engines]


def ids(value: object) -> str | None:
    return name(value) if hasattr(value, "accumulate") else None  # type: ignore[arg-type]


def test_the_list_is_complete():
    """A new estimator cannot be forgotten here, and every form of FOBMAML is in, and the
    default.
    """
    assert {type(e) for e in ALL} == set(ESTIMATORS)
    assert sum(isinstance(e, mn.FOBMAML) for e in ALL) == 4 * 2 * 3 + 1
    assert {type(e) for e in FEW} == set(ESTIMATORS)


@pytest.mark.parametrize("setup", ["mlp", "conv_net", "transformer"])
@pytest.mark.parametrize("estimator", BOTH, ids=ids)
def test_engines_agree(estimator: Estimator, setup: str):
    conformance.check_engines_agree(estimator, SETUPS[setup](tasks=2))


# ES-MAML perturbs θ in a learner and x here. An automatic ν is another one; and from the solution
# with a gradient nudge the tangent takes ∂_x f where it ends, at the φ that is reported, in a
# learner where it begins, together with the force.
OTHER = [mn.FOBMAML(), mn.FOBMAML(nu=None, stencil="tangent", nudge="gradient", start="solution")]
SAME = [
    e for e in ALL if name(e) not in NOT_BILEVEL and e not in OTHER and not isinstance(e, mn.ESMAML)
]


@pytest.mark.parametrize("estimator", SAME, ids=ids)
def test_learner_and_bilevel_problem_agree(estimator: Estimator):
    conformance.check_bilevel(estimator, small(tasks=1))


@pytest.mark.parametrize("estimator", [*OTHER, mn.ESMAML(sigma=1e-3, samples=30)], ids=ids)
def test_bilevel_problems_have_their_own_answer(estimator: Estimator):
    """Not that of the learner, and yet the derivative where the inner problem is solved."""
    problem = ridge(per_feature=False)
    solver = mn.GradientDescent(lr=1.6 / sum(problem.curvature), steps=40)
    result = mn.hypergradient(
        problem.inner, problem.outer, problem.x, problem.init, solver=solver, estimator=estimator
    )
    # Evolution strategies give F′ mean ε², with a standard deviation of (2/n)^½.
    assert relative_error(result.gradient, problem.truth) < (
        3 * (2 / 30) ** 0.5 if isinstance(estimator, mn.ESMAML) else 1e-5
    )


@pytest.mark.parametrize("estimator", [e for e in ALL if name(e) in NOT_BILEVEL], ids=ids)
def test_estimators_without_meaning_for_a_bilevel_problem_say_so(estimator: Estimator):
    with pytest.raises((TypeError, ValueError), match=NOT_BILEVEL[name(estimator)]):
        conformance.check_bilevel(estimator, small(tasks=1))


@pytest.mark.parametrize("setup", ["mlp-dropout", "conv_net-dropout", "attention-dropout"])
@pytest.mark.parametrize("estimator", [e for e in FEW if on_both(e)], ids=ids)
def test_engines_agree_with_dropout(estimator: Estimator, setup: str):
    conformance.check_engines_agree(estimator, SETUPS[setup](tasks=2))


@pytest.mark.parametrize("setup", ["mlp", "conv_net", "transformer"])
def test_engines_match_plain_loops(setup: str):
    """Agreement alone could be two wrong answers: both match FO-B-MAML written by hand."""
    built = SETUPS[setup]()
    truth = by_hand(built)
    for engine in ("stacked", "inplace"):
        assert relative_error(gradient(built, mn.FOBMAML(nu=0.1), engine), truth) < 1e-10


@pytest.mark.parametrize("estimator", BOTH, ids=ids)
def test_engines_agree_with_stiffness_per_parameter(estimator: Estimator):
    setup = mlp(tasks=2)
    generator = torch.Generator().manual_seed(0)
    lam = {
        n: (
            torch.rand(p.shape, generator=generator, dtype=torch.float64) + 0.5
            if p.ndim == 2
            else 1.5
        )
        for n, p in setup.model.named_parameters()
    }
    conformance.check_engines_agree(estimator, setup, lam=lam)


SOLVERS = conformance.solvers()
ONE_OF_EACH = [
    mn.FOBMAML(nu=0.1),
    mn.FOBMAML(nu=0.1, nudge="gradient", start="solution"),
    mn.FOMAML(),
    mn.ESMAML(samples=1),
]


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("estimator", ONE_OF_EACH, ids=ids)
def test_engines_agree_for_every_solver(estimator: Estimator, solver: str):
    conformance.check_engines_agree(estimator, small(tasks=2), solver=SOLVERS[solver])


@pytest.mark.parametrize("estimator", FEW, ids=ids)
def test_minibatches_are_drawn_by_seed_task_and_step(estimator: Estimator):
    """Minibatches differ from the whole set, change with the seed, and do not depend on the
    chunk.
    """
    setup, solver = small(), SOLVERS["gd-minibatch"]
    conformance.check_chunks(estimator, setup, solver=solver)
    one, again, other = (
        learner_for(setup, estimator, solver=solver).meta_gradient(setup.tasks, seed=s)[0]
        for s in (1, 1, 2)
    )
    assert relative_error(one, again) == 0
    assert relative_error(one, other) > 1e-4


def test_a_minibatch_as_large_as_the_support_set_is_all_of_it():
    setup = mlp(support=6)
    for engine in ("stacked", "inplace"):
        whole = gradient(setup, mn.FOBMAML(nu=0.1), engine)
        assert (
            relative_error(
                gradient(
                    setup,
                    mn.FOBMAML(nu=0.1),
                    engine,
                    solver=mn.GradientDescent(0.1, 2, batch_size=6),
                ),
                whole,
            )
            == 0
        )


@pytest.mark.parametrize("estimator", ALL, ids=ids)
def test_chunks_do_not_change_the_result(estimator: Estimator):
    conformance.check_chunks(estimator, small(dropout=0.3))


@pytest.mark.parametrize("setup", ["conv_net", "transformer"])
@pytest.mark.parametrize(
    "estimator", [mn.FOBMAML(nu=0.1), mn.FOBMAML(stencil="tangent"), mn.MAML(), mn.IMAML()], ids=ids
)
def test_chunks_do_not_change_the_result_of_other_models(estimator: Estimator, setup: str):
    conformance.check_chunks(estimator, SETUPS[setup]())


@pytest.mark.parametrize("solver", ["adam", "lbfgs", "newton"])
def test_chunks_do_not_change_the_result_of_other_solvers(solver: str):
    conformance.check_chunks(mn.FOMAML(), small(), solver=SOLVERS[solver])


@pytest.mark.parametrize(("estimator", "engine"), RUNS, ids=ids)
def test_ragged_batches(estimator: Estimator, engine: str):
    conformance.check_ragged(estimator, small(tasks=3, dropout=0.3), engine)


@pytest.mark.parametrize("engine", ["stacked", "inplace"])
@pytest.mark.parametrize("solver", ["gd-minibatch", "sgd-minibatch"])
def test_ragged_batches_with_minibatches(solver: str, engine: str):
    conformance.check_ragged(
        mn.FOBMAML(nu=0.1), small(tasks=3, support=7), engine, solver=SOLVERS[solver]
    )


@pytest.mark.parametrize(
    ("estimator", "engine"),
    [r for r in RUNS if not isinstance(r[0], conformance.DRAWS_BY_PLACE)],
    ids=ids,
)
def test_the_order_of_the_tasks_does_not_matter(estimator: Estimator, engine: str):
    conformance.check_permutation(estimator, small(tasks=3, dropout=0.3), engine)


@pytest.mark.parametrize(("estimator", "engine"), RUNS, ids=ids)
def test_nothing_is_changed(estimator: Estimator, engine: str):
    conformance.check_pure(estimator, small(dropout=0.3), engine)


@pytest.mark.parametrize(("estimator", "engine"), FEW_RUNS, ids=ids)
def test_nothing_is_changed_in_a_net_with_running_statistics(estimator: Estimator, engine: str):
    if isinstance(estimator, mn.Exact):
        estimator = mn.MAML(truncate=1)
    conformance.check_pure(estimator, SETUPS["conv_net-dropout"](tasks=2), engine)


# ------------------------------------------------------------------------------------------ pytrees


class Parts(nn.Module):
    """A perceptron whose input comes in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(torch.cat([first, second], dim=-1))))


class Whole(Parts):
    """The same perceptron on one tensor."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x[..., :1], x[..., 1:])


def nested_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    first, (second,) = batch["inputs"]["first"], batch["inputs"]["others"]
    loss = F.mse_loss(model(first, second), batch["target"], reduction="none").mean(1)
    return loss.mean() if batch["reduce"] == "mean" else loss.sum()


FORMS: dict[str, Any] = {
    "tuple": lambda x, y: ((x[..., :1], x[..., 1:]), y),
    "list": lambda x, y: ([x[..., :1], x[..., 1:]], y),
    "dict": lambda x, y: ({"second": x[..., 1:], "first": x[..., :1]}, y),
    "nested": lambda x, y: {
        "inputs": {"first": x[..., :1], "others": [x[..., 1:]]},
        "target": y,
        "reduce": "mean",
    },
}


NESTED = [
    mn.FOBMAML(nu=0.1),
    mn.FOBMAML(stencil="tangent"),
    mn.MAML(),
    mn.IMAML(cg_steps=2),
    mn.ESMAML(samples=1),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("estimator", "engine"), [(e, engine) for e in NESTED for engine in e.engines], ids=ids
)
def test_batches_may_be_nested(estimator: Estimator, engine: str, form: str):
    """Inputs as tuple, list or dict, and a nested batch with a constant in it, give what the plain
    tensor gives.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 6, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(3, 6, 2, generator=generator, dtype=torch.float64)
    shape = FORMS[form]
    solver = mn.GradientDescent(
        lr=0.1, steps=2, batch_size=None if isinstance(estimator, mn.IMAML) else 3
    )
    plain = Setup(
        seeded(0, Whole), F.mse_loss, mn.TaskBatch((x[:, :4], y[:, :4]), (x[:, 4:], y[:, 4:]))
    )
    loss = nested_loss if form == "nested" else F.mse_loss
    tasks = mn.TaskBatch(shape(x[:, :4], y[:, :4]), shape(x[:, 4:], y[:, 4:]))
    nested = Setup(seeded(0, Parts), loss, tasks)
    truth = gradient(plain, estimator, engine, solver=solver)
    assert relative_error(gradient(nested, estimator, engine, solver=solver), truth) < rounding(
        estimator
    )
    one_by_one = mn.TaskBatch.of(list(tasks))
    assert relative_error(
        gradient(nested, estimator, engine, one_by_one, solver=solver), truth
    ) < rounding(estimator)


# ------------------------------------------------------------------------------------------ dropout


class RecordingDropout(nn.Module):
    """Dropout that keeps the masks it has drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        mask = (torch.rand(x.shape, dtype=x.dtype) < 0.5).to(x.dtype)
        self.masks.append(torch.func.debug_unwrap(mask).clone())
        return 2 * mask * x


def recording_setup(tasks: int) -> tuple[Setup, RecordingDropout]:
    setup = mlp(tasks=tasks, support=8, query=8, hidden=16)
    recorder = RecordingDropout()
    setup.model.insert(2, recorder)
    return setup, recorder


@pytest.mark.parametrize("stencil", ["symmetric", "five-point"])
def test_all_solves_of_a_stencil_see_the_same_masks_in_place(stencil: str):
    setup, recorder = recording_setup(tasks=2)
    learner = learner_for(
        setup, mn.FOBMAML(nu=0.1, stencil=stencil), "inplace", solver=mn.GradientDescent(0.1, 3)
    )
    learner.meta_gradient(setup.tasks, metrics=False)
    masks = torch.stack(recorder.masks)
    solves = 2 * learner.estimator.width
    assert len(masks) == solves * 3 * 2, (
        "one mask a step for the support loss, one for the query loss"
    )
    by_solve = masks.view(solves, 3, 2, *masks.shape[1:])
    assert torch.equal(by_solve, by_solve[:1].expand_as(by_solve)), (
        "the solves of all tasks and nudges share their masks"
    )
    of_one = by_solve[0].flatten(0, 1)
    for i in range(len(of_one)):
        for j in range(i):
            assert not torch.equal(of_one[i], of_one[j]), (
                "steps, and support and query, have masks of their own"
            )


def test_all_solves_of_a_stencil_see_the_same_masks_stacked():
    """Under vmap one mask serves all rows, and chunks draw the same ones again; they are those of
    the in-place engine.
    """
    drawn = {}
    for label, engine, chunk in (
        ("whole", "stacked", None),
        ("chunks", "stacked", 1),
        ("inplace", "inplace", None),
    ):
        setup, recorder = recording_setup(tasks=2)
        learner = learner_for(
            setup, mn.FOBMAML(nu=0.1), engine, chunk=chunk, solver=mn.GradientDescent(0.1, 3)
        )
        learner.meta_gradient(setup.tasks, metrics=False, seed=11)
        drawn[label] = torch.stack(recorder.masks)
    assert drawn["whole"].shape == (
        3 * 2,
        8,
        16,
    ), "one mask a loss evaluation, without an axis for the rows"
    assert torch.equal(drawn["chunks"], drawn["whole"].repeat(4, 1, 1))
    assert torch.equal(drawn["inplace"], drawn["chunks"])


@pytest.mark.parametrize("engine", ["stacked", "inplace"])
@pytest.mark.parametrize("setup", ["mlp-dropout", "conv_net-dropout", "attention-dropout"])
def test_with_dropout_the_difference_tends_to_the_tangent(setup: str, engine: str):
    """With other masks in the two solves the difference would grow like 1/ν; with the same ones it
    has a limit.
    """
    built = SETUPS[setup](tasks=2)
    limit = gradient(built, mn.FOBMAML(stencil="tangent"))
    error = relative_error(gradient(built, mn.FOBMAML(nu=1e-4), engine), limit)
    assert error < 1e-6


@pytest.mark.parametrize("engine", ["stacked", "inplace"])
def test_masks_change_from_call_to_call_and_repeat_with_the_seed(engine: str):
    setup = SETUPS["mlp-dropout"]()

    def calls(seed: int) -> list[dict[str, Tensor]]:
        learner = learner_for(setup, engine=engine, seed=seed)
        return [learner.meta_gradient(setup.tasks)[0] for _ in range(2)]

    torch.manual_seed(0)
    first, second = calls(seed=1)
    torch.manual_seed(99)  # the global state must play no part
    again = calls(seed=1)
    assert relative_error(first, second) > 1e-2
    assert relative_error(first, calls(seed=2)[0]) > 1e-2
    assert all(
        torch.equal(first[n], again[0][n]) and torch.equal(second[n], again[1][n]) for n in first
    )


@pytest.mark.parametrize(("estimator", "engine"), FEW_RUNS, ids=ids)
def test_measuring_does_not_change_the_gradient(estimator: Estimator, engine: str):
    setup = small(dropout=0.3)
    learner = learner_for(setup, estimator, engine)
    with_metrics, without = (
        learner.meta_gradient(setup.tasks, seed=1, metrics=m)[0] for m in (True, False)
    )
    assert all(torch.equal(with_metrics[n], without[n]) for n in without)


def test_solver_is_what_the_oracle_assumes():
    """`by_hand` is plain gradient descent; so is the solver of these tests."""
    assert isinstance(SOLVER, mn.GradientDescent)
