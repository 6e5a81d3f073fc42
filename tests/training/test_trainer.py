"""The training loop: what it writes, that it repeats itself, and how it stops when numbers or
memory run out.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import metanudge as mn
from metanudge.tasks import Episodes
from metanudge.training import runs
from metanudge.training.checkpoint import CheckpointStore
from metanudge.training.config import TrainConfig
from metanudge.training.errors import StopTraining, UserError
from metanudge.training.metrics import read_metrics
from metanudge.training.progress import ConsoleReporter, Quiet
from metanudge.training.summary import Outcome, result_table
from metanudge.training.trainer import train

TINY = TrainConfig(
    "sinusoid", shots=4, queries=4, model="mlp:hidden=(6,),activation=tanh",
    solver="gradient_descent:lr=0.05,steps=2", tasks=3,
    iterations=8, eval_every=4, eval_tasks=4, test_tasks=6, checkpoint_every=3, metrics_every=1,
    device="cpu",
)  # fmt: skip


class Listener(Quiet):
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.steps: list[int] = []
        self.facts: dict[str, str] = {}
        self.rows: dict[str, str] = {}

    def begin(self, facts: Sequence[tuple[str, str]], *, total: int, done: int) -> None:
        self.facts = dict(facts)

    def step(self, done: int, values: dict[str, Any]) -> None:
        self.steps.append(done)

    def note(self, text: str) -> None:
        self.notes.append(text)

    def table(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        self.rows = dict(rows)


def go(folder: Path, **changes: Any) -> Listener:
    listener = Listener()
    assert train(dataclasses.replace(TINY, out=str(folder), **changes), reporter=listener) == 0
    return listener


def fingerprint(folder: Path) -> tuple[bytes, ...]:
    """The bytes that two equal runs share: metrics, weights, optimizer state, the rest of the
    state.
    """
    last = CheckpointStore(folder / "checkpoints").load("last").folder
    names = ("model.safetensors", "state.safetensors", "state.json")
    state = json.loads((last / "state.json").read_text())
    state["config"]["out"] = None
    return (
        (folder / "metrics.jsonl").read_bytes(),
        *((last / name).read_bytes() for name in names[:2]),
        json.dumps(state).encode(),
    )


def test_a_run_writes_everything_and_says_what_it_trains(tmp_path: Path) -> None:
    said = go(tmp_path / "run")
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        ".lock", "config.json", "metrics.jsonl", "timing.jsonl", "checkpoints", "summary.json",
        "curve.png",
    }  # fmt: skip
    assert (tmp_path / "run" / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert said.steps == list(range(1, 9))
    assert "19 parameters" in said.facts["model"]
    assert said.facts["engine"].startswith("stacked (")
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert [row["step"] for row in rows if "val_loss" in row] == [4, 8]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["test"]["tasks"] == 6
    assert math.isfinite(summary["test"]["loss_ci95"])
    assert "test loss" in said.rows


def test_the_same_run_twice_is_the_same_to_the_bit_and_another_seed_is_not(tmp_path: Path) -> None:
    go(tmp_path / "a")
    go(tmp_path / "b")
    assert fingerprint(tmp_path / "a") == fingerprint(tmp_path / "b")
    go(tmp_path / "c", seed=1)
    assert fingerprint(tmp_path / "a")[0] != fingerprint(tmp_path / "c")[0]


def test_the_loop_is_the_users_own_loop(tmp_path: Path) -> None:
    """The trainer takes the steps that the five-line loop of the README takes."""
    go(tmp_path / "run", clip=0.5, eval_every=0, test_tasks=0)
    config = runs.read_config(tmp_path / "run")
    source = runs.build_source(config)
    learner = runs.build_learner(config, source)
    optimizer = torch.optim.Adam(learner.parameters(), lr=0.01)
    for tasks in source.batches(size=3, count=8):
        optimizer.zero_grad()
        learner.backward(tasks)
        torch.nn.utils.clip_grad_norm_(learner.parameters(), 0.5)
        optimizer.step()
    trained = runs.load(tmp_path / "run").learner
    for name, parameter in learner.model.named_parameters():
        assert torch.equal(parameter, trained.model.get_parameter(name))


def test_measuring_seldom_changes_what_is_measured_not_what_is_learned(tmp_path: Path) -> None:
    go(tmp_path / "often")
    go(tmp_path / "seldom", metrics_every=3)
    often, seldom = (
        read_metrics(tmp_path / name / "metrics.jsonl") for name in ("often", "seldom")
    )
    assert [row["step"] for row in seldom if "query_loss" in row] == [1, 3, 6, 8]
    for full, sparse in zip(often, seldom, strict=True):
        assert sparse == {name: full[name] for name in sparse}
    assert fingerprint(tmp_path / "often")[1:3] == fingerprint(tmp_path / "seldom")[1:3]


def test_the_cosine_schedule_falls_to_zero(tmp_path: Path) -> None:
    go(tmp_path / "run", schedule="cosine", optimizer="sgd:lr=0.01", test_tasks=0)
    rates = [row["lr"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert rates == pytest.approx([0.005 * (1 + math.cos(math.pi * s / 8)) for s in range(8)])


def test_load_gives_the_best_weights_without_the_data(tmp_path: Path) -> None:
    go(tmp_path / "run")
    run = runs.load(tmp_path / "run")
    best = CheckpointStore(tmp_path / "run" / "checkpoints").load("best")
    assert run.state.step == best.step
    for name, tensor in run.learner.model.state_dict().items():
        assert torch.equal(tensor, best.tensors["model"][name])
    assert "source" not in vars(run)
    assert run.source.kind == "regression"
    with pytest.raises(UserError, match="nowhere"):
        runs.load(tmp_path / "nowhere")


@pytest.mark.parametrize("engine", ["stacked", "inplace"])
def test_bf16_activations_train_close_to_fp32(tmp_path: Path, engine: str) -> None:
    options = {"engine": engine, "estimator": "fobmaml:nu=0.1", "eval_every": 0, "test_tasks": 0}
    go(tmp_path / "wide", **options)
    go(tmp_path / "narrow", precision="bf16", **options)
    wide, narrow = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("wide", "narrow"))
    assert [row["query_loss"] for row in narrow] == pytest.approx(
        [row["query_loss"] for row in wide], rel=0.05
    )
    assert narrow[0]["query_loss"] != wide[0]["query_loss"]
    assert all(
        p.dtype == torch.float32 for p in runs.load(tmp_path / "narrow").learner.parameters()
    )


def test_nan_stops_before_the_update_and_keeps_the_last_good_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go(tmp_path / "good", iterations=4, test_tasks=0)
    draw = Episodes.batch

    def poisoned(self: Episodes, indices: Any, split: Any = "train") -> mn.TaskBatch:
        batch = draw(self, indices, split)
        if split == "train" and indices == range(12, 15):  # meta-step 5
            batch.stacks[0].support[1][1] = math.nan
        return batch

    monkeypatch.setattr(Episodes, "batch", poisoned)
    with pytest.raises(StopTraining) as stopped:
        go(tmp_path / "bad")
    assert stopped.value.code == 4
    for word in ("meta-step 5", "task 1", "inner step 0", "loss"):
        assert word in str(stopped.value)
    good, bad = (
        CheckpointStore(tmp_path / name / "checkpoints").load() for name in ("good", "bad")
    )
    assert bad.step == good.step == 4
    for name, tensor in good.tensors["model"].items():
        assert torch.equal(tensor, bad.tensors["model"][name])
    monkeypatch.undo()
    go(tmp_path / "whole")
    assert train(runs.read_config(tmp_path / "bad"), resume=tmp_path / "bad", reporter=Quiet()) == 0
    assert fingerprint(tmp_path / "bad") == fingerprint(tmp_path / "whole")


def test_weights_that_overflow_are_not_saved(tmp_path: Path) -> None:
    with pytest.raises(StopTraining, match="not finite after meta-step 1") as stopped:
        go(
            tmp_path / "run",
            optimizer="sgd:lr=1e38",
            clip=1e30,
            eval_every=0,
            estimator="fomaml",
            solver="gradient_descent:lr=1e-9,steps=1",
        )
    assert stopped.value.code == 4
    assert CheckpointStore(tmp_path / "run" / "checkpoints").list() == ()


def test_out_of_memory_halves_the_chunk_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = mn.MetaLearner.meta_gradient

    def limited(self: mn.MetaLearner, *args: Any, **options: Any) -> Any:
        if self.chunk is None or self.chunk > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate everything.")
        return compute(self, *args, **options)

    monkeypatch.setattr(mn.MetaLearner, "meta_gradient", limited)
    said = go(tmp_path / "run")
    assert [
        word for word in ("6 solves", "3 solves") if any(word in note for note in said.notes)
    ] == ["6 solves", "3 solves"]
    assert said.steps == list(range(1, 9))
    assert CheckpointStore(tmp_path / "run" / "checkpoints").load().state["chunk"] == 1


def test_out_of_memory_with_nothing_left_to_halve_saves_and_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(self: mn.MetaLearner, *args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(mn.MetaLearner, "meta_gradient", never)
    with pytest.raises(StopTraining, match="--engine inplace") as stopped:
        go(tmp_path / "run")
    assert stopped.value.code == 5
    assert CheckpointStore(tmp_path / "run" / "checkpoints").load().step == 0


def test_overshooting_inner_steps_are_told_once(tmp_path: Path) -> None:
    said = go(
        tmp_path / "run",
        solver="gradient_descent:lr=0.6,steps=3",
        iterations=60,
        eval_every=0,
        test_tasks=0,
    )
    assert len([note for note in said.notes if "residual grew" in note]) == 1


def test_a_metrics_file_that_was_changed_is_refused_and_one_that_is_gone_noticed(
    tmp_path: Path,
) -> None:
    go(tmp_path / "run")
    file = tmp_path / "run" / "metrics.jsonl"
    whole = file.read_bytes()
    longer = dataclasses.replace(runs.read_config(tmp_path / "run"), iterations=9)
    for content in (b"", whole[:-1], whole.replace(b"3", b"4", 1)):
        file.write_bytes(content)
        with pytest.raises(
            UserError, match=r"metrics\.jsonl was changed since the checkpoint.*move it away"
        ):
            train(longer, resume=tmp_path / "run", reporter=Quiet())
        assert file.read_bytes() == content
    file.unlink()
    listener = Listener()
    train(longer, resume=tmp_path / "run", reporter=listener)
    assert [note for note in listener.notes if "metrics.jsonl" in note] == [
        "metrics.jsonl is not there any more: it begins anew with step 9."
    ]
    assert [row["step"] for row in read_metrics(file)] == [9]


@pytest.mark.parametrize("terminal", [True, False])
def test_the_console_shows_the_facts_the_progress_and_the_result(
    tmp_path: Path, terminal: bool
) -> None:
    console = Console(force_terminal=terminal, width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    train(dataclasses.replace(TINY, out=str(tmp_path / "[run]")), reporter=ConsoleReporter(console))
    text = console.export_text()
    for word in (
        "sinusoid",
        "mlp:hidden=(6,)",
        "fobmaml",
        "CPU",
        "[run]",
        "ETA",
        "residual",
        "ν 0.",
        "MiB",
        "test loss",
    ):
        assert word in text, word
    console.file.close()


@pytest.mark.parametrize(
    ("best", "schedule", "said"),
    [(200, "constant", True), (100, "constant", False), (200, "cosine", False)],
)
def test_a_run_that_still_improves_says_how_to_go_on(
    tmp_path: Path, best: int, schedule: str, said: bool
) -> None:
    config = dataclasses.replace(TINY, schedule=schedule, eval_every=100)
    validation = {"step": best, "accuracy": 0.5, "loss": 1.0, "tasks": 3}
    learner = mn.MetaLearner(torch.nn.Linear(1, 1), torch.nn.functional.mse_loss)
    outcome = Outcome(200, validation, None, None, 1.0, resumed=False)
    lines = dict(result_table(tmp_path, config, outcome, learner))
    way = f"metanudge train --resume {tmp_path} --iterations 400"
    assert lines.get("still improving") == (way if said else None)
