"""Training with MAML by differences: ε is chosen as ν is, saved, and chosen again the same way
after a stop.
"""

from __future__ import annotations

import dataclasses
import signal
from functools import partial
from pathlib import Path

import pytest

from metanudge.cli import main
from metanudge.training import runs
from metanudge.training.checkpoint import CheckpointStore
from metanudge.training.errors import StopTraining
from metanudge.training.metrics import read_metrics
from metanudge.training.progress import Quiet, describe
from metanudge.training.trainer import train
from metanudge.tuning import NuTuner
from training.test_resume import InterruptAt
from training.test_trainer import TINY, fingerprint, go

SMOOTH = {"model": "mlp:hidden=(6,),activation=tanh"}
AUTO = {"estimator": "maml:products=difference", **SMOOTH}
BY_ITSELF = {"estimator": "maml", "loss": "once:squared_error", **SMOOTH}
ON_WAYS = pytest.mark.parametrize("way", [AUTO, BY_ITSELF], ids=["asked for", "nothing else works"])


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks every second meta-step."""
    monkeypatch.setattr(
        "metanudge.learner.NuTuner", partial(NuTuner, every=2, share=100.0, most_tasks=2)
    )


@ON_WAYS
def test_epsilon_is_chosen_and_its_error_shown(
    tmp_path: Path, often: None, way: dict[str, str]
) -> None:
    go(tmp_path / "run", **way)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert all(0 < row["error"] < 0.1 for row in rows)
    assert f"error {rows[0]['error']:.1g}" in describe(rows[0])
    state = CheckpointStore(tmp_path / "run" / "checkpoints").load("last").state
    assert 3e-5 <= state["tuner"]["nu"] <= 3e-2


@ON_WAYS
def test_a_stopped_run_goes_on_exactly(tmp_path: Path, often: None, way: dict[str, str]) -> None:
    go(tmp_path / "whole", **way)
    run = tmp_path / "run"
    with pytest.raises(StopTraining):
        train(
            dataclasses.replace(TINY, out=str(run), **way),
            reporter=InterruptAt(4, signal.SIGTERM),
        )
    assert train(runs.read_config(run, trust=True), resume=run, reporter=Quiet()) == 0
    assert fingerprint(run) == fingerprint(tmp_path / "whole")


@pytest.mark.parametrize("estimator", ["maml", "fomaml", "reptile", "maml:products=autograd"])
def test_no_proximal_term(tmp_path: Path, estimator: str) -> None:
    go(tmp_path / "run", lam=0.0, estimator=estimator, iterations=2)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert all(row["gradient_norm"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("estimator", "options", "how"),
    [
        ("maml", {"engine": "stacked"}, "through all steps at once"),
        ("maml", {"engine": "inplace"}, "step by step"),
        ("maml:products=difference,epsilon=0.001", {}, "by differences of gradients"),
    ],
)
def test_the_header_says_how_steps_are_differentiated(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    estimator: str,
    options: dict[str, str],
    how: str,
) -> None:
    flags = [word for name, value in options.items() for word in (f"--{name}", value)]
    some = "mnist1d --data-options num_samples=400 --ways 2 --shots 1 --queries 2 --tasks 2"
    short = "--iterations 1 --eval-every 0 --test-tasks 0 --lam 1"
    out = ["--out", str(tmp_path / "run"), "--estimator", estimator]
    assert main(["train", *some.split(), *short.split(), *out, *flags]) == 0
    assert f"differentiated {how}" in capsys.readouterr().out


def test_adam_inside(tmp_path: Path) -> None:
    inside = "torch_optimizer:optimizer=adam,steps=3,lr=0.01"
    go(tmp_path / "run", estimator="maml:products=difference,epsilon=0.001", solver=inside)
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == TINY.iterations


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--estimator", "maml:products=diff"], ["products=diff", "Did you mean 'difference'"]),
        (["--estimator", "maml:trajectory=disk"], ["trajectory=disk", "recompute"]),
        (["--estimator", "maml:products=difference,epsilon=-1"], ["epsilon", "-1"]),
        (["--estimator", "maml", "--solver", "lbfgs"], ["LBFGS", "FOBMAML, IMAML"]),
        (["--estimator", "maml", "--solver", "newton_cg"], ["NewtonCG", "FOBMAML, IMAML"]),
        (["--estimator", "maml", "--solver", "gradient_descent:lr=0.1,steps=0"], ["steps", "0"]),
        (["--lam", "0"], ["lam must be positive", "MAML, FOMAML and Reptile"]),
        (["--lam", "0", "--learn-lam", "tensor", "--estimator", "maml"], ["lam must be positive"]),
    ],
)
def test_bad_input_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], parts: list[str]
) -> None:
    out = tmp_path / "run"
    assert main(["train", "sinusoid", "--iterations", "2", *flags, "--out", str(out)]) == 2
    said = capsys.readouterr().err
    for part in parts:
        assert part in said
    assert not out.exists()
