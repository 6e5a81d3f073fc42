"""ν that chooses itself: close to the best of a grid, cheap, the same every time; and the paper's
rule of thumb.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn

import metanudge as mn
from metanudge.engines import InplaceEngine, StackedEngine
from metanudge.estimators import meta_gradient
from metanudge.estimators.ladder import LADDER, Disagreement, Motion, best_nu, credible
from metanudge.testing.curvature import curvature
from metanudge.tuning import NuEstimate, NuTuner, estimate_nu, step_aware
from problems import (
    Setup,
    classification_tasks,
    logistic_regression,
    mlp,
    quadratic,
    relative_error,
    seeded,
)

AUTO = mn.FOBMAML(nu="auto")
GRID = [10 ** (-quarter / 4) for quarter in range(13)]
LAM = 0.5


def relu_conv_net(*, tasks: int = 4, seed: int = 0) -> Setup:
    """ReLU and max-pooling: φ_ν jumps wherever an inner step crosses a kink."""
    model = seeded(
        seed,
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3,
            padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(16, 3),
        ),
    )  # fmt: skip
    return Setup(
        model, nn.functional.cross_entropy, classification_tasks((1, 8, 8), 3, tasks, 15, 30, seed)
    )


PROBLEMS = {
    "quadratic": partial(quadratic, same=False, tasks=4, dim=8),
    "logistic": partial(logistic_regression, tasks=4),
    "tanh": partial(mlp, tasks=4),
    "relu": relu_conv_net,
}


def learner_for(setup: Setup, steps: int, *, estimator=AUTO, **options) -> mn.MetaLearner:
    """With an inner learning rate well below 2/(L̂ + λ)."""
    learner = mn.MetaLearner(setup.model, setup.loss, lam=LAM, estimator=estimator, **options)
    learner.solver = mn.GradientDescent(
        lr=0.5 / (curvature(learner, setup.tasks) + LAM), steps=steps
    )
    return learner


def gradient(
    learner: mn.MetaLearner, tasks: mn.TaskBatch, **changes
) -> tuple[dict[str, torch.Tensor], mn.Stats]:
    for name, value in changes.items():
        setattr(learner, name, value)
    return learner.meta_gradient(tasks, metrics=False)


# --- The choice
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nudge", ["loss", "gradient"])
@pytest.mark.parametrize(
    ("name", "steps"),
    [*itertools.product(["quadratic", "logistic", "tanh"], [5, 20]), ("relu", 5), ("relu", 10)],
)
def test_the_error_is_at_most_twice_the_best_of_a_grid(name, steps, nudge):
    """Against the exact meta-gradient where the problem is smooth; among kinks, where there is
    none, against the tangent.
    """
    setup = PROBLEMS[name]()
    learner = learner_for(setup, steps)
    solver = learner.solver
    if name == "relu":
        truth, _ = gradient(
            learner, setup.tasks, estimator=mn.FOBMAML(stencil="tangent", nudge=nudge)
        )
    else:
        truth, _ = gradient(
            learner, setup.tasks, estimator=mn.Exact(), solver=mn.NewtonCG(tol=1e-12)
        )
    errors = [
        relative_error(
            gradient(learner, setup.tasks, estimator=mn.FOBMAML(nu=nu, nudge=nudge), solver=solver)[
                0
            ],
            truth,
        )
        for nu in GRID
    ]
    estimate, stats = gradient(learner, setup.tasks, estimator=mn.FOBMAML(nu="auto", nudge=nudge))
    assert relative_error(estimate, truth) <= 2 * min(
        error for error in errors if math.isfinite(error)
    ), (stats.nu, errors)
    if name == "relu":
        assert stats.nu > 0.03, "kinks: a small ν is noise"
        assert min(errors[6:]) > 1.4 * min(errors), "this problem does have a ν that is too small"


def test_rounding_is_seen_in_float32():
    """In float32 a smooth problem has a best ν inside the ladder; against float64."""
    setup = mlp(tasks=4)
    learner = learner_for(setup, 20, engine="stacked")
    truth, _ = gradient(learner, setup.tasks, estimator=mn.FOBMAML(stencil="tangent"))
    single, tasks = learner.to(torch.float32), setup.tasks.to(torch.float32)
    errors = [
        relative_error(
            {
                n: g.double()
                for n, g in gradient(single, tasks, estimator=mn.FOBMAML(nu=nu))[0].items()
            },
            truth,
        )
        for nu in GRID
    ]
    estimate, stats = gradient(single, tasks, estimator=AUTO)
    assert 1e-3 < stats.nu < 0.1
    assert relative_error({n: g.double() for n, g in estimate.items()}, truth) <= 3 * min(errors)


def test_a_problem_that_a_nudge_moves_to_its_limits_is_no_plateau():
    """Saturated: large ν move φ all the way, and g falls as 1/ν; neighbours then disagree less than
    further down.
    """
    setup = mlp(tasks=3)
    learner = mn.MetaLearner(
        setup.model,
        setup.loss,
        lam=0.02,
        solver=mn.GradientDescent(lr=0.3, steps=50),
        engine="stacked",
    )
    options = {"nudge": "gradient", "start": "shifted"}
    truth, _ = gradient(learner, setup.tasks, estimator=mn.FOBMAML(stencil="tangent", **options))
    estimate, _ = gradient(learner, setup.tasks, estimator=mn.FOBMAML(nu="auto", **options))
    disagreement = learner.tuner.last.disagreement
    assert disagreement[0] < disagreement[1], "the disagreement rises before it falls"
    assert relative_error(estimate, truth) < 0.05


@pytest.mark.parametrize(
    ("disagreement", "place"),
    [
        ([0.5, 0.05, 0.005, 0.0005], 4.0),  # smooth: the last
        ([0.5, 0.05, 0.04, 0.4], 1.5),  # rounding: between the second and the third
        ([math.inf, 0.3, 0.5, 0.9], 1.5),  # the largest diverged
        ([0.4, 0.5, 0.9, 1e-7], 0.5),  # kinks, and by luck none in the smallest two
        ([2.1, 2.4, 1.9, 2.5], 0.5),  # nothing but noise
    ],
)
def test_where_on_the_ladder(disagreement, place):
    nus = [10 ** (-rung / 2) for rung in range(5)]
    nu, error = best_nu(nus, disagreement, order=2)
    assert -2 * math.log10(nu) == pytest.approx(place)
    assert error in disagreement


def test_nothing_agrees():
    assert best_nu([1.0, 0.1, 0.01], [math.inf, math.inf], order=2) == (None, math.inf)
    assert credible([1.0, 0.1, 0.01], [math.inf, math.inf], order=2) == [math.inf, math.inf]


def test_divergence_leaves_the_rule_of_thumb_and_is_reported():
    setup = logistic_regression()
    learner = mn.MetaLearner(
        setup.model,
        setup.loss,
        solver=mn.GradientDescent(lr=1e200, steps=4),
        estimator=AUTO,
        engine="stacked",
    )
    found = learner.choose_nu(setup.tasks)
    assert (found.nu, found.error) == (step_aware(4), math.inf)
    with pytest.raises(mn.NonFiniteError, match="smaller lr"):
        learner.backward(setup.tasks)


# --- Any stencil, nudge, start, engine, solver
# -----------------------------------------------------------------------


def assert_same_up_to_rounding(a: NuEstimate, b: NuEstimate) -> None:
    """Each disagreement is off by at most about twice the rounding to be expected, so two of them
    differ by at most four times that.
    """
    for one, other, rounding in zip(a.disagreement, b.disagreement, b.rounding, strict=True):
        assert abs(one - other) <= 4 * rounding
    assert a.rounding == pytest.approx(b.rounding, rel=4 * max(b.rounding)), (
        "they are relative to norms, which are off by as much"
    )


KINDS = list(
    itertools.product(
        ["symmetric", "forward", "five-point"],
        ["loss", "gradient"],
        ["theta", "shifted", "solution"],
    )
)


@pytest.mark.parametrize(("stencil", "nudge", "start"), KINDS)
def test_every_kind_is_a_difference_at_the_chosen_nu(stencil, nudge, start):
    setup = mlp(tasks=3)
    kind = mn.FOBMAML(nu="auto", stencil=stencil, nudge=nudge, start=start)
    found = {}
    for engine in ("stacked", "inplace"):
        learner = mn.MetaLearner(
            setup.model,
            setup.loss,
            solver=mn.GradientDescent(lr=0.2, steps=3),
            estimator=kind,
            engine=engine,
        )
        g, stats = learner.meta_gradient(setup.tasks)
        fixed, expected = gradient(
            learner, setup.tasks, estimator=dataclasses.replace(kind, nu=stats.nu)
        )
        assert all(torch.equal(g[n], fixed[n]) for n in g)
        assert stats.nu == expected.nu
        found[engine] = learner.tuner.last
    stacked, inplace = found["stacked"], found["inplace"]
    assert stacked.nu == inplace.nu
    assert_same_up_to_rounding(stacked, inplace)
    # Neighbours on the ladder differ by the truncation error, which falls as the stencil's order
    # says.
    order = {"symmetric": 2, "forward": 1, "five-point": 4}[stencil]
    first, second = stacked.disagreement[1:3]
    assert math.log(first / second) / math.log(10**0.5) == pytest.approx(order, abs=0.25)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("start", ["theta", "solution"])
def test_an_ulp_does_not_decide_between_two_rungs(start, dtype):
    """The smallest ν of the ladder are at the floor of rounding here, where their disagreements
    change by a fifth with every ulp of θ.
    """
    kind = mn.FOBMAML(nu="auto", stencil="five-point", start=start)
    looks = []
    for seed in range(6):
        setup, generator = mlp(tasks=3), torch.Generator().manual_seed(seed)
        model = setup.model.to(dtype)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(
                    1
                    + torch.finfo(dtype).eps
                    * torch.randint(-1, 2, p.shape, generator=generator).to(p)
                )
        learner = mn.MetaLearner(
            model,
            setup.loss,
            solver=mn.GradientDescent(lr=0.2, steps=3),
            estimator=kind,
            engine="stacked",
        )
        looks.append(learner.choose_nu(setup.tasks.to(dtype)))
    last = [look.disagreement[-1] for look in looks]
    assert max(last) < 4 * looks[0].rounding[-1], "at the floor"
    assert max(last) > 1.05 * min(last), "its size is chance"
    assert len({look.nu for look in looks}) == 1
    assert looks[0].nu > LADDER[-1], "the larger of those that rounding cannot tell apart"
    for look in looks:
        assert_same_up_to_rounding(look, looks[0])


def test_the_ladder_is_the_same_in_any_portions():
    setup = mlp(tasks=4)
    learner = mn.MetaLearner(
        setup.model, setup.loss, solver=mn.GradientDescent(lr=0.2, steps=3), engine="stacked"
    )
    looks = [
        estimate_nu(
            learner.problem(),
            setup.tasks,
            estimator=AUTO,
            solver=learner.solver,
            engine=engine,
            rungs_at_once=rungs,
        )
        for engine, rungs in (
            (StackedEngine(), 1),
            (StackedEngine(), 3),
            (StackedEngine(), 7),
            (StackedEngine(chunk=3), 7),
            (InplaceEngine(), 7),
        )
    ]
    for look in looks[1:]:
        assert look.nu == looks[0].nu
        assert_same_up_to_rounding(look, looks[0])
        assert look.gradients == looks[0].gradients


@pytest.mark.parametrize(
    "solver",
    [
        mn.Nesterov(lr=0.2, steps=4),
        mn.TorchOptimizer(torch.optim.Adam, steps=4, options={"lr": 0.05}),
        mn.LBFGS(steps=5),
    ],
)
def test_any_solver(solver):
    setup = logistic_regression(tasks=2)
    learner = mn.MetaLearner(setup.model, setup.loss, solver=solver, estimator=AUTO)
    stats = learner.backward(setup.tasks)
    assert LADDER[-1] <= stats.nu <= LADDER[0]
    assert learner.tuner.last.error < 1


@pytest.mark.parametrize(
    "options",
    [
        {"learn_lam": "tensor"},
        {"adapt": "2.*"},
        {"lam": {"0.weight": 0.1, "0.bias": 1.0, "2.weight": 2.0, "2.bias": 9.0}},
    ],
)
@pytest.mark.parametrize("engine", ["stacked", "inplace"])
def test_learned_stiffness_and_shared_layers(options, engine):
    setup = mlp(tasks=2)
    learner = mn.MetaLearner(
        setup.model,
        setup.loss,
        solver=mn.GradientDescent(lr=0.2, steps=3),
        estimator=AUTO,
        engine=engine,
        **options,
    )
    g, stats = learner.meta_gradient(setup.tasks)
    tangent, _ = gradient(
        learner, setup.tasks, estimator=mn.FOBMAML(stencil="tangent"), engine="stacked"
    )
    assert stats.nu == LADDER[-1], "smooth: the smaller the better"
    assert relative_error(g, tangent) < 1e-5


def test_without_a_learner_it_is_chosen_on_the_tasks():
    setup = mlp(tasks=6)
    learner = mn.MetaLearner(
        setup.model, setup.loss, solver=mn.GradientDescent(lr=0.2, steps=3), estimator=AUTO
    )
    options = {"solver": learner.solver, "engine": StackedEngine()}
    settled = NuTuner().settled(AUTO, learner.problem(), setup.tasks, seed=0, first=0, **options)
    g, stats = meta_gradient(learner.problem(), setup.tasks, estimator=settled, **options)
    assert stats.nu == estimate_nu(learner.problem(), setup.tasks[:4], estimator=AUTO, **options).nu
    fixed, _ = meta_gradient(
        learner.problem(), setup.tasks, estimator=mn.FOBMAML(nu=stats.nu), **options
    )
    assert all(torch.equal(g[n], fixed[n]) for n in g)


def test_a_module_that_cannot_be_stacked_is_looked_at_in_place():
    class Fickle(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # a branch on data: no vmap
            return super().forward(x if float(x.sum()) > 0 else 1.0 * x)

    setup = logistic_regression(tasks=2)
    learner = mn.MetaLearner(seeded(0, lambda: Fickle(4, 3)), setup.loss, estimator=AUTO)
    stats = learner.backward(setup.tasks)
    assert stats.engine == "inplace"
    assert learner.tuner.last.error < 0.1


# --- How often, on what, at what cost
# --------------------------------------------------------------------------------


def test_the_same_every_time():
    setup = relu_conv_net(tasks=3)
    looks = [
        mn.MetaLearner(setup.model, setup.loss, estimator=AUTO, seed=5).choose_nu(setup.tasks)
        for _ in range(2)
    ]
    assert looks[0] == looks[1]


def test_it_looks_again_when_it_is_time_or_something_changed():
    setup = logistic_regression(tasks=2)
    learner = mn.MetaLearner(setup.model, setup.loss, estimator=AUTO)
    learner.tuner = NuTuner(every=3, share=100.0)
    looks = []
    for step in range(8):
        learner.meta_gradient(setup.tasks)
        if not looks or learner.tuner.last is not looks[-1][1]:
            looks.append((step, learner.tuner.last))
    assert [step for step, _ in looks] == [0, 3, 6]
    learner.solver = mn.GradientDescent(lr=0.2, steps=7)
    learner.meta_gradient(setup.tasks)
    assert learner.tuner.last is not looks[-1][1], "another solver"
    before = learner.tuner.last
    learner.estimator = mn.FOBMAML(nu="auto", nudge="gradient")
    learner.meta_gradient(setup.tasks)
    assert learner.tuner.last is not before, "another estimator"


def test_what_was_found_before_counts_half():
    first, second = logistic_regression(tasks=2), logistic_regression(tasks=2, seed=3)
    learner = mn.MetaLearner(first.model, first.loss, estimator=AUTO)
    a, b = (learner.choose_nu(setup.tasks).disagreement for setup in (first, second))
    expected = [math.sqrt((x * x + y * y) / 2) for x, y in zip(a, b, strict=True)]
    assert learner.tuner.state_dict()["disagreement"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("nudge", ["loss", "gradient"])
@pytest.mark.parametrize("tasks", [16, 3])
def test_looking_costs_less_than_a_twentieth(tasks, nudge):
    setup = logistic_regression(tasks=tasks, support=4, query=4)
    kind = mn.FOBMAML(nu="auto", nudge=nudge)
    learner = mn.MetaLearner(
        setup.model,
        setup.loss,
        solver=mn.GradientDescent(lr=0.2, steps=2),
        estimator=kind,
        engine="stacked",
    )
    steps, spent = learner.tuner.interval(tasks), 0.0
    for _ in range(steps):
        stats = learner.meta_gradient(setup.tasks, metrics=False)[1]
        spent += tasks * (stats.support_gradients + stats.query_gradients)
    assert 0 < learner.tuner.gradients < 0.05 * spent
    assert steps <= 175


@pytest.mark.parametrize("nudge", ["loss", "gradient"])
def test_its_cost_is_counted(nudge):
    """Every evaluation of the user's loss is in `gradients`: in place, one call is one gradient."""
    setup, calls = mlp(tasks=2), Counter()

    def loss(output, target):
        calls["loss"] += 1
        return setup.loss(output, target)

    learner = mn.MetaLearner(
        setup.model, loss, estimator=mn.FOBMAML(nu="auto", nudge=nudge), engine="inplace"
    )
    assert learner.choose_nu(setup.tasks).gradients == calls["loss"]


def test_looking_changes_nothing():
    setup = mlp(tasks=2, dropout=0.3)
    learner = mn.MetaLearner(setup.model, setup.loss, estimator=AUTO)
    before, state = [p.clone() for p in learner.parameters()], torch.get_rng_state()
    learner.choose_nu(setup.tasks)
    assert all(
        torch.equal(p, b) and p.grad is None
        for p, b in zip(learner.parameters(), before, strict=True)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert learner.calls == 0


def test_a_learner_goes_on_from_the_state():
    setup = relu_conv_net(tasks=2)

    def learner() -> mn.MetaLearner:
        made = mn.MetaLearner(setup.model, setup.loss, estimator=AUTO, engine="stacked")
        made.tuner = NuTuner(every=2, share=100.0)
        return made

    batches = [relu_conv_net(tasks=2, seed=seed).tasks for seed in range(5)]
    whole, first, second = learner(), learner(), learner()
    expected = [whole.meta_gradient(batch, seed=3)[1] for batch in batches]
    found = [first.meta_gradient(batch, seed=3)[1] for batch in batches[:3]]
    second.tuner.load_state_dict(first.tuner.state_dict())
    found += [second.meta_gradient(batch, seed=3)[1] for batch in batches[3:]]
    assert [stats.nu for stats in found] == [stats.nu for stats in expected]
    assert second.tuner.state_dict() == whole.tuner.state_dict()


# --- The rest
# --------------------------------------------------------------------------------------------------


def test_the_papers_rule():
    assert [step_aware(k) for k in (1, 5, 10)] == [0.1] * 3
    assert [step_aware(k) for k in (50, 1000)] == [0.01] * 2
    between = [step_aware(k) for k in range(10, 51)]
    assert all(a > b for a, b in itertools.pairwise(between))
    assert step_aware(5, coarse=0.5) == 0.5
    assert step_aware(100, fine=0.001) == 0.001
    assert step_aware(22, coarse=0.5, fine=0.001) == pytest.approx(
        math.sqrt(0.5 * 0.001), rel=0.1
    ), "half-way in log K, half-way in log ν"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: mn.FOBMAML(nu="atuo"), ["'atuo'", "'auto'", "positive number"]),
        (lambda: mn.FOBMAML(nu="0.1"), ["'0.1'", "positive number"]),
        (lambda: mn.FOBMAML(nu=0.1, stencil="tangent"), ["tangent", "nu=0.1"]),
        (lambda: mn.FOBMAML(nu=-1.0), ["nu", "-1.0"]),
        (lambda: step_aware(0), ["steps", "0"]),
        (lambda: step_aware(5, coarse=0.0), ["coarse"]),
        (lambda: step_aware(5, fine=-1.0), ["fine"]),
        (lambda: NuTuner(every=0), ["every", "50"]),
        (lambda: NuTuner(share=0.0), ["share"]),
        (lambda: NuTuner(most_tasks=0), ["most_tasks"]),
        (
            lambda: mn.MetaLearner(
                nn.Linear(1, 1), nn.functional.mse_loss, estimator=mn.FOMAML()
            ).choose_nu([]),
            ['nu="auto"'],
        ),
    ],
)
def test_bad_input_says_what_to_do(make, words):
    with pytest.raises(ValueError) as refused:
        make()
    for word in words:
        assert word in str(refused.value)


def test_check_gradient_shows_the_choice():
    setup = mlp(tasks=3)
    learner = mn.MetaLearner(
        setup.model, setup.loss, solver=mn.GradientDescent(lr=0.2, steps=3), estimator=AUTO
    )
    report = mn.check_gradient(learner, setup.tasks, estimators=[AUTO], nus=[0.1])
    assert [row.estimator for row in report.rows] == [
        "FOBMAML symmetric, loss nudge",
        "FOBMAML symmetric, loss nudge, automatic ν",
    ]
    assert report.rows[1].nu == learner.choose_nu(setup.tasks).nu


def test_a_shifted_start_stays_within_the_way_to_the_solution():
    """Inner steps so short that ν∇f/λ is far away for every ν of the ladder's upper half."""
    setup = mlp(tasks=3)
    solver = mn.GradientDescent(lr=0.01, steps=3)
    learner = mn.MetaLearner(
        setup.model, setup.loss, lam=LAM, solver=solver, estimator=mn.FOBMAML(start="shifted")
    )
    found = learner.choose_nu(setup.tasks)
    theta = torch.cat([p.detach().flatten() for p in setup.model.parameters()])
    ratios = []
    for number in range(3):
        adapted = learner.adapt(setup.tasks[number].support, seed=0)
        inputs, targets = setup.tasks[number].query
        force = torch.autograd.grad(
            setup.loss(adapted(inputs), targets), list(adapted.parameters())
        )
        way = torch.cat([p.detach().flatten() for p in adapted.parameters()]) - theta
        ratios.append(float(torch.cat([g.flatten() for g in force]).norm() / LAM / way.norm()))
    assert found.longest == pytest.approx(1 / sorted(ratios)[1], rel=1e-9)
    assert found.longest < 0.1
    assert learner.tuner.nu == found.nu <= found.longest
    learner.estimator = mn.FOBMAML()
    assert learner.choose_nu(setup.tasks).longest == math.inf


@pytest.mark.parametrize("part", [1.0, 0.01])
def test_where_products_saturate_neighbours_agree_on_the_wrong_gradient(part):
    """∇f̂ = tanh: [∇f̂(φ + εw) − ∇f̂(φ − εw)]/2ε is tanh(ε/ε_0)/(ε/ε_0) of what it should be, and
    rounding adds noise of 1/ε. `part` is that of the products in the gradient.
    """
    setup, (flat, bent, noise) = logistic_regression(tasks=1), torch.eye(3, dtype=torch.float64)
    epsilons = [10 ** -(1 + rung / 2) for rung in range(7)]

    def choice(limit: dict[str, torch.Tensor] | None) -> tuple[float | None, float]:
        found = Disagreement(limit)
        problem = mn.MetaLearner(setup.model, setup.loss).problem()
        for rung, epsilon in enumerate(epsilons):
            ratio = epsilon / 3e-3
            seen = bent * (math.tanh(ratio) / ratio) + noise * ((-1) ** rung * 1e-4 / epsilon)
            found.see(Motion(problem, dict.fromkeys(problem.parameters, flat + part * seen)))
        return best_nu(epsilons, found.read()[0], order=2)

    names = mn.MetaLearner(setup.model, setup.loss).problem().parameters
    epsilon, error = choice(dict.fromkeys(names, flat))
    assert 1e-3 < epsilon < 3e-3
    # between these two neighbours: what tanh and the noise change from one to the other
    change = math.hypot(math.tanh(1.054) / 1.054 - math.tanh(1 / 3) * 3, 1e-4 / 3.16e-3 + 0.1)
    assert error == pytest.approx(part * change / math.hypot(1, part), rel=0.15)
    if part == 1.0:
        assert choice(None)[0] > 0.03
