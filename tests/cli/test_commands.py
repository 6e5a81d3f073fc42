"""Which commands there are: ours, and those of other distributions that are installed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from metanudge.cli import main
from metanudge.cli.commands import OWN
from metanudge.cli.program import available

Install = Callable[[str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Nothing is installed but what is asked for: distributions with commands, by the text of their
    module.
    """
    places: list[str] = []
    monkeypatch.setattr(sys, "path", places)

    def one(text: str) -> None:
        name = f"added_{len(places)}_{tmp_path.name}"
        folder = tmp_path / name
        record = folder / f"{name}-1.0.dist-info"
        record.mkdir(parents=True)
        (folder / f"{name}.py").write_text(text)
        (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (record / "entry_points.txt").write_text(f"[metanudge.commands]\nany = {name}:COMMANDS\n")
        places.append(str(folder))

    return one


def test_without_others_there_are_our_own(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    assert available() == OWN
    assert main(["bench"]) == 2
    assert "there is no command 'bench'" in (said := capsys.readouterr().err)
    assert "pip install metanudge-lab" in said
    assert main(["trian"]) == 2
    assert "Did you mean 'train'?" in (said := capsys.readouterr().err)
    assert "metanudge-lab" not in said


GREET = """
from metanudge.cli.commands import Command
COMMANDS = {"greet": Command("says hello", __name__), "train": Command("not ours", __name__)}
def run(argv):
    print("hello", *argv)
    return 7
"""


def test_a_distribution_adds_commands_and_takes_none(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install(GREET)
    assert main(["--help"]) == 0
    assert "greet     says hello" in (said := capsys.readouterr().out)
    assert "not ours" not in said
    assert main(["greet", "you"]) == 7
    assert capsys.readouterr().out == "hello you\n"
    assert main(["gret"]) == 2
    assert "Did you mean 'greet'?" in capsys.readouterr().err


def test_a_broken_distribution_is_named_and_harms_nothing(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("import nothing_of_this_name")
    install(GREET)
    assert main(["greet"]) == 7
    assert "nothing_of_this_name" in (said := capsys.readouterr().err)
    assert "Install it anew" in said
