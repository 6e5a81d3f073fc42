"""Data of one's own on the command line: what is decided about them is said, kept in the run, and
done again by `eval` and `adapt`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from metanudge.cli import main
from metanudge.tasks.read_csv import read_csv
from metanudge.training import runs
from metanudge.training.use import adapt
from trained_runs import write_images

TINY = [
    "--ways=2", "--shots=1", "--queries=2", "--solver=gradient_descent:lr=0.1,steps=1",
    "--tasks=2", "--iterations=4", "--eval-every=2",
    "--eval-tasks=2", "--test-tasks=2", "--metrics-every=1",
]  # fmt: skip
MLP = "--model=mlp:hidden=(4,)"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def large_numbers(
    path: Path, *, delimiter: str = ";", classes: int = 12, first: int = 0, columns: str = "abc"
) -> Path:
    """A table of numbers around 1e4, each class somewhere else."""
    rng = np.random.default_rng(first)
    lines = [delimiter.join([*columns, "label"])]
    for c in range(first, first + classes):
        for row in 1e4 + 3e3 * rng.normal(size=3) + 100 * rng.normal(size=(5, 3)):
            numbers = dict(zip("abc", row.tolist(), strict=True))
            lines.append(delimiter.join([*(repr(numbers[name]) for name in columns), f"c{c:02d}"]))
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_table_with_semicolons_and_large_numbers(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = large_numbers(here / "data.csv")
    assert (
        main(
            [
                "train",
                "data.csv",
                "--data-options",
                "features=[c,a],splits=(0.5,0.25,0.25)",
                *TINY,
                MLP,
                "--out",
                "run",
            ]
        )
        == 0
    )
    said = " ".join(capsys.readouterr().out.split())
    assert (
        "2 numbers (standardised over the training classes; standardise=false leaves them as they"
        " are)" in said
    )
    assert main(["eval", "run", "--tasks", "2"]) == 0

    run = runs.load("run")
    values = read_csv(table, features=["c", "a"]).values
    found = run.shapes.standardisation
    assert found is not None
    assert run.source.standardisation == found
    expected = torch.from_numpy((values - np.array(found.mean)) / np.array(found.scale)).float()
    assert run.source._examples.equal(expected)
    # What adapt sees of the same rows, with the columns in another order and the training data
    # gone.
    table.unlink()
    support = large_numbers(here / "few.csv", classes=2, first=0, columns="bac", delimiter="\t")
    values = read_csv(support, features=["c", "a"]).values
    classifier = adapt("run", support)
    assert classifier.support.equal(
        torch.from_numpy((values - np.array(found.mean)) / np.array(found.scale)).float()
    )
    assert classifier.preprocessing.columns == ("c", "a")


def test_the_rows_of_the_source_and_of_adapt_are_the_same_inputs(here: Path) -> None:
    table = large_numbers(here / "data.csv", classes=2)
    options = "splits={train:[c00,c01]}"
    flags = ["--eval-every=0", "--test-tasks=0"]
    assert (
        main(["train", "data.csv", "--data-options", options, *TINY, MLP, *flags, "--out", "run"])
        == 0
    )
    run = runs.load("run")
    assert adapt(run, table).support.equal(run.source._examples)


@pytest.mark.parametrize("options", ["standardise=false", "0.1"])
def test_tables_that_are_left_as_they_are(here: Path, options: str) -> None:
    table = large_numbers(here / "data.csv", classes=8)
    given = "splits=(0.5,0.25,0.25),standardise=" + ("true" if options == "0.1" else "false")
    assert main(
        ["train", "data.csv", "--data-options", given, *TINY, MLP, "--lam=1e-3", "--out", "run"]
    ) in (0, 4)
    run = runs.load("run")
    if options == "0.1":  # a checkpoint from before there was such a thing
        for key in ("mean", "scale", "columns"):
            del run.state.state["shapes"][key]
        run = runs.Run(
            run.folder,
            run.config,
            run.learner,
            run.state,
            runs.DataShapes.from_dict(run.state.state["shapes"]),
        )
    assert run.shapes.standardisation is None
    assert run.source._examples.equal(torch.from_numpy(read_csv(table).values).float())
    few = large_numbers(here / "few.csv", classes=2)
    assert adapt(run, few).support.equal(torch.from_numpy(read_csv(few).values).float())


def test_resuming_uses_the_numbers_of_the_run(here: Path) -> None:
    table = large_numbers(here / "data.csv")
    flags = ["--data-options", "splits=(0.5,0.25,0.25)", *TINY, MLP]
    assert main(["train", "data.csv", *flags, "--out", "whole", "--iterations=6"]) == 0
    assert main(["train", "data.csv", *flags, "--out", "parts"]) == 0
    assert main(["train", "--resume", "parts", "--iterations=6"]) == 0
    assert (here / "whole" / "metrics.jsonl").read_bytes() == (
        here / "parts" / "metrics.jsonl"
    ).read_bytes()
    before = runs.load("parts").shapes.standardisation
    table.write_text(table.read_text().replace("1", "2"))
    again = runs.load("parts")
    assert again.source.standardisation == before


def test_pictures_keep_their_size_and_the_run_says_so(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_images(here / "photos", list("abcdefgh"), 3, size=100)
    flags = ["--data-options", "splits=(0.5,0.25,0.25)", *TINY, "--model=conv4:channels=2"]
    assert main(["train", "photos", *flags, "--out", "run"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "images 1×32×32 (shrunk from 100×100; image_size= sets another size)" in said
    assert runs.read_config(here / "run").data_options.startswith(
        "image_size=32,grey=true,standardise=false,splits=(0.5,0.25,0.25),"
    )
    Image.new("RGB", (30, 20)).save(here / "photos" / "a" / "late.png")
    assert runs.load("run").source.input_shape == (1, 32, 32)
    assert main(["train", "--resume", "run", "--iterations", "6"]) == 2, "the data have changed"
    assert main(["train", "--resume", "run", "--iterations", "6", "--allow-changed-data"]) == 0


def test_pictures_that_are_not_square_get_a_convolutional_network(here: Path) -> None:
    for name in "abcd":
        (here / "photos" / name).mkdir(parents=True)
        for number in range(3):
            Image.new("RGB", (20, 32), (number, 0, 0)).save(
                here / "photos" / name / f"{number}.png"
            )
    assert (
        main(
            [
                "train",
                "photos",
                "--data-options",
                "splits={train:[a,b,c,d]}",
                *TINY,
                "--eval-every=0",
                "--test-tasks=0",
                "--out=run",
            ]
        )
        == 0
    )
    run = runs.load("run")
    assert run.config.model == "conv4:channels=32"
    assert run.config.data_options.startswith("image_size=(32,20),grey=false,")
    classifier = adapt(run, _two_classes(here))
    assert classifier.support.shape == (6, 3, 32, 20)
    expected = run.source._examples[:6].float() / 255
    assert classifier.support.equal(expected)


def _two_classes(here: Path) -> Path:
    for name in "ab":
        shutil.copytree(here / "photos" / name, here / "few" / name)
    return here / "few"


@pytest.mark.filterwarnings("default")  # as for users, to whom a warning is a note
def test_a_stray_file_is_passed_over_and_named(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_images(here / "photos", list("abcd"), 3)
    (here / "photos" / "a" / "README").write_text("from the zoo")
    flags = [
        "--data-options",
        "splits=(1.0,0.0,0.0)",
        *TINY,
        "--model=mlp:hidden=(4,)",
        "--eval-every=0",
        "--test-tasks=0",
    ]
    assert main(["train", "photos", *flags, "--out", "run"]) == 0
    assert (
        "metanudge: note: photos: passed over what is no example: a/README."
        in capsys.readouterr().err
    )
    write_images(here / "few", ["x", "y"], 2)
    (here / "few" / "x" / "notes.txt").write_text("hello")
    write_images(here / "many", ["x", "y"], 2)
    (here / "many" / "list\x1b[2J.txt").write_text("hello")
    (here / "many" / ".DS_Store").write_bytes(b"\0")
    assert (
        main(["adapt", "run", "--support", "few", "--predict", "many", "--out", "labels.csv"]) == 0
    )
    said = capsys.readouterr().err
    assert "note: few: passed over what is no example: x/notes.txt." in said
    assert "note: many: passed over what is no example: list\\x1b[2J.txt." in said
    assert ".py:" not in said
    assert (here / "labels.csv").read_text().count("\n") == 5
    (here / "only").mkdir()
    (here / "only" / "notes.txt").write_text("hello")
    assert main(["adapt", "run", "--support", "few", "--predict", "only", "--out", "none.csv"]) == 2
    assert "holds no files that are examples" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["data.csv", "--ways", "1"], ["ways=1", "2 or more"]),
        (["mnist1d", "--ways", "1"], ["ways=1", "2 or more"]),
        (
            ["data.csv", "--data-options", "features=a"],
            ["features=a is not a list such as [a,b] or none"],
        ),
        (
            ["data.csv", "--data-options", "features=[a,d]"],
            ["no column 'd'", "a, b, c, label", "features=[...]"],
        ),
        (["empty.csv"], ["empty.csv, line 3", "'label') is empty"]),
        (["nan"], ["nan/a/1.npy", "NaN or infinity"]),
    ],
)
def test_what_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], flags: list[str], parts: list[str]
) -> None:
    large_numbers(here / "data.csv", delimiter=",")
    (here / "empty.csv").write_text("a,label\n1,x\n2,\n")
    for name in "ab":
        (here / "nan" / name).mkdir(parents=True)
        for number in range(2):
            np.save(
                here / "nan" / name / f"{number}.npy", np.array([1.0, np.nan if number else 2.0])
            )
    assert main(["train", *flags, "--out", "run"]) == 2
    said = capsys.readouterr().err
    for part in parts:
        assert part in said
    assert "Traceback" not in said
    assert not (here / "run").exists()


def test_pictures_on_disk_train_to_the_same_bytes(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METANUDGE_CACHE", str(here / "cache"))
    write_images(here / "photos", list("abcdefgh"), 3)
    options = "splits=(0.5,0.25,0.25)"
    for where in ("false", "true"):
        flags = ["--data-options", f"{options},on_disk={where}", *TINY, MLP, "--out", where]
        assert main(["train", "photos", *flags]) == 0
    assert "kept decoded in" in " ".join(capsys.readouterr().out.split())
    kept = list((here / "cache" / "examples").iterdir())
    assert len(kept) == 1
    assert (here / "true" / "metrics.jsonl").read_bytes() == (
        here / "false" / "metrics.jsonl"
    ).read_bytes()
    assert main(["train", "--resume", "true", "--iterations", "6"]) == 0
    assert main(["eval", "true", "--tasks", "2"]) == 0
    assert list((here / "cache" / "examples").iterdir()) == kept, "decoded once"


def test_a_broken_picture_is_named_before_anything_is_written(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METANUDGE_CACHE", str(here / "cache"))
    write_images(here / "photos", list("abcdefgh"), 3)
    file = here / "photos" / "f" / "1.png"
    file.write_bytes(file.read_bytes()[:300])
    options = "image_size=20,grey=true,splits=(0.5,0.25,0.25),on_disk=true"
    flags = ["--data-options", options, *TINY, MLP, "--out", "run"]
    assert main(["train", "photos", *flags]) == 2
    error = capsys.readouterr().err
    assert "f/1.png cannot be read as an example" in " ".join(error.split())
    assert not (here / "run").exists()
    assert not list((here / "cache" / "examples").iterdir())
    monkeypatch.setenv("METANUDGE_CACHE", "/proc/nowhere")
    write_images(here / "good", list("abcdefgh"), 3)
    assert main(["train", "good", *flags]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "METANUDGE_CACHE" in error
    assert "on_disk=false" in error
    assert not (here / "run").exists()
