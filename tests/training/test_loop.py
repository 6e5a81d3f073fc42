"""A trainer without a run: the caller's own learner, source and optimizer, checkpoints that go on
to the same bits.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import metanudge as mn
from metanudge.models import MLP
from metanudge.tasks import Sinusoid
from metanudge.training.errors import UserError
from metanudge.training.loop import Course, Trainer

COURSE = Course(iterations=8, tasks=3, schedule="cosine", clip=1.0, checkpoint_every=3)


def make(folder: Path | None = None, course: Course = COURSE, **options: Any) -> Trainer:
    torch.manual_seed(0)
    learner = mn.MetaLearner(
        MLP(1, 1, hidden=(6,)),
        nn.functional.mse_loss,
        solver=mn.GradientDescent(lr=0.01, steps=3),
        estimator=mn.ESMAML(samples=2),  # draws at every meta-step
    )
    optimizer = torch.optim.Adam(learner.parameters(), lr=0.01)
    return Trainer(learner, Sinusoid(seed=1), optimizer, course, folder=folder, **options)


def theta(trainer: Trainer) -> Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.learner.parameters()])


class Killed(Exception):
    pass


@pytest.mark.parametrize("step", [1, 3, 5, 8])
def test_it_goes_on_to_the_same_bits(tmp_path: Path, step: int) -> None:
    whole = make()
    whole.run()

    def kill(done: int, values: dict[str, Any]) -> None:
        if done == step:
            raise Killed

    with pytest.raises(Killed):
        make(tmp_path / "cell", on_step=kill).run()
    again = make(tmp_path / "cell")
    assert again.step == (step - 1) // 3 * 3  # killed before the checkpoint of its step
    again.run()
    assert torch.equal(theta(again), theta(whole))
    assert again.step == 8


def test_a_finished_one_is_only_loaded(tmp_path: Path) -> None:
    first = make(tmp_path / "cell")
    first.run()
    steps: list[int] = []
    again = make(tmp_path / "cell", on_step=lambda step, values: steps.append(step))
    again.run()
    assert steps == []
    assert torch.equal(theta(again), theta(first))


def test_another_course_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "cell").run()
    with pytest.raises(UserError, match="another course"):
        make(tmp_path / "cell", dataclasses.replace(COURSE, iterations=9))


def test_another_model_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "cell").run()
    learner = mn.MetaLearner(MLP(1, 1, hidden=(7,)), nn.functional.mse_loss)
    optimizer = torch.optim.Adam(learner.parameters(), lr=0.01)
    with pytest.raises(UserError, match=r"The model has changed .*of another shape"):
        Trainer(learner, Sinusoid(seed=1), optimizer, COURSE, folder=tmp_path / "cell")


@pytest.mark.parametrize(("every", "measured"), [(0, []), (3, [1, 3, 6, 8])])
def test_what_is_measured(every: int, measured: list[int]) -> None:
    found: list[int] = []

    def see(step: int, values: dict[str, Any]) -> None:
        if "query_loss" in values:
            found.append(step)

    make(course=dataclasses.replace(COURSE, metrics_every=every), on_step=see).run()
    assert found == measured


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    trainer = make()
    with torch.no_grad():
        next(iter(trainer.learner.parameters())).fill_(torch.nan)
    before = theta(trainer)
    with pytest.raises(mn.NonFiniteError):
        trainer.run()
    assert trainer.step == 0
    assert torch.equal(theta(trainer).nan_to_num(7.0), before.nan_to_num(7.0))
    assert not trainer.optimizer.state


def test_it_needs_torch_and_numpy_only() -> None:
    """The lab's experiments train where nothing else is installed."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('tyro', 'rich', 'safetensors', 'matplotlib')"
        ")); import metanudge.training.loop"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
