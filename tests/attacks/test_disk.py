"""A run folder that goes away and a disk that is full: an exit code, a message, earlier checkpoints
intact, nothing made anew.
"""

from __future__ import annotations

import builtins
import dataclasses
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from metanudge.cli import main
from metanudge.training import runs, summary, trainer
from metanudge.training.checkpoint import CheckpointStore, files
from metanudge.training.errors import StopTraining
from metanudge.training.metrics import MetricsLog
from metanudge.training.progress import Quiet
from metanudge.training.trainer import train
from training.test_trainer import TINY, fingerprint, go


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    go(folder)
    return folder


class After(Quiet):
    """Does something after a meta-step."""

    def __init__(self, step: int, act: Callable[[], Any]) -> None:
        self.at, self.act = step, act

    def step(self, done: int, values: dict[str, Any]) -> None:
        if done == self.at:
            self.act()


@pytest.mark.parametrize("step", [1, 3, 8], ids=["soon", "after a checkpoint", "before the test"])
@pytest.mark.parametrize("how", ["deleted", "moved"])
def test_a_run_folder_that_goes_away(tmp_path: Path, whole: Path, step: int, how: str) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"

    def attack() -> None:
        shutil.move(run, elsewhere)
        if how == "deleted":
            shutil.rmtree(elsewhere)

    with pytest.raises(StopTraining, match="deleted or moved") as stopped:
        train(dataclasses.replace(TINY, out=str(run)), reporter=After(step, attack))
    assert stopped.value.code == 6
    assert str(run) in str(stopped.value)
    assert not run.exists()
    if how == "moved":
        assert train(runs.read_config(elsewhere), resume=elsewhere, reporter=Quiet()) == 0
        assert fingerprint(elsewhere) == fingerprint(whole)


def test_the_command_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save = trainer.Training._save
    monkeypatch.setattr(
        trainer.Training,
        "_save",
        lambda self, **how: (save(self, **how), shutil.rmtree(self.folder))[0],
    )
    assert (
        main(
            [
                "train",
                "sinusoid",
                "--tasks=2",
                "--iterations=9",
                "--checkpoint-every=2",
                f"--out={tmp_path / 'run'}",
            ]
        )
        == 6
    )
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "deleted or moved" in said
    assert list(tmp_path.iterdir()) == []


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_for_metrics(log: MetricsLog, values: Any, write: Any = MetricsLog.write) -> Any:
    return write(log, values) if "seconds" in values else full()


def full_for_timing(log: MetricsLog, values: Any, write: Any = MetricsLog.write) -> Any:
    return full() if "seconds" in values else write(log, values)


WRITERS: dict[str, tuple[Any, str]] = {
    "metrics": (MetricsLog, "write"),
    "metrics on its way to the disk": (MetricsLog, "sync"),
    "timing": (MetricsLog, "write"),
    "checkpoint": (files.disk, "write"),
    "checkpoint's folder": (files.disk, "mkdir"),
    "checkpoint's name": (files.disk, "rename"),
    "summary": (summary, "write_text"),
    "curve": (summary, "learning_curve"),
}


@pytest.mark.parametrize("what", WRITERS)
def test_a_disk_that_fills_up(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    run = tmp_path / "run"
    owner, name = WRITERS[what]
    fails = {"metrics": full_for_metrics, "timing": full_for_timing}.get(what, full)

    # the checkpoint of meta-step 3 is written
    reporter = After(4, lambda: monkeypatch.setattr(owner, name, fails))
    with pytest.raises(StopTraining, match="No space left on device") as stopped:
        train(dataclasses.replace(TINY, out=str(run)), reporter=reporter)
    monkeypatch.undo()
    assert stopped.value.code == 6
    assert f"--resume {run}" in str(stopped.value)
    assert "intact" in str(stopped.value)
    assert CheckpointStore(run / "checkpoints").load("last").step >= 3
    assert train(runs.read_config(run), resume=run, reporter=Quiet()) == 0
    assert fingerprint(run) == fingerprint(whole)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_device_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's own error, at the moment it comes: buffered lines fail when they are flushed,
    and again when the file is closed.
    """

    class OnFullDevice(MetricsLog):
        def write(self, values: Any) -> None:
            self._file.close()
            self._file = builtins.open("/dev/full", "ab")  # noqa: SIM115
            super().write(values)

        in_place = True

    monkeypatch.setattr(trainer, "MetricsLog", OnFullDevice)
    with pytest.raises(StopTraining, match="No space left on device") as stopped:
        go(tmp_path / "run")
    assert stopped.value.code == 6


def test_eval_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    go(tmp_path / "run")
    monkeypatch.setattr("json.dump", full)
    assert (
        main(["eval", str(tmp_path / "run"), "--tasks=2", f"--json={tmp_path / 'found.json'}"]) == 6
    )
    assert "No space left on device" in capsys.readouterr().err
    assert not (tmp_path / "found.json").exists()
