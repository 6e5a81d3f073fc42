"""`metanudge reproduce`: from a name to rows, figures, a table and the page."""

from __future__ import annotations

from pathlib import Path

import pytest

import toy_experiment
from metanudge.cli import main
from metanudge_lab import experiments
from metanudge_lab.experiments import run as running
from metanudge_lab.report import entries as gathering

TOYS = {
    "toy": toy_experiment.toy(),
    "other-toy": toy_experiment.toy(name="other-toy"),
}


@pytest.fixture(autouse=True)
def only_toys(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (experiments, running, gathering):
        monkeypatch.setattr(module, "available", lambda: tuple(TOYS), raising=False)
    for module in (experiments, gathering):
        monkeypatch.setattr(module, "load", TOYS.__getitem__)


def reproduce(*arguments: str) -> int:
    return main(["reproduce", *arguments])


def test_one_experiment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce("toy", "--quick", "--device", "cpu", "--out", str(tmp_path)) == 0
    text = capsys.readouterr().out
    assert "toy: 4 cells" in text
    assert "the paper" in text
    assert "reproduced (quick)" in text
    assert f"page: {tmp_path / 'report.html'}" in text
    for name in (
        "quick/toy.json",
        "figures/toy.png",
        "figures/toy.svg",
        "report.html",
        "RESULTS.md",
    ):
        assert (tmp_path / name).is_file()
    assert "other-toy" not in text


def test_all_of_them(tmp_path: Path) -> None:
    assert reproduce("all", "--quick", "--out", str(tmp_path)) == 0
    assert (tmp_path / "quick" / "other-toy.json").is_file()


def test_an_unknown_name_suggests_the_nearest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reproduce("other_toi", "--out", str(tmp_path)) == 2
    assert (
        "There is no experiment 'other_toi'. Did you mean 'other-toy'?" in capsys.readouterr().err
    )
    assert not list(tmp_path.iterdir())


def test_without_a_name_the_experiments_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce() == 2
    text = capsys.readouterr().out
    assert "other-toy" in text
    assert "Table 0" in text


def test_one_damaged_file_does_not_keep_the_others_from_being_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "quick").mkdir()
    (tmp_path / "quick" / "toy.json").write_text("{", encoding="utf-8")
    assert reproduce("all", "--quick", "--out", str(tmp_path)) == 2
    assert "toy.json cannot be read as JSON" in capsys.readouterr().err
    assert (tmp_path / "quick" / "other-toy.json").is_file()


def test_a_device_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce("toy", "--device", "cuda:99", "--out", str(tmp_path)) == 2
    assert "--device cuda:99: torch finds" in capsys.readouterr().err


def test_no_time_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reproduce("toy", "--quick", "--limit-seconds", "-1", "--out", str(tmp_path)) == 0
    text = capsys.readouterr().out
    assert "4 cells are left" in text
    assert "not run yet" in text
