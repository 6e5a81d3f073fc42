"""Runs that learn their stiffness or share layers: what they write, resume, load and refuse."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from metanudge.cli import main
from metanudge.training import runs, specs
from metanudge.training.config import TrainConfig
from metanudge.training.errors import UserError
from metanudge.training.metrics import read_metrics
from metanudge.training.progress import Quiet, describe
from metanudge.training.trainer import train

TINY = TrainConfig(
    "sinusoid", shots=4, queries=4, model="mlp:hidden=(6,),activation=tanh",
    solver="gradient_descent:lr=0.05,steps=2", tasks=3,
    iterations=6, eval_every=3, eval_tasks=4, test_tasks=4, checkpoint_every=2, metrics_every=1,
    device="cpu", learn_lam="tensor",
    optimizer="adamw:lr=0.01,weight_decay=0.1", lam_lr=0.05, schedule="cosine", adapt="head.*",
)  # fmt: skip


def go(folder: Path, **changes: Any) -> Path:
    assert train(dataclasses.replace(TINY, out=str(folder), **changes), reporter=Quiet()) == 0
    return folder


@pytest.mark.parametrize(
    ("per", "names"),
    [
        ("scalar", ["lam"]),
        ("tensor", ["lam.head.weight", "lam.head.bias"]),
        ("parameter", ["lam.head.weight", "lam.head.bias"]),
    ],
)
def test_metrics_summary_and_checkpoint_hold_the_stiffness(
    tmp_path: Path, per: str, names: list[str]
):
    run = go(tmp_path / "run", learn_lam=per)
    lines = read_metrics(run / "metrics.jsonl")
    assert all([name for name in line if name.startswith("lam")] == names for line in lines)
    assert lines[0][names[0]] == pytest.approx(2.0), (
        "the first meta-step uses what the run was started with"
    )
    # Adam's first step on log λ is its learning rate, up or down: λ has one of its own.
    assert abs(torch.tensor(lines[1][names[0]] / 2.0).log().item()) == pytest.approx(
        0.05, rel=0.02 if per != "parameter" else 1.0
    )
    loaded = runs.load(run, checkpoint="last")
    assert loaded.state.tensors.keys() == {"model", "log_lam"}
    summary = json.loads((run / "summary.json").read_text())
    assert list(summary["lam"]) == names
    now = {
        name: leaf.double().log().mean().exp().item()
        for name, leaf in loaded.learner.stiffness().items()
    }
    assert now["head.bias"] != pytest.approx(2.0, rel=1e-3)
    if per != "scalar":
        best = {
            f"lam.{n}": leaf.double().log().mean().exp().item()
            for n, leaf in runs.load(run).learner.stiffness().items()
        }
        assert summary["lam"] == pytest.approx(best), "of the weights that were tested"


def test_a_resumed_run_is_the_same_run(tmp_path: Path):
    whole = go(tmp_path / "whole", schedule="constant")
    part = go(tmp_path / "part", schedule="constant", iterations=3)
    config = dataclasses.replace(TINY, schedule="constant", out=str(part))
    assert train(config, resume=part, reporter=Quiet()) == 0
    assert (part / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    for a, b in zip(
        runs.load(whole).learner.parameters(), runs.load(part).learner.parameters(), strict=True
    ):
        assert torch.equal(a, b)


def test_loaded_runs_adapt_what_they_were_told_to(tmp_path: Path):
    learner = runs.load(go(tmp_path / "run")).learner
    source = runs.build_source(TINY)
    adapted = learner.adapt(source.task(0).support)
    for (n, a), (_, b) in zip(
        adapted.named_parameters(), learner.model.named_parameters(), strict=True
    ):
        assert torch.equal(a, b) is not n.startswith("head.")


def test_log_lam_has_a_group_without_weight_decay():
    learner = runs.build_learner(TINY, runs.build_source(TINY))
    optimizer = specs.build_optimizer(TINY.optimizer, specs.parameter_groups(learner, TINY.lam_lr))
    assert [(g["lr"], g["weight_decay"], len(g["params"])) for g in optimizer.param_groups] == [
        (0.01, 0.1, 4),
        (0.05, 0.0, 2),
    ]
    alone = specs.build_optimizer(TINY.optimizer, specs.parameter_groups(learner, None))
    assert [g["lr"] for g in alone.param_groups] == [0.01, 0.01]
    fixed = runs.build_learner(
        dataclasses.replace(TINY, learn_lam="none", lam_lr=None), runs.build_source(TINY)
    )
    assert (
        len(specs.build_optimizer(TINY.optimizer, specs.parameter_groups(fixed, None)).param_groups)
        == 1
    )


def test_a_checkpoint_without_the_stiffness_is_refused(tmp_path: Path):
    fixed = runs.load(go(tmp_path / "run", learn_lam="none", lam_lr=None))
    learner = runs.build_learner(TINY, runs.build_source(TINY))
    with pytest.raises(
        UserError,
        match=(
            r"The learned stiffness has changed since .* \(not in the checkpoint: head\.bias,"
            r" head\.weight\)"
        ),
    ):
        runs.load_weights(learner, fixed.state)


def test_the_progress_line_shows_it():
    assert "λ 1.5" in describe({"residual": 1.0, "lam": 1.5})
    assert "λ 0.5–3" in describe({"residual": 1.0, "lam.a": 0.5, "lam.b": 3.0})
    assert "λ" not in describe({"residual": 1.0})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learn_lam": "none"}, "--lam-lr 0.05 was given, but λ is not learned"),
        ({"lam_lr": -1.0}, "--lam-lr -1.0 is not a positive number"),
        ({"adapt": " , "}, "--adapt ' , ' names no parameters"),
    ],
)
def test_settings_that_make_no_sense(changes: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(TINY, **changes).check()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--adapt", "haed.*"],
            "--adapt 'haed.*' matches no trainable parameter. Near matches: head.weight, head.bias",
        ),
        (
            ["--learn-lam", "tensor", "--estimator", "fomaml"],
            "FOMAML has no gradient for the stiffness",
        ),
        (
            ["--adapt", "head.*", "--estimator", "reptile"],
            "Reptile has no gradient for parameters that do not adapt",
        ),
        (["--lam-lr", "0.1"], "λ is not learned. Add --learn-lam tensor"),
    ],
)
def test_bad_flags_are_explained_and_nothing_is_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    message: str,
):
    monkeypatch.chdir(tmp_path)
    assert (
        main(
            [
                "train",
                "sinusoid",
                "--model",
                "mlp:hidden=(4,)",
                "--device",
                "cpu",
                "--out",
                "run",
                *flags,
            ]
        )
        == 2
    )
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert message in said
    assert not list(tmp_path.iterdir())


def test_flags_from_the_command_line_reach_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    flags = [
        "--model",
        "mlp:hidden=(4,)",
        "--solver",
        "gradient_descent:lr=0.01,steps=1",
        "--tasks",
        "2",
        "--iterations",
        "2",
        "--device",
        "cpu",
    ]
    more = [
        "--eval-tasks",
        "2",
        "--test-tasks",
        "2",
        "--learn-lam",
        "scalar",
        "--lam-lr",
        "1e-2",
        "--adapt",
        "head.*,features.1.bias",
    ]
    assert main(["train", "sinusoid", *flags, *more, "--out", "run"]) == 0
    assert "learned stiffness" in capsys.readouterr().out
    assert list(runs.load(tmp_path / "run").learner.problem().parameters) == [
        "features.1.bias",
        "head.weight",
        "head.bias",
    ]
    assert main(["eval", "run", "--tasks", "3"]) == 0
