"""Runs that learn their inner rates: what they write, resume, load and refuse."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import metanudge as mn
from metanudge.cli import main
from metanudge.training import runs, specs
from metanudge.training.config import TrainConfig
from metanudge.training.errors import UserError
from metanudge.training.metrics import read_metrics
from metanudge.training.progress import Quiet, describe
from metanudge.training.trainer import train

TINY = TrainConfig(
    "sinusoid", shots=4, queries=4, model="mlp:hidden=(6,),activation=tanh",
    solver="gradient_descent:lr=0.05,steps=2", estimator="maml:step_weights=(0.25,1)", tasks=3,
    iterations=6, eval_every=3, eval_tasks=4, test_tasks=4, checkpoint_every=2, metrics_every=1,
    device="cpu", learn_lr="step", rate_lr=0.1, learn_lam="scalar",
    optimizer="adamw:lr=0.01,weight_decay=0.1", adapt="head.*",
)  # fmt: skip


def go(folder: Path, **changes: Any) -> Path:
    assert train(dataclasses.replace(TINY, out=str(folder), **changes), reporter=Quiet()) == 0
    return folder


@pytest.mark.parametrize(
    ("word", "part", "names"),
    [
        ("scalar", "log_lr", ["inner_lr"]),
        ("step", "log_lr", ["inner_lr.head.weight", "inner_lr.head.bias"]),
        ("signed-parameter", "lr", ["inner_lr.head.weight", "inner_lr.head.bias"]),
    ],
)
def test_metrics_summary_and_checkpoint_hold_the_rates(
    tmp_path: Path, word: str, part: str, names: list[str]
):
    run = go(tmp_path / "run", learn_lr=word)
    lines = read_metrics(run / "metrics.jsonl")
    assert all([name for name in line if name.startswith("inner_lr")] == names for line in lines)
    assert lines[0][names[0]] == pytest.approx(0.05, rel=1e-5)
    loaded = runs.load(run, checkpoint="last")
    assert loaded.state.tensors.keys() == {"model", "log_lam", part}
    assert list(json.loads((run / "summary.json").read_text())["inner_lr"]) == names
    assert loaded.learner.learn_lr == mn.InnerRates(
        word.removeprefix("signed-"), positive=part == "log_lr"
    )
    assert loaded.learner.estimator == mn.MAML(step_weights=(0.25, 1.0))
    rates = loaded.learner.rates()["head.bias"]
    assert not torch.allclose(rates, torch.full_like(rates, 0.05), rtol=1e-2)


def test_a_resumed_run_is_the_same_run(tmp_path: Path):
    whole = go(tmp_path / "whole")
    part = go(tmp_path / "part", iterations=3)
    config = dataclasses.replace(TINY, out=str(part))
    assert train(config, resume=part, reporter=Quiet()) == 0
    assert (part / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    pairs = zip(
        runs.load(whole).learner.named_parameters(),
        runs.load(part).learner.named_parameters(),
        strict=True,
    )
    assert all(n == m and torch.equal(a, b) for (n, a), (m, b) in pairs)


def test_rates_have_a_group_without_weight_decay():
    learner = runs.build_learner(TINY, runs.build_source(TINY))
    groups = specs.parameter_groups(learner, None, TINY.rate_lr)
    optimizer = specs.build_optimizer(TINY.optimizer, groups)
    assert [(g["lr"], g["weight_decay"], len(g["params"])) for g in optimizer.param_groups] == [
        (0.01, 0.1, 4),
        (0.01, 0.0, 1),
        (0.1, 0.0, 2),
    ]


def test_a_checkpoint_without_the_rates_is_refused(tmp_path: Path):
    fixed = runs.load(go(tmp_path / "run", learn_lr="none", rate_lr=None))
    learner = runs.build_learner(TINY, runs.build_source(TINY))
    with pytest.raises(UserError, match="The learned inner lr has changed since"):
        runs.load_weights(learner, fixed.state)


def test_the_progress_line_shows_them():
    assert "inner lr 0.05–0.1" in describe(
        {"residual": 1.0, "inner_lr.a": 0.1, "inner_lr.b": 0.05, "lr": 3.0}
    )
    assert "inner" not in describe({"residual": 1.0, "lr": 3.0})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--learn-lr", "tensor"], "FOBMAML has no gradient for the inner learning rates"),
        (["--rate-lr", "0.1"], "inner rates are not learned. Add --learn-lr tensor"),
        (
            ["--estimator", "maml:step_weights=(1,1)"],
            "step_weights has 2 weights, but the solver takes 5 steps",
        ),
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
    fixed = ["--model", "mlp:hidden=(4,)", "--device", "cpu", "--out", "run"]
    assert main(["train", "sinusoid", *fixed, *flags]) == 2
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert message in said
    assert not list(tmp_path.iterdir())


def test_flags_from_the_command_line_reach_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    flags = (
        "--model mlp:hidden=(4,) --solver torch_optimizer:optimizer=adam,lr=0.01,steps=2 --tasks 2"
        " --iterations 2 --device cpu --eval-tasks 2 --test-tasks 2 --learn-lr signed-step"
        " --rate-lr 1e-2 --estimator maml:products=difference,step_weights=(0.5,1.0) --out run"
    )
    assert main(["train", "sinusoid", *flags.split()]) == 0
    said = capsys.readouterr().out
    assert "inner rates learned (signed-step)" in said
    assert "learned rates" in said
    assert main(["eval", "run", "--tasks", "3", "--steps", "5"]) == 0
