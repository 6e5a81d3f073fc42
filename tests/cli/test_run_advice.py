"""What `metanudge train` says about settings that cannot work, or will take long: with the numbers,
before it is too late.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from metanudge.cli import main
from metanudge.solvers import GradientDescent, Nesterov
from metanudge.training import preparation, runs, trainer
from metanudge.training.config import TrainConfig
from metanudge.training.device import computing_in
from metanudge.training.errors import UserError
from metanudge.training.preparation import check_steps
from metanudge.training.progress import DivergenceWatch, DurationWatch
from training.test_trainer import TINY, Listener, go


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, in which nothing may be left."""
    monkeypatch.setenv("METANUDGE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def refused(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    assert main(["train", *flags]) == 2
    assert list(Path().iterdir()) == []
    return capsys.readouterr().err


# --- Inner steps
# --------------------------------------------------------------------------------------------------


def test_a_stiffness_that_no_step_can_follow_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "sinusoid", "--lam", "30", "--solver", "gradient_descent:lr=0.1,steps=5")
    for part in ("--lam 30", "lr=0.1", "lr·λ is 3", "below 2/λ = 0.0667", "--lam below 2/lr = 20"):
        assert part in said


def test_only_what_diverges_by_itself_is_refused() -> None:
    check_steps(19.9, GradientDescent(lr=0.1, steps=5))
    check_steps(30.0, Nesterov(lr=0.1, steps=5))  # its bound is another
    with pytest.raises(UserError):
        check_steps(20.0, GradientDescent(lr=0.1, steps=5))


@pytest.mark.parametrize(
    ("pull", "advice"),
    [
        (1.9, "smaller lr in --solver or a smaller --lam: lr·λ = 1.9"),
        (0.1, "smaller lr"),
        (None, "smaller lr"),
    ],
)
def test_no_advice_makes_it_worse(pull: float | None, advice: str) -> None:
    """Steps are stable below 2/(curvature + λ), so a larger λ is never the remedy for
    overshooting.
    """
    watch = DivergenceWatch(pull, 1.0)
    notes = [
        note for note in [*(watch.see(1.0, 2.0) for _ in range(30)), watch.see_error(2.0)] if note
    ]
    assert len(notes) == 2
    for note in notes:
        assert advice in note
        assert "larger" not in note.split("Use a")[1]


# --- Memory
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (
            ["--tasks", "1000000000"],
            ["--tasks 1000000000", "for the examples of 1,000,000,000 tasks"],
        ),
        (
            ["--eval-tasks", "1000000000000"],
            ["--eval-tasks 1000000000000", "for the results of 1,000,000,000,000 evaluated tasks"],
        ),
        (["--test-tasks", str(2**62)], ["for the results of 4,611,686,018,427,"]),
        (["--shots", "100000000000"], ["for the examples of 16 tasks", "fewer --shots"]),
        (["--iterations", "9" * 30], ["--iterations 9999", "2**63"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_cannot_fit_is_refused_with_the_numbers(
    capsys: pytest.CaptureFixture[str], flags: list[str], parts: list[str]
) -> None:
    said = refused(capsys, "sinusoid", *flags)
    for part in parts:
        assert part in said


def test_a_million_tasks_are_refused_before_they_are_drawn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 · 10⁶ solves of 1,761 float32 parameters, three copies each, are 39.3 GiB; their examples
    another 0.3.
    """
    monkeypatch.setattr(preparation, "available_memory", lambda: 8 * 2**30)
    said = refused(capsys, "sinusoid", "--tasks", "1000000", "--estimator", "fobmaml:nu=0.1")
    for part in (
        "needs at least 39.",
        "39.3 GiB for 2,000,000 solves side by side",
        "8.0 GiB are free",
        "--chunk",
    ):
        assert part in said


def test_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk, the in-place engine and second derivatives hold fewer solves; the refusal is exactly
    at the limit.
    """
    config = TrainConfig("sinusoid", tasks=1000, estimator="fobmaml:nu=0.1", device="cpu")
    source = runs.build_source(config)

    def needed(**changes: Any) -> int:
        changed = TrainConfig(**(config.to_dict() | changes))
        learner, low, high = runs.build_learner(changed, source), 0, 1 << 40
        while low + 1 < high:
            free = (low + high) // 2
            monkeypatch.setattr(preparation, "available_memory", lambda free=free: free)
            try:
                preparation.check_solves_fit(changed, source, 1000, learner)
                high = free
            except UserError:
                low = free
        return high

    examples = 1000 * 20 * (4 + 8) + 1000 * 32
    solve = 3 * 4 * sum(p.numel() for p in runs.build_learner(config, source).parameters())
    assert needed() == examples + 2000 * solve
    assert needed(chunk=10) == examples + 10 * solve
    for one in (
        {"engine": "inplace"},
        {"estimator": "maml"},
        {"estimator": "fobmaml:stencil=tangent"},
    ):
        assert needed(**one) == examples + solve


def test_a_system_that_does_not_tell_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "available_memory", lambda: None)
    config = TrainConfig("sinusoid", tasks=10**9)
    preparation.check_data_fits(config, runs.build_source(config), 10**9)


def test_a_control_group_limits_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/sys/fs/cgroup/memory.max": ["1000000"],
        "/sys/fs/cgroup/memory.current": ["900000"],
        "/sys/fs/cgroup/memory.stat": ["inactive_file 500"],
    }
    monkeypatch.setattr(preparation, "_lines", lambda name: files.get(name, []))
    assert preparation.available_memory() == 100_500


def test_a_model_that_cannot_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "sinusoid", "--model", "mlp:hidden=(100000000,100000000)"]) == 5  # 40 PB
    said = capsys.readouterr().err
    assert "Out of memory" in said
    assert "smaller model" in said
    assert list(Path().iterdir()) == []


# --- Precision and time
# ----------------------------------------------------------------------------------------------


def test_tf32_on_a_cpu_is_said_to_change_nothing(tmp_path: Path) -> None:
    said = go(tmp_path / "tf32", precision="tf32")
    assert [
        note
        for note in said.notes
        if "--precision tf32" in note and "changes nothing on a CPU" in note
    ]
    assert "tf32" not in said.facts["device"]
    go(tmp_path / "fp32")
    assert (tmp_path / "tf32" / "metrics.jsonl").read_bytes() == (
        tmp_path / "fp32" / "metrics.jsonl"
    ).read_bytes()
    with computing_in("tf32", torch.device("cpu")):
        assert torch.get_float32_matmul_precision() == "highest"


def test_a_run_of_hours_on_a_cpu_says_so_after_three_meta_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(DurationWatch):
        def see(self, seconds: float) -> str | None:
            return super().see(1000.0)

    monkeypatch.setattr(trainer, "DurationWatch", Slow)
    said = go(tmp_path / "run")
    (note,) = [note for note in said.notes if "on this CPU" in note]
    # 5 meta-steps of 1000 s; 6 test tasks and one validation of 4, each a sixth of a meta-step of 3
    # tasks with 2 solves
    assert "about 1:51:07" in note
    for flag in (
        "--iterations",
        "--tasks",
        "--eval-tasks",
        "--model",
        "image_size",
        "--device cuda",
    ):
        assert flag in note


def test_a_short_run_says_nothing_about_its_length() -> None:
    watch = DurationWatch(TINY, width=2, done=0)
    assert [watch.see(100.0) for _ in range(8)] == [None] * 8
    assert Listener().notes == []
