"""The stacked engine asks who can take gradients faster, says what it heard, and does without."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import metanudge as mn
from metanudge.engines.stacked import Offer, offer_for

SOURCES = Path(__file__).parents[2] / "src"


def images(model: nn.Module, *, loss=F.cross_entropy, **options) -> tuple[mn.MetaLearner, object]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 6, 16, generator=generator)
    y = torch.randint(0, 3, (2, 6), generator=generator)
    torch.manual_seed(0)
    learner = mn.MetaLearner(model, loss, engine="stacked", **options)
    return learner, mn.TaskBatch(support=(x, y), query=(x, y))


def conv_net() -> nn.Module:
    torch.manual_seed(0)
    return mn.models.Conv1D(ways=3, channels=4, length=16)


class Doubling(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def small(*, extra: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 5), extra or nn.Tanh(), nn.Linear(5, 3))


def own_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target, label_smoothing=0.1)


def with_model(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


FIXED = mn.FOBMAML(nu=0.1)
PATHS = {
    "blocks": (conv_net, F.cross_entropy, FIXED, "fused blocks"),
    "a loss as a module": (conv_net, nn.CrossEntropyLoss(), FIXED, "fused blocks"),
    "a loss of one's own": (
        conv_net,
        own_loss,
        FIXED,
        "fused blocks, the loss by torch.func (no F.cross_entropy)",
    ),
    "an option of the loss": (
        conv_net,
        nn.CrossEntropyLoss(label_smoothing=0.1),
        FIXED,
        "fused blocks, the loss by torch.func (no F.cross_entropy)",
    ),
    "second derivatives": (
        conv_net,
        F.cross_entropy,
        mn.MAML(),
        "native layers, twice differentiable",
    ),
    "no blocks": (small, F.cross_entropy, FIXED, "native layers (no fused blocks: "),
    "no chain": (
        lambda: small(extra=Doubling()),
        F.cross_entropy,
        FIXED,
        "torch.func (no native layers: 1 (Doubling) has no kernels of its own)",
    ),
    "the model in the loss": (
        small,
        with_model,
        FIXED,
        "torch.func (no native layers: the loss runs the model itself)",
    ),
}


@pytest.mark.parametrize("name", PATHS)
def test_statistics_say_how_gradients_were_taken_and_why_not_faster(name):
    make, loss, estimator, path = PATHS[name]
    learner, tasks = images(make(), loss=loss, estimator=estimator)
    stats = learner.backward(tasks)
    assert stats.engine == "stacked"
    assert stats.path.startswith(path)
    assert str(stats).endswith(f"tasks, stacked, {stats.path}")
    engine, _ = learner.choose_engine(tasks)
    second = estimator.graphs(learner.solver) > 0
    assert engine.path(learner.problem(), tasks, second_order=second) == stats.path


def test_in_place_there_is_one_way():
    learner, tasks = images(small())
    learner.engine = "inplace"
    assert learner.backward(tasks).path == ""


def test_a_module_of_the_loss_gets_what_the_function_gets():
    results = []
    for loss in (F.cross_entropy, nn.CrossEntropyLoss()):
        learner, tasks = images(conv_net(), loss=loss, estimator=mn.FOBMAML(nu=0.1))
        results.append(learner.meta_gradient(tasks))
    (ours, stats), (theirs, other) = results
    assert all(torch.equal(ours[n], theirs[n]) for n in ours)
    assert stats.path == other.path


def test_layers_that_run_twice_are_taken_twice():
    """The same activation, or the same linear layer, at two places of a Sequential."""
    torch.manual_seed(0)
    same, linear = nn.Tanh(), nn.Linear(5, 5)
    for model in (
        nn.Sequential(nn.Linear(16, 5), same, nn.Linear(5, 5), same, nn.Linear(5, 3)),
        nn.Sequential(nn.Linear(16, 5), nn.Tanh(), linear, nn.Tanh(), linear, nn.Linear(5, 3)),
    ):
        learner, tasks = images(model, estimator=mn.FOMAML())
        learner.double()
        tasks = tasks.to(torch.float64)
        stacked, stats = learner.meta_gradient(tasks)
        assert stats.path.startswith("native layers")
        learner.engine = "inplace"
        inplace, _ = learner.meta_gradient(tasks)
        for name, leaf in stacked.items():
            torch.testing.assert_close(leaf, inplace[name], rtol=0, atol=1e-13)


def test_who_registers_is_asked(monkeypatch):
    monkeypatch.setattr("metanudge.engines.stacked._registered", [])
    learner, tasks = images(small())
    assert offer_for(learner.problem(), tasks.stacks[0]) == "no accelerator is installed"
    assert learner.backward(tasks).path == "torch.func (no accelerator is installed)"

    from metanudge.engines.vmapped import StackedInner

    class Another:
        def offer(self, problem, stack):
            return Offer(StackedInner, "another way", "another way", fused=False)

        def recorder(self):
            raise AssertionError

    monkeypatch.setattr("metanudge.engines.stacked._registered", [Another()])
    assert (
        learner.choose_engine(tasks)[0].path(learner.problem(), tasks, second_order=False)
        == "another way"
    )


SCRIPT = """
import importlib.util, json, sys
import torch
import metanudge as mn
from torch.nn import functional as F

torch.manual_seed(0)
x = torch.randn(2, 6, 16, dtype=torch.float64)
y = torch.randint(0, 3, (2, 6))
tasks = mn.TaskBatch(support=(x, y), query=(x, y))
found = {"accel": importlib.util.find_spec("metanudge.accel") is not None}
for estimator in (mn.FOBMAML(nu=0.1, nudge="gradient"), mn.FOBMAML(nu=0.1), mn.MAML(), mn.IMAML()):
    torch.manual_seed(1)
    model = mn.models.Conv1D(ways=3, channels=4, length=16).double()
    learner = mn.MetaLearner(model, F.cross_entropy, estimator=estimator)
    stats = learner.backward(tasks)
    found[repr(estimator)] = [v for p in learner.parameters() for v in p.grad.flatten().tolist()]
    found["path of " + repr(estimator)] = stats.path
from metanudge.cli import main

sizes = "--iterations 2 --tasks 2 --eval-every 0 --test-tasks 2".split()
found["exit"] = main(["train", "sinusoid", *sizes, "--device", "cpu", "--out", sys.argv[1]])
print(json.dumps(found))
"""


def test_without_the_folder_everything_works(tmp_path):
    """The same meta-gradients, and a run, where nothing is faster than `torch.func`."""
    shutil.copytree(
        SOURCES, tmp_path / "src", ignore=shutil.ignore_patterns("accel", "__pycache__")
    )
    found = []
    for name, sources in (("with", SOURCES), ("without", tmp_path / "src")):
        result = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tmp_path / name)],
            env={**os.environ, "PYTHONPATH": str(sources)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        found.append(json.loads(result.stdout.splitlines()[-1]))
    ours, plain = found
    assert ours.pop("accel")
    assert not plain.pop("accel")
    for name, value in ours.items():
        if isinstance(value, list):
            exact = torch.tensor(plain[name], dtype=torch.float64)
            error = torch.tensor(value, dtype=torch.float64) - exact
            assert float(error.norm()) <= 1e-11 * float(exact.norm())
        elif name.startswith("path"):
            assert plain[name] == "torch.func (no accelerator is installed)"
            assert value != plain[name]
        else:
            assert value == plain[name] == 0
