"""What a plan says is what the allocations are: the engines themselves make it, without numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import metanudge as mn
from metanudge.cli import main
from metanudge.planning import MemoryPlan, PlannedStep
from metanudge.testing.memory import Allocations, peak_memory
from problems import Setup, classification_tasks, conv_net, mlp, seeded, transformer

CPU = torch.device("cpu")
LOSS, DIFFERENCE = mn.FOBMAML(nu=0.1), mn.MAML(products="difference", epsilon=1e-3)


def half(tasks: int = 2) -> Setup:
    """Layers that are packed."""
    model = seeded(0, lambda: nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 3)))
    data = classification_tasks((256,), 3, tasks, 6, 6, 0)
    return Setup(model.bfloat16(), F.cross_entropy, data.to(torch.bfloat16))


CASES: list[tuple[Any, Any, str, float]] = [
    (mlp, LOSS, "inplace", 0.1),
    (transformer, DIFFERENCE, "inplace", 0.1),
    (conv_net, mn.MAML(), "inplace", 0.1),
    (half, mn.FOBMAML(nu=0.1, nudge="gradient"), "inplace", 0.1),
    (mlp, mn.MAML(), "stacked", 0.25),
    (transformer, LOSS, "stacked", 0.25),
    (conv_net, LOSS, "stacked", 0.25),
    (half, mn.FOMAML(), "stacked", 0.25),
]


def learner_of(setup: Setup, estimator: Any, engine: Any = "auto") -> mn.MetaLearner:
    return mn.MetaLearner(
        setup.model,
        setup.loss,
        estimator=estimator,
        engine=engine,
        solver=mn.GradientDescent(0.01, 2),
    )


@pytest.mark.parametrize(("make", "estimator", "engine", "tolerance"), CASES)
def test_what_is_planned_is_what_is_allocated(
    make: Any, estimator: Any, engine: Any, tolerance: float
):
    """The tolerances are those that are promised; on a CPU there is next to nothing between."""
    setup = make()
    learner = learner_of(setup, estimator, engine)
    before = {n: p.detach().clone() for n, p in learner.named_parameters()}
    plan = mn.plan(learner, setup.tasks, estimators=[estimator], engines=[engine], timed=False)
    assert all(torch.equal(p, before[n]) for n, p in learner.named_parameters())
    assert learner.calls == 0
    learner.backward(setup.tasks)
    learner.zero_grad(set_to_none=True)
    seen = peak_memory(lambda: learner.backward(setup.tasks), CPU)
    assert plan.steps[0].peak == pytest.approx(seen, rel=tolerance)
    assert plan.chosen is plan.steps[0]


def test_gradients_are_counted_and_timed():
    setup = mlp(tasks=4)
    plan = mn.plan(learner_of(setup, LOSS), setup.tasks, estimators=[LOSS])
    assert [step.gradients for step in plan.steps] == [4 * 2 * 2 * 2] * 2
    assert all(step.seconds is not None and step.seconds > 0 for step in plan.steps)
    assert "FOBMAML(nu=0.1)" in str(plan)
    assert "FOBMAML(nu=0.1)" in plan._repr_html_()


def test_no_weights_are_needed():
    """8 GB of parameters, which nobody has made."""

    def make() -> mn.MetaLearner:
        like = {"bias": False, "dtype": torch.bfloat16}
        model = nn.Sequential(*(nn.Linear(16384, 16384, **like) for _ in range(4)))
        return mn.MetaLearner(model, F.mse_loss, estimator=LOSS)

    x = torch.zeros(1, 4, 16384, dtype=torch.bfloat16)
    tasks = mn.TaskBatch((x, x), (x, x))
    plan = mn.plan(make, tasks, estimators=[LOSS], engines=["inplace"])
    size = 4 * 16384**2
    assert plan.held == 2 * size
    (step,) = plan.steps
    assert step.peak is not None
    assert 8 * size < step.peak < 9.5 * size, "θ, displacement, meta-gradient; then .grad"
    assert step.seconds is None


def test_what_does_not_run_says_why():
    setup = mlp()
    tangent = mn.FOBMAML(stencil="tangent")
    plan = mn.plan(learner_of(setup, tangent), setup.tasks, estimators=[tangent], timed=False)
    assert [step.peak is None for step in plan.steps] == [True, False]
    assert "stacked" in plan.steps[0].why


def test_advice():
    large = PlannedStep(mn.MAML(), "stacked", 10 * 2**30, gradients=10, chosen=True)
    small = PlannedStep(mn.MAML(), "inplace", 2 * 2**30, gradients=12)
    least = PlannedStep(mn.FOMAML(), "inplace", 2**30, gradients=5)
    assert MemoryPlan((large, small), 0, None).advice == ""
    assert MemoryPlan((large, small), 0, 11 * 2**30).advice == ""
    advice = MemoryPlan((large, least, small), 0, 4 * 2**30).advice
    assert "MAML() with engine='stacked' needs 10 GiB. 4 GiB are free." in advice
    assert "MAML() with engine='inplace', 2 GiB" in advice
    assert "checkpointing" in MemoryPlan((large, small), 0, 2**30).advice


def test_what_is_no_learner_is_refused():
    with pytest.raises(TypeError, match="got int"):
        mn.plan(lambda: 1, mlp().tasks)  # type: ignore[arg-type, return-value]


def test_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: Any):
    monkeypatch.chdir(tmp_path)
    flags = ["sinusoid", "--tasks", "2", "--estimator", "fomaml", "--device", "cpu"]
    assert main(["plan", *flags]) == 0
    said = capsys.readouterr().out
    assert "FOMAML()" in said
    assert "chosen" in said
    assert list(tmp_path.iterdir()) == [], "nothing is written"
    assert main(["plan"]) == 2
    assert "Name the data" in capsys.readouterr().err


def test_what_an_operator_takes_for_itself_counts_while_it_runs():
    x = torch.ones(8, 8)
    with Allocations(workspaces={torch.ops.aten.mm.default: 1000}) as seen:
        y = x @ x
        z = y + y
    assert (seen.live, seen.peak) == (y.nbytes + z.nbytes, y.nbytes + 1000)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_workspaces_of_convolutions(dtype: torch.dtype):
    """cuDNN's are a tenth of what so small a network takes."""
    block = [nn.Conv2d(64, 64, 3, padding=1), nn.GELU(), nn.MaxPool2d(2)]
    body = [nn.Conv2d(3, 64, 3, padding=1), *copy.deepcopy(block), *copy.deepcopy(block)]
    model = nn.Sequential(*body, nn.Flatten(), nn.Linear(64 * 64, 5)).to("cuda", dtype)
    x, labels = torch.randn(25, 3, 32, 32, device="cuda", dtype=dtype), torch.arange(25) % 5
    tasks = [mn.Task((x, labels.cuda()), (x, labels.cuda())) for _ in range(2)]
    estimator = mn.FOBMAML(nu=0.1)
    learner = mn.MetaLearner(model, F.cross_entropy, estimator=estimator, engine="inplace")
    plan = mn.plan(learner, tasks, estimators=[estimator], engines=["inplace"])
    learner.backward(tasks)  # kernels are chosen at the first call
    learner.zero_grad(set_to_none=True)
    seen = peak_memory(lambda: learner.backward(tasks), torch.device("cuda"))
    assert plan.chosen.peak == pytest.approx(seen, rel=0.1)


@pytest.mark.filterwarnings("error")  # numbers that are not there say nothing of kinks
def test_without_stiffness():
    setup = mlp()
    learner = mn.MetaLearner(
        setup.model, setup.loss, lam=0, estimator=mn.MAML(products="difference")
    )
    for step in mn.plan(learner, setup.tasks, timed=False).steps:
        assert (step.peak is None) is isinstance(step.estimator, mn.FOBMAML)
        assert ("a λ above 0" in step.why) is isinstance(step.estimator, mn.FOBMAML)
