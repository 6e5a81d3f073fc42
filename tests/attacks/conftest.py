"""A current folder of its own for every attack, and one genuine run for all of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from attacked_runs import copied, genuine_run


@pytest.fixture(scope="session")
def genuine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return genuine_run(tmp_path_factory.mktemp("genuine"))


@pytest.fixture
def few(genuine: Path) -> Path:
    """A few examples to adapt to."""
    return genuine.parent / "few.csv"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder; what is imported from it is forgotten afterwards."""
    monkeypatch.setenv("METANUDGE_CACHE", str(tmp_path / "cache"))
    # which takes its time to look
    monkeypatch.setattr("metanudge.cli.program._busy_share", lambda: 0.0)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setitem(sys.modules, "my_nets", None)  # forgotten afterwards,
    monkeypatch.delitem(sys.modules, "my_nets")  # and not there now
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def run(genuine: Path, here: Path) -> Path:
    """A copy of the run, to spoil."""
    return copied(genuine, here / "run")
