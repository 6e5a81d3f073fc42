"""Measuring goes on where it stopped, never loses what is done, and says plainly what is wrong with
a file or an option.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from metanudge.training.errors import UserError
from metanudge_lab.experiments import store
from metanudge_lab.experiments.__main__ import main
from metanudge_lab.experiments.base import FinishedCell, Result, json_safe
from metanudge_lab.experiments.run import Options, check_names, run, take
from metanudge_lab.provenance import COMMIT_VARIABLE, commit_of
from toy_experiment import Config, toy


@pytest.fixture
def options(tmp_path: Path) -> Options:
    return Options(mode="quick", folder=tmp_path, device="cpu")


def file_of(options: Options) -> Path:
    return store.result_file(options.folder, "toy", options.mode)


def test_all_cells_are_measured_and_come_back_as_they_were(options: Options) -> None:
    result = run(toy(), options)
    assert result.complete
    read = store.read(toy(), file_of(options))
    assert read == result
    assert read.config == Config.quick()
    assert read.values("y", factor=2.0, seed=1)[:2] == [2.0, 4.0]
    assert read.rows(x=3)[0]["y"] is None, "infinity is null in the file"


def test_quick_and_full_lie_apart(tmp_path: Path) -> None:
    run(toy(), Options(mode="full", folder=tmp_path, device="cpu"))
    run(toy(), Options(mode="quick", folder=tmp_path, device="cpu"))
    assert (tmp_path / "toy.json").is_file()
    assert (tmp_path / "quick" / "toy.json").is_file()
    assert [result.mode for result in store.find(toy(), tmp_path)] == ["full", "quick"]


def test_cells_measured_in_pieces_are_joined(tmp_path: Path) -> None:
    how = {"mode": "full", "device": "cpu"}
    for seed in (0, 1):
        run(toy(), Options(folder=tmp_path / str(seed), pattern=f"seed={seed}", **how))
    options = Options(folder=tmp_path, **how)
    joined = take(toy(), options, [tmp_path / "0", tmp_path / "1"])
    assert store.read(toy(), file_of(options)) == joined
    assert [cell["seed"] for cell in joined.missing] == [2, 2]
    assert len(joined.machines) == len({json.dumps(machine) for machine in joined.machines})
    assert take(toy(), options, [tmp_path / "1"]) == joined, "what is there stays"
    assert run(toy(), options).complete, "and the rest can be measured"
    with pytest.raises(UserError, match=r"There is no .*none"):
        take(toy(), options, [tmp_path / "none"])
    run(toy(), replaced := Options(folder=tmp_path / "other", **how), config=Config(seeds=1))
    with pytest.raises(UserError, match=r"other.*another configuration \(seeds: 1 → 3\)"):
        take(toy(), options, [replaced.folder])


@pytest.mark.parametrize(
    ("seeds", "order"), [("0", ["quick", "full"]), ("[01]", ["full", "quick"])]
)
def test_a_full_result_is_shown_first_once_half_of_it_is_there(
    tmp_path: Path, seeds: str, order: list[str]
) -> None:
    run(toy(), Options(mode="full", folder=tmp_path, device="cpu", pattern=f"*seed={seeds}"))
    run(toy(), Options(mode="quick", folder=tmp_path, device="cpu"))
    found = store.find(toy(), tmp_path)
    assert [result.mode for result in found] == order
    assert {result.mode: result.complete for result in found} == {"quick": True, "full": False}


def test_an_interrupted_measurement_is_resumed(options: Options) -> None:
    seen = []

    def interrupt(cell: dict) -> None:
        seen.append(dict(cell))
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(toy(interrupt), options)
    assert len(store.read(toy(), file_of(options)).measured) == 2
    seen.clear()
    result = run(toy(lambda cell: seen.append(dict(cell))), options)
    assert result.complete
    assert seen == [{"factor": 1.0, "seed": 1}, {"factor": 2.0, "seed": 1}], "only what was missing"
    seen.clear()
    assert run(toy(lambda cell: seen.append(cell)), options) == result
    assert not seen


def test_what_is_saved_survives_a_failing_disk(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(toy(), dataclasses.replace(options, pattern="seed=0"))
    before = file_of(options).read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        run(toy(), options)
    assert file_of(options).read_bytes() == before
    assert [path.name for path in file_of(options).parent.iterdir()] == ["toy.json"], (
        "no rubbish is left"
    )


def test_it_stops_in_time_and_says_what_is_left(
    options: Options, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = toy(lambda cell: time.sleep(0.15))
    result = run(slow, dataclasses.replace(options, limit_seconds=0.32))
    assert 1 <= len(result.measured) <= 2, "another cell would have ended too late"
    text = capsys.readouterr().out
    assert f"{len(result.missing)} cells are left" in text
    assert "goes on from here" in text
    assert run(slow, options).complete


def test_another_configuration_is_refused_or_starts_anew(options: Options) -> None:
    run(toy(), options)
    other = Config(seeds=1)
    with pytest.raises(
        UserError,
        match=r"toy\.json was measured under another configuration \(seeds: 2 → 1\).*--restart",
    ):
        run(toy(), options, config=other)
    result = run(toy(), dataclasses.replace(options, restart=True), config=other)
    assert result.complete
    assert len(store.read(toy(), file_of(options)).measured) == 2


def test_only_matching_cells(options: Options) -> None:
    result = run(toy(), dataclasses.replace(options, pattern="factor=2*"))
    assert [measured.cell["factor"] for measured in result.measured] == [2.0, 2.0]
    assert not result.complete
    with pytest.raises(
        UserError,
        match=r"'seed=9' matches none of the 2 cells that are left, such as factor=1\.0 seed=0",
    ):
        run(toy(), dataclasses.replace(options, pattern="seed=9"))


DAMAGE = {
    "cut off": (lambda text: text[: len(text) // 2], "cannot be read as JSON"),
    "not an object": (lambda text: "[]", "not the result of an experiment"),
    "no cells": (
        lambda text: text.replace('"cells"', '"cell"'),
        "cells missing or of the wrong kind",
    ),
    "renamed": (lambda text: text.replace('"toy"', '"joy"'), "holds 'joy', not 'toy'"),
    "older format": (lambda text: text.replace('"format": 1', '"format": 0'), "format 0"),
    "a damaged cell": (lambda text: text.replace('"rows"', '"lines"', 1), "cell 0 is damaged"),
    "other options": (
        lambda text: text.replace('"factors"', '"powers"', 1),
        "other options than toy has now",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_named(options: Options, kind: str) -> None:
    run(toy(), options)
    change, message = DAMAGE[kind]
    file_of(options).write_text(
        change(file_of(options).read_text(encoding="utf-8")), encoding="utf-8"
    )
    with pytest.raises(UserError, match=message) as raised:
        store.read(toy(), file_of(options))
    assert str(file_of(options)) in str(raised.value)
    assert "--restart" in str(raised.value)
    assert run(toy(), dataclasses.replace(options, restart=True)).complete


def test_provenance_of_every_cell(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMMIT_VARIABLE, "abc123+dirty")
    run(toy(), dataclasses.replace(options, pattern="seed=0"))
    monkeypatch.setenv(COMMIT_VARIABLE, "def456")
    result = run(toy(), options)
    assert [(machine["commit"], machine["dirty"]) for machine in result.machines] == [
        ("abc123", True),
        ("def456", False),
    ]
    assert [measured.machine for measured in result.measured] == [0, 0, 1, 1]
    assert all(measured.seconds >= 0 for measured in result.measured)
    for key in ("metanudge", "torch", "numpy", "python", "device", "cpu", "threads", "date"):
        assert result.machines[0][key]


def test_the_commit_of_no_repository_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(COMMIT_VARIABLE, raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit_of(tmp_path) == (None, None)


def test_changes_in_any_package_count_and_notes_beside_them_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(COMMIT_VARIABLE, raising=False)
    packages = [tmp_path / "lab", tmp_path / "core"]
    for package in packages:
        package.mkdir()
        (package / "code.py").touch()
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "-A"], [*author, "commit", "-qm", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    (tmp_path / "notes").touch()
    commit, dirty = commit_of(*packages)
    assert commit
    assert dirty is False
    (packages[1] / "code.py").write_text("changed")
    assert commit_of(*packages) == (commit, True)
    elsewhere = tmp_path.parent
    assert commit_of(packages[0], elsewhere) == (
        commit,
        None,
    ), "what is not in this repository is not known"


def test_the_file_is_json_with_a_row_a_line(options: Options) -> None:
    run(toy(), options)
    text = file_of(options).read_text(encoding="utf-8")
    json.loads(text)
    assert '      {"x": 1, "y": 2.0},\n' in text


def test_rows_are_found_by_what_they_hold() -> None:
    rows = [{"k": k, "e": e} for k in (1, 2) for e in (None, 0.5, [1, 2])] + [{"k": 3}]
    result = Result(
        "x", "quick", None, [FinishedCell({"seed": seed, "k": 0}, rows, 0.1, 0) for seed in (0, 1)]
    )
    every = result.rows()
    assert [row["seed"] for row in every] == [0] * 7 + [1] * 7
    for where in (
        {"k": 1},
        {"seed": 1, "e": 0.5},
        {"e": None},
        {"k": 0},
        {"k": 2, "other": None},
        {"k": 2.0, "seed": False},
        {"z": 1},
    ):
        assert result.rows(**where) == [
            row for row in every if all(row.get(key) == value for key, value in where.items())
        ]


def test_rows_hold_json_only() -> None:
    with pytest.raises(TypeError, match=r"is a complex; rows hold .* Use \.item\(\)"):
        json_safe([{"a": 1j}])


def test_names() -> None:
    assert check_names(["outer-loss", "outer-loss"]) == ("outer-loss",)
    assert len(check_names(["all"])) >= 2
    with pytest.raises(
        UserError,
        match=r"There is no experiment 'gradient_qualty'\. Did you mean 'gradient-quality'\?",
    ):
        check_names(["gradient_qualty"])


def test_the_bare_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nonsense-quality", "--out", str(tmp_path)]) == 2
    assert "Did you mean 'gradient-quality'" in capsys.readouterr().err
    assert (
        main(
            [
                "gradient-quality",
                "--quick",
                "--out",
                str(tmp_path),
                "--device",
                "cpu",
                "--limit-seconds",
                "-1",
            ]
        )
        == 0
    )
    assert "48 cells missing" in capsys.readouterr().out
