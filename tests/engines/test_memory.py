"""Memory of the in-place engine is that of one training step plus a few copies of the parameters;
float32 is precise enough.

Counted on allocations (`allocations.py`), so the figures are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import metanudge as mn
from conformance import by_hand, learner_for
from metanudge.testing.memory import Allocations, trainable_bytes
from problems import Setup, classification_tasks, relative_error, seeded

TOLERANCE = 0.05

# torch's own forward-mode decompositions are scripted on first use.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)


# --------------------------------------------------------------------------------------- the helper


def test_the_helper_counts_what_is_alive():
    """Known sizes: allocated, shared by views, freed."""
    before = torch.zeros(1000, dtype=torch.float64)
    with Allocations() as seen:
        a = torch.ones(1000, dtype=torch.float64)
        assert (seen.live, seen.peak) == (8000, 8000)
        b = a[10:].view(-1, 10)
        before.add_(a)
        assert seen.live == 8000, "a view and an in-place operator allocate nothing"
        c = a + 1
        assert seen.live == 16000
        del a
        assert seen.live == 16000, "the view keeps the storage"
        del b
        assert seen.live == 8000
        d = torch.empty(250, dtype=torch.float64).copy_(c[:250])
        assert seen.live == 10000
        del c, d
    assert (seen.live, seen.peak) == (0, 16000)


def test_the_helper_sees_the_backward_pass():
    """tanh(tanh(x)) keeps two activations; its backward pass needs two more buffers, less what is
    freed on the way.
    """
    x = torch.zeros(1000, dtype=torch.float64, requires_grad=True)
    with Allocations() as seen:
        loss = torch.tanh(torch.tanh(x)).sum()
        assert seen.live == 2 * 8000 + 8
        loss.backward()
        assert seen.live == 8000 + 8, "the gradient and the loss"
    # Both activations, the gradient that comes from above and the one that goes on; sum() sends an
    # expanded scalar.
    assert 3 * 8000 <= seen.peak <= 4 * 8000 + 64


def test_the_helper_agrees_with_the_allocator():
    """The profiler counts in the allocator itself, workspaces of kernels included."""
    model = seeded(0, lambda: nn.Sequential(nn.Linear(40, 80), nn.Tanh(), nn.Linear(80, 40)))
    x = torch.zeros(20, 40, dtype=torch.float64)

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    step()
    model.zero_grad()
    with Allocations() as seen:
        step()
    model.zero_grad()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    assert peak > 2 * 3200 * 8, "the profiler has seen the weights' gradients"
    assert abs(seen.peak - peak) <= 0.02 * peak


# --------------------------------------------------------------------------------------- the engine


def deep_perceptron(tasks: int) -> Setup:
    """Parameters weigh more than activations; seven layers of equal size."""
    model = seeded(
        0,
        lambda: nn.Sequential(
            *(layer for _ in range(7) for layer in (nn.Linear(60, 60), nn.Tanh())),
            nn.Linear(60, 3),
        ),
    )
    return Setup(model, F.cross_entropy, classification_tasks((60,), 3, tasks, 4, 6, 0))


def wide_perceptron(tasks: int) -> Setup:
    """Parameters weigh more than activations; one layer holds most of them."""
    model = seeded(
        0,
        lambda: nn.Sequential(
            nn.Linear(60, 150), nn.Tanh(), nn.Linear(150, 150), nn.Tanh(), nn.Linear(150, 3)
        ),
    )
    return Setup(model, F.cross_entropy, classification_tasks((60,), 3, tasks, 4, 6, 0))


def shallow_perceptron(tasks: int) -> Setup:
    """Parameters weigh more than activations; one layer holds nearly all of them."""
    model = seeded(0, lambda: nn.Sequential(nn.Linear(400, 40), nn.Tanh(), nn.Linear(40, 3)))
    return Setup(model, F.cross_entropy, classification_tasks((400,), 3, tasks, 4, 6, 0))


def balanced_perceptron(tasks: int, support: int = 40, query: int = 40) -> Setup:
    """Parameters and activations weigh about the same."""
    model = seeded(
        0,
        lambda: nn.Sequential(
            *(layer for _ in range(3) for layer in (nn.Linear(40, 40), nn.Tanh())),
            nn.Linear(40, 3),
        ),
    )
    return Setup(model, F.cross_entropy, classification_tasks((40,), 3, tasks, support, query, 0))


def conv_net(tasks: int) -> Setup:
    """Activations weigh more than parameters."""
    model = seeded(
        0,
        lambda: nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(96, 3),
        ),
    )
    return Setup(model, F.cross_entropy, classification_tasks((1, 12, 12), 3, tasks, 6, 10, 0))


MODELS: dict[str, Callable[[int], Setup]] = {
    "deep_perceptron": deep_perceptron,
    "wide_perceptron": wide_perceptron,
    "shallow_perceptron": shallow_perceptron,
    "balanced_perceptron": balanced_perceptron,
    "larger_query": lambda tasks: balanced_perceptron(tasks, support=10),
    "larger_support": lambda tasks: balanced_perceptron(tasks, query=10),
    "conv_net": conv_net,
}


def training_step_peak(setup: Setup) -> int:
    """Peak of one plain training step, on the support or the query set, whichever needs more."""
    model, loss, tasks = setup
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    peaks = []
    for x, y in (tasks[0].support, tasks[0].query):
        with Allocations() as seen:
            optimizer.zero_grad(set_to_none=True)
            loss(model(x), y).backward()
            optimizer.step()
        peaks.append(seen.peak)
        model.zero_grad(set_to_none=True)
    return max(peaks)


def peak_of(
    setup: Setup, estimator: Any, engine: str = "inplace", steps: int = 1, solver: Any = None
) -> int:
    solver = mn.GradientDescent(0.01, steps) if solver is None else solver
    learner = learner_for(setup, estimator, engine, solver=solver)
    learner.problem()
    with Allocations() as seen:
        result = learner.meta_gradient(setup.tasks)
    del result
    return seen.peak


def copies(setup: Setup, peak: int) -> float:
    """Extra memory in copies of the trainable parameters."""
    return (peak - training_step_peak(setup)) / trainable_bytes(setup.model)


def assert_at_most(setup: Setup, peak: int, number: int, *, tolerance: float = TOLERANCE) -> None:
    allowed = training_step_peak(setup) + number * trainable_bytes(setup.model)
    assert peak <= (1 + tolerance) * allowed, (
        f"{copies(setup, peak):.2f} copies of the parameters on top of a training step"
    )


def test_the_models_are_what_they_are_for():
    # A training step holds the gradients too, one copy of the parameters: the rest are activations.
    size = {
        name: training_step_peak(make(1)) / trainable_bytes(make(1).model)
        for name, make in MODELS.items()
    }
    assert size["deep_perceptron"] < 1.05
    assert size["wide_perceptron"] < 1.05
    assert size["shallow_perceptron"] < 1.05
    assert 1.2 < size["balanced_perceptron"] < 2
    assert size["conv_net"] > 20


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stencil", ["symmetric", "forward", "five-point"])
def test_loss_nudge_needs_three_copies(model: str, stencil: str):
    """θ, displacement and accumulating meta-gradient, over a plain training step on one of the
    sets.
    """
    setup = MODELS[model](2)
    assert_at_most(
        setup, peak_of(setup, mn.FOBMAML(nu=0.1, stencil=stencil), steps=3), 3, tolerance=0.01
    )


def test_where_parameters_dominate_less_than_three_copies_do():
    """A training step holds a whole gradient, inner steps never do."""
    deep, wide = deep_perceptron(2), wide_perceptron(2)
    assert copies(deep, peak_of(deep, mn.FOBMAML(nu=0.1), steps=3)) < 2.3
    assert copies(wide, peak_of(wide, mn.FOBMAML(nu=0.1), steps=3)) < 2.8


@pytest.mark.parametrize(
    "model", ["deep_perceptron", "wide_perceptron", "balanced_perceptron", "conv_net"]
)
@pytest.mark.parametrize("nudge", ["loss", "gradient"])
def test_steps_and_tasks_do_not_matter(model: str, nudge: str):
    estimator = mn.FOBMAML(nu=0.1, nudge=nudge)
    one = peak_of(MODELS[model](1), estimator)
    assert peak_of(MODELS[model](1), estimator, steps=50) <= (1 + TOLERANCE) * one
    assert peak_of(MODELS[model](32), estimator) <= (1 + TOLERANCE) * one


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stencil", ["symmetric", "forward", "five-point"])
def test_gradient_nudge_needs_three_copies(model: str, stencil: str):
    """∇f(φ_0) takes the place of the displacement, of which an eighth is held while activations
    are: the remainders of φ.
    """
    setup = MODELS[model](2)
    assert_at_most(
        setup, peak_of(setup, mn.FOBMAML(nu=0.1, nudge="gradient", stencil=stencil), steps=3), 3
    )


@pytest.mark.parametrize("model", MODELS)
def test_gradient_nudge_in_single_precision_needs_a_quarter_more(model: str):
    """A byte of four; it shows where activations, or one layer's gradient, weigh about as much as
    all parameters.
    """
    double = MODELS[model](2)
    setup = Setup(double.model.float(), double.loss, double.tasks.to(torch.float32))
    assert copies(setup, peak_of(setup, mn.FOBMAML(nu=0.1, nudge="gradient"), steps=3)) < 3.3


def test_a_tolerance_holds_whole_gradients():
    """Whether to step is known only when the whole residual is: one gradient waits, and the largest
    layer's next part beside it.
    """
    setup = wide_perceptron(2)
    peak = peak_of(setup, mn.FOBMAML(nu=0.1), solver=mn.GradientDescent(0.01, 3, tol=1e-9))
    assert 3.5 < copies(setup, peak) < 3.9


@pytest.mark.parametrize(
    ("estimator", "number"),
    [
        (mn.FOMAML(), 3),
        (mn.Reptile(), 3),
        (mn.FOBMAML(nu=0.1, start="solution"), 4),
        (mn.FOBMAML(nu=0.1, nudge="gradient", start="shifted"), 4),
        (mn.FOBMAML(nu=0.1, nudge="gradient", start="solution"), 4),
    ],
    ids=str,
)
@pytest.mark.parametrize("model", ["deep_perceptron", "wide_perceptron", "conv_net"])
def test_copies_of_the_other_estimators(estimator: Any, number: int, model: str):
    """One more copy where solves start at φ_0, which must live until the last of them; and while a
    shifted start is made.
    """
    setup = MODELS[model](2)
    assert_at_most(setup, peak_of(setup, estimator, steps=3), number)


def test_other_solvers_add_their_state():
    """Nesterov keeps one copy more than gradient descent, Adam two."""
    setup = deep_perceptron(2)
    assert_at_most(setup, peak_of(setup, mn.FOBMAML(nu=0.1), solver=mn.Nesterov(0.01, 3)), 4)
    # Adam's own temporaries (the denominator) are one tensor at a time: at most the largest layer.
    adam = mn.TorchOptimizer(torch.optim.Adam, 3, {"lr": 0.01, "foreach": False})
    assert_at_most(setup, peak_of(setup, mn.FOBMAML(nu=0.1), solver=adam), 6)


def test_evaluate_and_adapt_need_no_more():
    setup = deep_perceptron(2)
    learner = learner_for(setup, engine="inplace")
    with Allocations() as seen:
        learner.evaluate(setup.tasks)
    assert_at_most(setup, seen.peak, 2)  # θ and the displacement
    with Allocations() as seen:
        learner.adapt(setup.tasks[0].support)
    assert_at_most(setup, seen.peak, 3)  # and the adapted copy itself


def test_maml_grows_with_the_steps_and_the_tangent_does_not():
    """What the nudge is for: reverse mode keeps every step, a difference or a tangent keeps
    none.
    """
    setup = wide_perceptron(1)
    maml = [peak_of(setup, mn.MAML(), "stacked", steps) for steps in (4, 6, 9)]
    per_step = [(maml[1] - maml[0]) / 2, (maml[2] - maml[1]) / 3]
    assert min(per_step) > trainable_bytes(setup.model[1:]), (
        "every step keeps at least the weights that gradients go back through"
    )
    assert per_step[1] == pytest.approx(per_step[0], rel=0.1), "linearly"
    for estimator in (mn.FOBMAML(nu=0.1), mn.FOBMAML(stencil="tangent"), mn.IMAML()):
        few, many = (peak_of(setup, estimator, "stacked", steps) for steps in (2, 10))
        assert many <= (1 + TOLERANCE) * few, estimator


@pytest.mark.parametrize("estimator", [mn.FOBMAML(nu=0.1), mn.MAML()], ids=["FOBMAML", "MAML"])
def test_chunks_bound_the_memory_of_the_stacked_engine(estimator: Any):
    setup = wide_perceptron(8)

    def peak(chunk: int | None) -> int:
        learner = learner_for(setup, estimator, chunk=chunk)
        with Allocations() as seen:
            learner.meta_gradient(setup.tasks)
        return seen.peak

    whole, half, least = peak(None), peak(8 * estimator.width // 2), peak(1)
    assert half < 0.65 * whole
    assert least < 0.3 * whole


# ---------------------------------------------------------------------------------------- precision


def far_from_zero() -> Setup:
    """Regression with weights of size 1e3 whose tasks are a few units away."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 24, 8, generator=generator, dtype=torch.float64) / 8**0.5
    model = nn.Linear(8, 1).double()
    with torch.no_grad():
        model.weight.copy_(1e3 * torch.randn(1, 8, generator=generator, dtype=torch.float64))
        model.bias.fill_(1e3)
    moved = 30 * torch.randn(2, 8, 1, generator=generator, dtype=torch.float64)
    y = model(x).detach() + x @ moved
    # Numbers that float32 holds exactly, so that both precisions solve the same problem.
    model.float().double()
    x, y = x.float().double(), y.float().double()
    return Setup(model, F.mse_loss, mn.TaskBatch((x[:, :12], y[:, :12]), (x[:, 12:], y[:, 12:])))


@pytest.mark.parametrize("nudge", ["loss", "gradient"])
@pytest.mark.parametrize("lr", [0.05, 0.001])
@pytest.mark.parametrize("engine", ["stacked", "inplace"])
def test_float32_matches_float64_far_from_zero(engine: str, lr: float, nudge: str):
    """|θ| ~ 1e3 and ν = 1e-2: displacements are accumulated, never φ, whose rounding 1/ν would
    amplify (and 1/α, step by step).
    """
    setup = far_from_zero()
    solver = mn.GradientDescent(lr, 30)
    estimator = mn.FOBMAML(nu=1e-2, nudge=nudge)
    truth, _ = learner_for(setup, estimator, engine, solver=solver).meta_gradient(setup.tasks)
    single = Setup(setup.model.float(), setup.loss, setup.tasks.to(torch.float32))
    result, _ = learner_for(single, estimator, engine, solver=solver).meta_gradient(single.tasks)
    assert all(g.dtype == torch.float32 for g in result.values())
    error = relative_error(_double(result), truth)
    assert error < 1e-3
    if nudge == "loss":
        naive = by_hand(single, lr=lr, steps=30, nu=1e-2)
        assert relative_error(_double(naive), truth) > 5 * error, (
            "the loop over φ itself is what this avoids"
        )


def _double(gradient: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: g.double() for n, g in gradient.items()}
