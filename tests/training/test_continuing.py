"""What a run is made of is verified when it goes on, and what cannot be repeated to the last bit is
said before it does.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from metanudge.cli import main
from metanudge.tasks import SOURCES, Sinusoid
from metanudge.training import runs
from metanudge.training.checkpoint import CheckpointStore, save
from metanudge.training.device import environment
from metanudge.training.distributed import Group
from metanudge.training.errors import UserError
from metanudge.training.files import RunLock
from metanudge.training.metrics import read_metrics
from metanudge.training.preparation import make_plan
from metanudge.training.progress import Quiet
from metanudge.training.trainer import train
from training.test_trainer import TINY, Listener, fingerprint, go

SHORT = {"iterations": 2, "checkpoint_every": 1, "eval_every": 0, "test_tasks": 0}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    go(folder, **SHORT)
    return folder


def resume(run: Path, **options: Any) -> Listener:
    listener = Listener()
    assert (
        train(
            dataclasses.replace(runs.read_config(run), iterations=3),
            resume=run,
            reporter=listener,
            **options,
        )
        == 0
    )
    return listener


def edit_state(run: Path, **changes: Any) -> None:
    """Write the last checkpoint anew with other values in its state (`...`: without)."""
    checkpoint = CheckpointStore(run / "checkpoints").load()
    shutil.rmtree(checkpoint.folder)
    state = {key: value for key, value in (checkpoint.state | changes).items() if value is not ...}
    save(checkpoint.folder, step=checkpoint.step, tensors=checkpoint.tensors, state=state)


def test_the_environment_is_recorded_and_a_change_of_it_said_before_the_first_step(
    tmp_path: Path, trained: Path
) -> None:
    now = environment(torch.device("cpu"))
    assert {"metanudge", "torch", "device", "threads", "cpu_capability", "processor"} <= now.keys()
    assert CheckpointStore(trained / "checkpoints").load().state["environment"] == now
    assert now.items() <= json.loads((trained / "summary.json").read_text()).items()
    same = shutil.copytree(trained, tmp_path / "same")
    assert resume(same).notes == []
    other = shutil.copytree(trained, tmp_path / "other")
    edit_state(other, environment=now | {"threads": 64, "torch": "2.0"})
    (note,) = resume(other).notes
    assert "Not bit-equal" in note
    assert f"threads 64 → {torch.get_num_threads()}" in note
    assert "torch 2.0 → " in note
    assert "device" not in note


def test_another_engine_is_said_too(tmp_path: Path, trained: Path) -> None:
    run, listener = shutil.copytree(trained, tmp_path / "run"), Listener()
    train(
        dataclasses.replace(runs.read_config(run), iterations=3, engine="inplace"),
        resume=run,
        reporter=listener,
    )
    assert [note for note in listener.notes if "--engine auto → inplace" in note] == listener.notes


class Marked(Sinusoid):
    """A source whose data have a content hash."""

    mark: str | None = "1" * 64

    def fingerprint(self) -> str | None:
        return self.mark


def test_changed_data_are_refused_unless_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SOURCES, "sinusoid", Marked)
    run = tmp_path / "run"
    go(run, **SHORT)
    assert CheckpointStore(run / "checkpoints").load().state["data_sha256"] == "1" * 64
    before = fingerprint(run)
    monkeypatch.setattr(Marked, "mark", "2" * 64)
    with pytest.raises(
        UserError, match=r"sinusoid has changed.*1111….*2222….*--allow-changed-data"
    ):
        resume(run)
    assert main(["train", "--resume", str(run), "--iterations", "3"]) == 2
    assert fingerprint(run) == before
    (note,) = resume(run, allow_changed_data=True).notes
    assert "has changed" in note
    # the new data are now the run's own
    assert main(["train", "--resume", str(run), "--iterations", "4"]) == 0
    monkeypatch.setattr(Marked, "mark", "3" * 64)
    assert main(["train", "--resume", str(run), "--iterations", "5", "--allow-changed-data"]) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": ...}, {"optimizer": {}}, {"optimizer": {"state": 5, "param_groups": [{}]}},
        {"metrics_size": "many"},
        {"config": ...},
        {"config": {"lam": "2"}}, {"config": {"what": 1}}, {"shapes": 3}, {"lrs": None},
        {"best": 7}, {"chunk": "all"}, {"tuner": 1},
        {"version": 3},
    ],
    ids=str,
)  # fmt: skip
def test_a_made_up_state_is_refused(tmp_path: Path, trained: Path, changes: dict[str, Any]) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    edit_state(run, **changes)
    metrics = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match="save-"):
        resume(run)
    assert (run / "metrics.jsonl").read_bytes() == metrics


class Vandal(Quiet):
    """Spoils the metrics file in the middle of a run; keeps what is said."""

    def __init__(self, file: Path, damage: bytes) -> None:
        self.file, self.damage = file, damage
        self.notes: list[str] = []

    def step(self, done: int, values: dict[str, Any]) -> None:
        if done == 5:
            lines = self.file.read_bytes().split(b"\n")
            self.file.write_bytes(b"\n".join([lines[0], self.damage, *lines[2:]]))

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.mark.parametrize(
    "damage",
    [
        b"{",
        b"\xff\xfe",
        b"7",
        b'{"step": "two"}',
        b'{"step": 2, "query_loss": "low"}',
        b'{"step": 2, "query_loss": NaN}',
        b"[" * 99999,
    ],
)
def test_a_damaged_line_does_not_end_a_finished_training(tmp_path: Path, damage: bytes) -> None:
    vandal = Vandal(tmp_path / "run" / "metrics.jsonl", damage)
    assert (
        train(
            dataclasses.replace(TINY, out=str(tmp_path / "run"), test_tasks=0, eval_every=0),
            reporter=vandal,
        )
        == 0
    )
    (note,) = vandal.notes
    assert "metrics.jsonl has damaged lines, 1 of 8" in note
    assert "line 2." in note
    assert (tmp_path / "run" / "summary.json").exists()
    assert [row["step"] for row in read_metrics(vandal.file)] == [1, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace('"steps": 2', '"steps": 9'),
        lambda text: text[:-3],
        lambda text: "[]",
    ],
)
def test_a_changed_summary_is_noticed(tmp_path: Path, trained: Path, damage: Any) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    file = run / "summary.json"
    file.write_text(damage(file.read_text()))
    (note,) = resume(run).notes
    assert "summary.json was changed" in note
    assert resume(run).notes == []  # it was written anew


def test_a_restarted_job_goes_on_with_its_own_run_and_no_other(
    tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # all unfinished
    for name, job in (("sinusoid-1", "a"), ("sinusoid-2", "b"), ("sinusoid-3", None)):
        shutil.copytree(trained, tmp_path / "runs" / name)
        (tmp_path / "runs" / name / "summary.json").unlink()
        with RunLock(print, job=job) as lock:
            lock.take(tmp_path / "runs" / name)

    def plan(job: str | None, out: str | None = None) -> str:
        with RunLock(print, job=job) as lock:
            return str(
                make_plan(dataclasses.replace(TINY, out=out), None, Group(job=job), lock).folder
            )

    assert plan("a") == "runs/sinusoid-1"
    assert plan("b") == "runs/sinusoid-2"
    for job in ("c", None):
        assert not Path(plan(job)).exists()  # a new one
    assert plan("a", "runs/sinusoid-1") == "runs/sinusoid-1"
    for job, out in (
        ("c", "runs/sinusoid-1"),
        ("b", "runs/sinusoid-1"),
        (None, "runs/sinusoid-1"),
        ("a", "runs/sinusoid-3"),
    ):
        with pytest.raises(UserError, match="is not empty"):
            plan(job, out)
