"""Training with `nu=auto`: chosen by rank 0 when it is time, shown, saved, and chosen again the
same way after a stop.
"""

from __future__ import annotations

import dataclasses
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from metanudge.tasks import Episodes
from metanudge.training import runs
from metanudge.training.checkpoint import CheckpointStore
from metanudge.training.errors import StopTraining
from metanudge.training.metrics import read_metrics
from metanudge.training.progress import Quiet, describe
from metanudge.training.trainer import train
from metanudge.tuning import NuTuner
from training.test_resume import InterruptAt
from training.test_trainer import TINY, fingerprint, go

AUTO = {"estimator": "fobmaml:nu=auto", "model": "mlp:hidden=(6,),activation=relu"}


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> list[range]:
    """Looks every second meta-step; the episodes that were drawn for looks."""
    monkeypatch.setattr(
        "metanudge.learner.NuTuner", partial(NuTuner, every=2, share=100.0, most_tasks=2)
    )
    drawn: list[range] = []
    batch = Episodes.batch

    def noted(self: Episodes, episodes: Any, *args: Any) -> Any:
        drawn.append(episodes)
        return batch(self, episodes, *args)

    monkeypatch.setattr(Episodes, "batch", noted)
    return drawn


def test_nu_is_chosen_on_tasks_of_the_meta_step_and_shown(
    tmp_path: Path, often: list[range]
) -> None:
    go(tmp_path / "run", **AUTO)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert all(5e-4 <= row["nu"] <= 0.5 for row in rows)
    assert [row["nu"] for row in rows][::2] == [row["nu"] for row in rows][1::2], (
        "the same until the next look"
    )
    assert f"ν {rows[0]['nu']:.3g}" in describe(rows[0])
    looks = [episodes for episodes in often if len(episodes) == 2]
    assert looks == [range(step * 3, step * 3 + 2) for step in (0, 2, 4, 6)]
    state = CheckpointStore(tmp_path / "run" / "checkpoints").load("last").state
    assert state["tuner"]["nu"] == rows[-1]["nu"]


@pytest.mark.parametrize("step", [3, 4])
def test_a_stopped_run_goes_on_exactly(tmp_path: Path, often: list[range], step: int) -> None:
    go(tmp_path / "whole", **AUTO)
    run = tmp_path / "run"
    with pytest.raises(StopTraining):
        train(
            dataclasses.replace(TINY, out=str(run), **AUTO),
            reporter=InterruptAt(step, signal.SIGTERM),
        )
    assert train(runs.read_config(run), resume=run, reporter=Quiet()) == 0
    assert fingerprint(run) == fingerprint(tmp_path / "whole")


def test_a_number_needs_no_tuner(tmp_path: Path) -> None:
    go(tmp_path / "run", iterations=2, estimator="fobmaml:nu=0.1")
    assert CheckpointStore(tmp_path / "run" / "checkpoints").load("last").state["tuner"] is None


def test_a_meta_gradient_that_drowns_is_told_once(tmp_path: Path, often: list[range]) -> None:
    # inner steps that overshoot, a θ that stays
    wild = {"solver": "gradient_descent:lr=0.3,steps=20", "optimizer": "sgd:lr=0"}
    said = go(tmp_path / "run", estimator="fobmaml:nu=auto", **wild, eval_every=0, test_tasks=0)
    assert len([note for note in said.notes if "larger than its error" in note]) == 1
