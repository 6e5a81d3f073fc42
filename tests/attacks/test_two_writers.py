"""Two writers of one run: the second is always refused, by name, whichever way it comes."""

from __future__ import annotations

import dataclasses
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from metanudge.cli import main
from metanudge.training import runs
from metanudge.training.errors import UserError
from metanudge.training.progress import Quiet
from metanudge.training.trainer import train
from training.test_trainer import TINY, go


class AtStep(Quiet):
    """Calls something when a meta-step is done, from inside the run."""

    def __init__(self, step: int, call: Any) -> None:
        self.at, self.call = step, call

    def step(self, done: int, values: dict[str, Any]) -> None:
        if done == self.at:
            self.call()


def test_ten_of_ten_are_refused_while_a_run_is_live(tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = dataclasses.replace(TINY, out=str(run))
    refused: list[str] = []

    def attack() -> None:
        resumed = [dataclasses.replace(runs.read_config(run), iterations=n) for n in (8, 9, 20)]
        ways = [
            *({"config": c, "resume": run} for c in resumed),
            {"config": resumed[0], "resume": Path(os.path.relpath(run))},
            {"config": resumed[0], "resume": max((run / "checkpoints").iterdir())},
            {"config": config},
            {"config": dataclasses.replace(config, seed=5)},
            {"config": dataclasses.replace(config, out=os.path.relpath(run))},
        ]
        before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
        for way in ways:
            with pytest.raises(UserError) as error:
                train(**way, reporter=Quiet())
            refused.append(str(error.value))
        assert main(["train", "--resume", str(run)]) == 2
        assert main(["train", "sinusoid", "--out", str(run)]) == 2
        assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before

    go(tmp_path / "whole")
    assert train(config, reporter=AtStep(4, attack)) == 0
    assert len(refused) == 8
    assert all(f"in use: process {os.getpid()} on {platform.node()}" in text for text in refused)
    assert (run / "metrics.jsonl").read_bytes() == (
        tmp_path / "whole" / "metrics.jsonl"
    ).read_bytes()
    assert (
        train(
            dataclasses.replace(runs.read_config(run), iterations=9), resume=run, reporter=Quiet()
        )
        == 0
    )


def test_another_process_is_refused_with_exit_code_2(tmp_path: Path) -> None:
    run = tmp_path / "run"
    said: list[subprocess.CompletedProcess[str]] = []

    def attack() -> None:
        command = [sys.executable, "-m", "metanudge", "train", "--resume", str(run)]
        said.append(
            subprocess.run(command, text=True, capture_output=True, timeout=120, check=False)
        )

    assert train(dataclasses.replace(TINY, out=str(run)), reporter=AtStep(4, attack)) == 0
    assert said[0].returncode == 2
    assert f"process {os.getpid()} on {platform.node()}" in said[0].stderr
    assert "Traceback" not in said[0].stderr


def test_two_runs_that_begin_at_once_in_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is past its plan, where the folder was new, when the second comes and claims it."""
    from metanudge.training import trainer

    config = dataclasses.replace(TINY, out=str(tmp_path / "run"))
    try_out = trainer.try_out

    def overtaken(*args: Any) -> None:
        monkeypatch.setattr(trainer, "try_out", try_out)
        assert train(config, reporter=Quiet()) == 0
        try_out(*args)

    monkeypatch.setattr(trainer, "try_out", overtaken)
    with pytest.raises(UserError, match="is not empty"):
        train(config, reporter=Quiet())
    assert runs.load(tmp_path / "run", checkpoint="last").state.step == 8


def test_runs_that_begin_in_the_same_second_without_a_folder_get_one_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "20260101-120000")
    config = dataclasses.replace(TINY, iterations=1, eval_every=0, test_tasks=0)
    for _ in range(3):
        train(config, reporter=Quiet())
    names = sorted(path.name for path in Path("runs").iterdir())
    assert names == [
        "sinusoid-20260101-120000",
        "sinusoid-20260101-120000-2",
        "sinusoid-20260101-120000-3",
    ]
    assert [runs.read_config(Path("runs") / name).out for name in names] == [
        f"runs/{name}" for name in names
    ]
