"""A run that is killed, stopped or extended goes on to the same bytes."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from metanudge.training import runs
from metanudge.training.checkpoint import CheckpointError
from metanudge.training.errors import StopTraining, UserError
from metanudge.training.progress import Quiet
from metanudge.training.trainer import train
from training.test_trainer import TINY, fingerprint, go

KILLS = 10 if os.environ.get("METANUDGE_SLOW") else 3
FLAGS = [
    "sinusoid", "--shots", "4", "--queries", "4", "--model", "mlp:hidden=(6,),activation=tanh",
    "--tasks", "3", "--iterations", "80",
    "--solver", "gradient_descent:lr=0.05,steps=2", "--eval-every", "20", "--eval-tasks", "4",
    "--test-tasks", "6",
    "--checkpoint-every", "7",
]  # fmt: skip


def start(*flags: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "metanudge", "train", *flags]
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=240)
    return output


def lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


class InterruptAt(Quiet):
    """Sends this process a signal after a meta-step."""

    def __init__(self, step: int, number: int) -> None:
        self.at, self.number = step, number

    def step(self, done: int, values: dict[str, Any]) -> None:
        if done == self.at:
            signal.raise_signal(self.number)


def test_a_run_killed_at_random_moments_ends_with_the_same_bytes(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert finish(start(*FLAGS, "--out", str(whole)))
    draw = random.Random(20)
    moments = sorted(draw.sample(range(2, 78), KILLS))
    for number, moment in enumerate(moments):
        process = (
            start(*FLAGS, "--out", str(killed)) if number == 0 else start("--resume", str(killed))
        )
        while lines(killed / "metrics.jsonl") < moment:
            if process.poll() is not None:
                raise AssertionError(finish(process))
            time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.05))
        process.kill()
        finish(process)
        assert process.returncode == -signal.SIGKILL
    assert not (killed / "summary.json").exists()
    process = start("--resume", str(killed))
    output = finish(process)
    assert process.returncode == 0, output
    assert fingerprint(killed) == fingerprint(whole)
    assert (killed / "curve.png").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_the_run_goes_on_exactly(tmp_path: Path, number: int, code: int) -> None:
    go(tmp_path / "whole")
    run = tmp_path / "run"
    with pytest.raises(StopTraining, match=r"step \d is saved.*--resume") as stopped:
        train(dataclasses.replace(TINY, out=str(run)), reporter=InterruptAt(4, number))
    assert stopped.value.code == code
    saved = runs.load(run, checkpoint="last").state.step
    assert saved == 5  # the signal came after step 4 was recorded; one more step was finished
    assert train(runs.read_config(run), resume=run, reporter=Quiet()) == 0
    assert fingerprint(run) == fingerprint(tmp_path / "whole")


def test_a_run_killed_before_its_first_checkpoint_starts_over(tmp_path: Path) -> None:
    go(tmp_path / "run")
    whole = fingerprint(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert train(runs.read_config(tmp_path / "run"), resume=tmp_path / "run", reporter=Quiet()) == 0
    assert fingerprint(tmp_path / "run") == whole


def test_a_finished_run_can_be_extended(tmp_path: Path) -> None:
    go(tmp_path / "short", iterations=8)
    go(tmp_path / "long", iterations=12)
    config = dataclasses.replace(runs.read_config(tmp_path / "short"), iterations=12)
    train(config, resume=tmp_path / "short", reporter=Quiet())
    assert fingerprint(tmp_path / "short") == fingerprint(tmp_path / "long")


def test_a_moved_run_resumes_where_it_is(tmp_path: Path) -> None:
    go(tmp_path / "here")
    (tmp_path / "here").rename(tmp_path / "there")
    config = dataclasses.replace(runs.read_config(tmp_path / "there"), iterations=9)
    train(config, resume=tmp_path / "there", reporter=Quiet())
    assert not (tmp_path / "here").exists()
    assert runs.load(tmp_path / "there", checkpoint="last").state.step == 9


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "mlp:hidden=(7,)"}, ["--model", "(6,)", "(7,)"]),
        ({"seed": 5}, ["--seed", "0", "5"]),
        ({"shots": 7}, ["--shots was 4, now 7"]),
        ({"queries": 5}, ["--queries was 4, now 5"]),
        ({"shots": "2-4"}, ["--shots was 4, now '2-4'"]),
        ({"estimator": "fomaml", "lam": 3.0}, ["--estimator", "fomaml", "--lam"]),
        ({"iterations": 4}, ["--iterations", "8"]),
        ({"out": "elsewhere"}, ["--out elsewhere", "--resume"]),
    ],
)
def test_resuming_with_another_configuration_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    go(tmp_path / "run")
    before = fingerprint(tmp_path / "run")
    with pytest.raises(UserError) as refused:
        train(
            dataclasses.replace(runs.read_config(tmp_path / "run"), **changes),
            resume=tmp_path / "run",
            reporter=Quiet(),
        )
    for word in words:
        assert word in str(refused.value)
    assert fingerprint(tmp_path / "run") == before


def test_a_model_whose_code_changed_is_refused_with_the_tensors_that_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from metanudge import models

    go(tmp_path / "run")
    monkeypatch.setitem(
        models.MODELS, "mlp", lambda hidden, activation: torch.nn.Sequential(torch.nn.Linear(1, 1))
    )
    with pytest.raises(UserError, match=r"model has changed.*0\.bias"):
        train(runs.read_config(tmp_path / "run"), resume=tmp_path / "run", reporter=Quiet())


def test_a_damaged_checkpoint_is_refused_and_the_one_before_offered(tmp_path: Path) -> None:
    go(tmp_path / "run")
    whole = fingerprint(tmp_path / "run")
    last = runs.load(tmp_path / "run", checkpoint="last").state.folder
    weights = (last / "model.safetensors").read_bytes()
    (last / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    with pytest.raises(UserError, match=r"model\.safetensors.*--resume .*save-") as refused:
        train(runs.read_config(tmp_path / "run"), resume=tmp_path / "run", reporter=Quiet())
    with pytest.raises(CheckpointError):
        runs.load(tmp_path / "run", checkpoint="last")
    offered = Path(str(refused.value).rsplit("--resume ", 1)[1])
    assert train(runs.read_config(tmp_path / "run"), resume=offered, reporter=Quiet()) == 0
    assert fingerprint(tmp_path / "run") == whole
