"""`metanudge adapt` as a user meets it: pictures in, a table of labels out."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest
import torch

from metanudge.cli import main
from trained_runs import character_folders, omniglot_folder, omniglot_run, vector_run, vector_table


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vectors")
    vector_run(folder / "run", vector_table(folder / "data.csv"))
    vector_table(folder / "few.csv", classes=3, each=4, first=40, seed=1)
    vector_table(folder / "rows.csv", classes=3, each=10, first=40, seed=2)
    return folder


def adapt(folder: Path, *flags: object) -> int:
    return main(
        ["adapt", str(folder / "run"), "--support", str(folder / "few.csv"), *map(str, flags)]
    )


def test_labels_and_what_is_said(
    vectors: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "labels.csv"
    assert adapt(vectors, "--predict", vectors / "rows.csv", "--out", out) == 0
    text = capsys.readouterr().out
    assert "adapted to 3 classes with 4 examples each" in text
    assert "30 of the 30 whose class is known are right (100.0%)" in text
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["file", "label", "probability", "c40", "c41", "c42"]
    assert [row["file"] for row in rows] == [f"rows.csv:{n}" for n in range(1, 31)]
    assert [p.name for p in tmp_path.iterdir()] == ["labels.csv"]
    assert os.stat(out).st_mode & 0o044 == 0o044 & ~os.umask(os.umask(0o022))


def test_overwrite(vectors: Path, tmp_path: Path) -> None:
    out = tmp_path / "labels.csv"
    out.write_text("precious")
    flags = ["--predict", vectors / "rows.csv", "--out", out]
    assert adapt(vectors, *flags) == 2
    assert out.read_text() == "precious"
    assert adapt(vectors, *flags, "--overwrite") == 0
    assert out.read_text().startswith("file,label,probability")


def test_a_failure_on_the_way_leaves_the_old_file(vectors: Path, tmp_path: Path) -> None:
    (tmp_path / "out.csv").write_text("precious")
    (tmp_path / "rows.csv").write_text("x0,x1\n1,2\n")
    assert (
        adapt(
            vectors,
            "--predict",
            tmp_path / "rows.csv",
            "--out",
            tmp_path / "out.csv",
            "--overwrite",
        )
        == 2
    )
    assert (tmp_path / "out.csv").read_text() == "precious"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.csv", "rows.csv"]


def test_export(vectors: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert adapt(vectors, "--export", tmp_path / "model") == 0
    assert "program.pt2" in capsys.readouterr().out
    program = torch.export.load(tmp_path / "model" / "program.pt2").module()
    assert program(torch.zeros(7, 6)).shape == (7, 3)


def test_pictures_of_unseen_characters(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    omniglot_folder()
    run = omniglot_run(tmp_path_factory.getbasetemp() / "omniglot-run")
    support, predict = character_folders(tmp_path, ways=5, shots=5, queries=15, seed=0)
    flags = [
        "--support",
        str(support),
        "--predict",
        str(predict),
        "--out",
        str(tmp_path / "labels.csv"),
        "--steps",
        "20",
    ]
    assert main(["adapt", str(run), *flags]) == 0
    assert "of the 75 whose class is known are right" in capsys.readouterr().out
    with (tmp_path / "labels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    right = sum(row["file"].split("/")[0] == row["label"] for row in rows)
    assert len(rows) == 75
    assert right / len(rows) >= 0.9
