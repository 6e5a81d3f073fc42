"""`metanudge doctor`: its verdict, also when something is wrong."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from metanudge.cli import doctor, main
from metanudge.cli.doctor import Check, self_test
from metanudge.cli.reproducibility import reproducibility
from metanudge.estimators import Exact
from metanudge.learner import MetaLearner
from metanudge.solvers import GradientDescent
from metanudge.training.checkpoint import CheckpointStore
from metanudge.training.config import TrainConfig
from trained_runs import make_run


def test_everything_is_shown_and_passes(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for word in (
        "metanudge",
        "python",
        "torch",
        "numpy",
        "cpu",
        "memory",
        "cache",
        "mnist1d",
        "omniglot",
        "tensorboard",
        "PASS",
    ):
        assert word in text
    assert "FAIL" not in text
    assert torch.get_num_threads() == threads


def test_both_engines_and_the_main_estimators_are_checked() -> None:
    checks = self_test()
    assert {check.engine for check in checks} == {"stacked", "inplace"}
    assert {check.estimator.split()[0].rstrip(",") for check in checks} == {
        "FOBMAML",
        "IMAML",
        "MAML",
    }
    assert all(check.passed for check in checks)


def test_a_wrong_gradient_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    correct = MetaLearner.meta_gradient

    def wrong(self: MetaLearner, *args: Any, **options: Any) -> Any:
        gradient, stats = correct(self, *args, **options)
        return {name: leaf * 1.001 for name, leaf in gradient.items()}, dataclasses.replace(stats)

    monkeypatch.setattr(MetaLearner, "meta_gradient", wrong)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "9 of 9 checks FAILED" in text
    assert "FAIL" in text


def test_a_gradient_that_is_no_number_fails() -> None:
    assert not Check("any", "stacked", float("nan"), 1.0).passed


def test_the_oracle_is_the_implicit_gradient() -> None:
    model, _, tasks = doctor.small_problem()
    oracle = doctor._dense_oracle(model, tasks)
    solver = GradientDescent(lr=0.4, steps=60)
    learner = MetaLearner(
        model, torch.nn.functional.cross_entropy, lam=doctor._LAM, solver=solver, estimator=Exact()
    )
    gradient, _ = learner.meta_gradient(tasks)
    torch.testing.assert_close(
        torch.cat([leaf.flatten() for leaf in gradient.values()]), oracle, rtol=1e-12, atol=1e-14
    )


def test_what_is_not_reproducible_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    lines = dict(reproducibility(None))
    assert lines["threads"].startswith(f"{torch.get_num_threads()}: ")
    assert torch.backends.cpu.get_cpu_capability() in lines["kernels"]
    assert "ATEN_CPU_CAPABILITY=default" in lines["kernels"]
    if torch.backends.mkl.is_available():
        assert "MKL_CBWR=COMPATIBLE" in lines["libraries"]
    assert lines["file locks"] == f"available in {tmp_path}"
    assert "run" not in lines

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", no_locks)
    assert "would not notice" in dict(reproducibility(None))["file locks"]


@pytest.mark.parametrize(
    ("recorded", "said"),
    [
        (None, "recorded neither versions nor threads"),
        ({"torch": "1.0", "threads": 77}, "torch 1.0, here"),
        ({"torch": str(torch.__version__)}, "the same as here"),
    ],
)
def test_a_run_is_compared_with_this_machine(
    tmp_path: Path, recorded: dict[str, Any] | None, said: str
) -> None:
    run = make_run(tmp_path / "run", TrainConfig("sinusoid"))
    state = {} if recorded is None else {"environment": recorded}
    CheckpointStore(run / "checkpoints").save(1, {"model": {"w": torch.ones(1)}}, state)
    assert said in dict(reproducibility(run))["run"]
