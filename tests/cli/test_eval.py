"""`metanudge eval` as a user meets it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from metanudge.cli import main
from metanudge.training.config import TrainConfig
from trained_runs import make_run, vector_run, vector_table


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    vector_run(folder / "vectors", vector_table(folder / "data.csv", classes=20))
    norm = TrainConfig(
        "mnist1d",
        data_options="num_samples=1000",
        model="conv1d:channels=4",
        solver="gradient_descent:lr=0.1,steps=2",
        queries=5,
    )
    make_run(folder / "norm", norm)
    make_run(
        folder / "sine",
        TrainConfig("sinusoid", model="mlp:hidden=(8,)", solver="gradient_descent:lr=0.01,steps=2"),
    )
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METANUDGE_CACHE", str(tmp_path / "cache"))


def test_the_table(runs: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = shutil.copytree(runs / "vectors", tmp_path / "run")
    assert (
        main(
            [
                "eval",
                str(run),
                "--tasks",
                "12",
                "--steps",
                "0",
                "3",
                "--json",
                str(tmp_path / "r.json"),
            ]
        )
        == 0
    )
    text = capsys.readouterr().out
    assert re.search(
        r"accuracy \d+\.\d\d% ± \d+\.\d\d%, worst decile \d+\.\d\d%  \(12 test tasks, 20 steps, 95"
        r" % confidence\)",
        text,
    )
    assert "accuracy by class" in text
    assert "BatchNorm" not in text
    assert (run / "eval-test.png").is_file()
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["tasks"] == 12
    assert [row["steps"] for row in result["rows"]] == [0, 3, 20]
    assert len(result["task_accuracies"]) == 12


def test_batch_norm_side_by_side(
    runs: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert (
        main(["eval", str(runs / "norm"), "--tasks", "4", "--plot", str(tmp_path / "plot.svg")])
        == 0
    )
    text = capsys.readouterr().out
    assert "BatchNorm transductive" in text
    assert "BatchNorm inductive" in text
    assert [
        line.split()[0] for line in text.splitlines() if line.count("│") == 1 and "±" in line
    ] == ["0", "1", "2"]
    assert (tmp_path / "plot.svg").read_text().startswith("<?xml")


def test_regression(runs: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert (
        main(
            [
                "eval",
                str(runs / "sine"),
                "--tasks",
                "4",
                "--split",
                "val",
                "--plot",
                str(tmp_path / "plot.png"),
            ]
        )
        == 0
    )
    text = capsys.readouterr().out
    assert re.search(r"query loss \S+ ± \S+, R² \S+, RMSE \S+  \(4 val tasks, 2 steps", text)
    assert "accuracy" not in text


def test_the_same_twice(runs: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        flags = [
            "--tasks",
            "5",
            "--json",
            str(tmp_path / name),
            "--plot",
            str(tmp_path / "plot.png"),
        ]
        assert main(["eval", str(runs / "vectors"), *flags]) == 0
    a, b = (json.loads((tmp_path / name).read_text()) for name in ("a", "b"))
    assert {**a, "seconds": 0} == {**b, "seconds": 0}


def test_help_is_instant_because_it_does_not_load_torch() -> None:
    script = """
import sys
from metanudge.cli import main
for command in ("eval", "adapt", "data", "doctor"):
    try:
        main([command, "--help"])
    except SystemExit as done:
        assert done.code == 0
sys.exit("torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    for example in (
        "metanudge eval runs/first",
        "metanudge adapt runs/omniglot --support few/",
        "metanudge data verify",
    ):
        assert example in done.stdout


def test_other_tasks_and_other_data(
    runs: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    vector_run(tmp_path / "any", runs / "data.csv", head="prototypes")
    others = vector_table(tmp_path / "others.csv", classes=9, first=40)
    flags = ["--ways", "4-7", "--shots", "2", "--data", str(others), "--tasks", "20"]
    assert main(["eval", str(tmp_path / "any"), *flags, "--json", str(tmp_path / "r.json")]) == 0
    text = capsys.readouterr().out
    assert f"on {others}: 4-7-way 2-shot, 5 queries" in text
    assert "(9 classes)" in text
    assert "nearest centroid" in text
    assert (tmp_path / "any" / "eval-test-others-4-7ways-2shots.png").is_file()
    assert not (tmp_path / "any" / "eval-test.png").exists()
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["data"] == str(others)
    assert result["tasks_of"] == "4-7-way 2-shot, 5 queries"
