"""One file and one line add an experiment: the commands, their errors and the page know it. An
estimator that was added to the library takes part in the bench.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from metanudge.cli import main
from metanudge.estimators import ESTIMATORS, FOMAML, Estimator
from metanudge_lab import experiments

FILE = """
from toy_experiment import toy
EXPERIMENT = toy(name="added-here", title="Added for a test")
"""


def test_an_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "added_here.py").write_text(FILE, encoding="utf-8")
    monkeypatch.setattr(experiments, "__path__", [*experiments.__path__, str(tmp_path)])
    monkeypatch.setattr(experiments, "NAMES", (*experiments.NAMES, "added-here"))
    assert main(["reproduce"]) == 2
    assert "Added for a test" in capsys.readouterr().out
    assert main(["reproduce", "added-her"]) == 2
    assert "Did you mean 'added-here'?" in capsys.readouterr().err
    assert (
        main(
            [
                "reproduce",
                "added-here",
                "--quick",
                "--device",
                "cpu",
                "--out",
                str(tmp_path / "results"),
            ]
        )
        == 0
    )
    assert "y = 4 at x = 2" in capsys.readouterr().out
    assert "Added for a test" in (tmp_path / "results" / "report.html").read_text(encoding="utf-8")


@dataclass(frozen=True)
class Borrowed(Estimator):
    """Another estimator's gradient."""

    def accumulate(self, inner, solver, total) -> None:  # type: ignore[no-untyped-def]
        FOMAML().accumulate(inner, solver, total)


def test_an_estimator_in_the_bench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    bench = ["bench", "--case", "sinusoid", "--quick", "--device", "cpu", "--out", "bench"]
    ESTIMATORS.append(Borrowed)
    try:
        assert main([*bench, "--only", "borowed"]) == 2
        assert "Did you mean 'borrowed'?" in capsys.readouterr().err
        assert main([*bench, "--only", "borrowed", "--repeats", "1", "--no-first-step"]) == 0
    finally:
        ESTIMATORS.remove(Borrowed)
    assert "Borrowed" in capsys.readouterr().out
