"""`metanudge train` as a user meets it: help, exit codes, messages, and nothing half-written."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from metanudge.cli import main
from metanudge.training import runs
from metanudge.training.checkpoint import CheckpointError, CheckpointStore

TINY = [
    "--model", "mlp:hidden=(4,)", "--solver", "gradient_descent:lr=0.01,steps=1", "--tasks", "2",
    "--iterations", "3",
    "--eval-every", "2", "--eval-tasks", "2", "--test-tasks", "2", "--device", "cpu",
]  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, and a cache that is not the user's."""
    monkeypatch.setenv("METANUDGE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def call(*arguments: str) -> int:
    try:
        return main(list(arguments))
    except SystemExit as left:  # how the flag parser leaves
        return left.code if isinstance(left.code, int) else -1


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["train", "--help"], ["--version"], ["trian"], ["train", "--iteratons", "3"]],
)
def test_help_and_flag_errors_load_no_torch(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom metanudge.cli import main\ntry:\n    main(sys.argv[1:])\nexcept"
        " SystemExit:\n    pass\nsys.exit('torch' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code, *arguments], check=False, capture_output=True
        ).returncode
        == 0
    )


def test_help_has_examples_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--help") == 0
    text = capsys.readouterr().out
    assert "metanudge train mnist1d" in text
    assert "torchrun" in text
    assert call("train", "--help") == 0
    text = capsys.readouterr().out
    for word in ("--estimator", "--resume", "--config", "DATA", "metanudge train omniglot", "130"):
        assert word in text


def test_no_command_and_a_wrong_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert call() == 2
    assert call("trian") == 2
    assert "Did you mean 'train'?" in capsys.readouterr().err


def test_a_run_from_flags_another_from_its_config_and_a_resume(here: Path) -> None:
    assert call("train", "sinusoid", *TINY, "--out", "a") == 0
    assert call("train", "--config", "a/config.json", "--out", "b") == 0
    assert (here / "a" / "metrics.jsonl").read_bytes() == (
        here / "b" / "metrics.jsonl"
    ).read_bytes()
    # into runs/sinusoid-TIME, not into a
    assert call("train", "--config", "a/config.json", "--seed", "1") == 0
    (default,) = (here / "runs").iterdir()
    assert runs.read_config(default).seed == 1
    assert call("train", "--resume", "a", "--iterations", "5") == 0
    assert (here / "a" / "metrics.jsonl").read_bytes().count(b"\n") == 5


def test_your_own_data_from_a_folder_and_a_csv(here: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    rows = ["a,b,species"] + [
        f"{c + x:.3f},{x:.3f},kind{c}"
        for c in range(12)
        for x in torch.rand(6, generator=draw).tolist()
    ]
    (here / "flowers.csv").write_text("\n".join(rows))
    few = ["--ways", "2", "--shots", "1", "--queries", "2"]
    assert (
        call(
            "train",
            "flowers.csv",
            "--data-options",
            "label=species,splits=(0.5,0.25,0.25)",
            *few,
            *TINY,
            "--out",
            "csv",
        )
        == 0
    )
    assert Path(runs.read_config(here / "csv").data).is_absolute()
    assert runs.load("csv").source.input_shape == (2,)
    for name in "abcdefghijkl":
        (here / "photos" / name).mkdir(parents=True)
        for number in range(3):
            pixels = torch.randint(0, 256, (20, 20), generator=draw, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(here / "photos" / name / f"{number}.png")
    options = "image_size=16,splits=(0.5,0.25,0.25)"
    assert (
        call("train", "photos", "--data-options", options, *few, *TINY[2:], "--out", "images") == 0
    )
    assert runs.read_config(here / "images").model == "conv4:channels=32"


def bad_data(here: Path) -> None:
    """Files that the cases below name."""
    (here / "note.txt").write_text("hello")
    (here / "empty").mkdir()
    (here / "broken" / "a").mkdir(parents=True)
    (here / "broken" / "a" / "x.png").write_text("no image")
    (here / "few.csv").write_text("x,label\n" + "".join(f"{i},{i % 3}\n" for i in range(30)))
    (here / "wide.csv").write_text("x,label\n" + "".join(f"{i},{i % 20}\n" for i in range(60)))
    (here / "bad.json").write_text('{"iteratons": 3}')
    (here / "not.json").write_text("{")
    (here / "full").mkdir()
    (here / "full" / "thesis.tex").write_text("x")


CASES = {
    "no data": (["train"], ["mnist1d"]),
    "unknown data": (["train", "mnist2d"], ["mnist2d", "Did you mean 'mnist1d'?"]),
    "missing folder": (["train", "photos/"], ["photos/"]),
    "file of another kind": (["train", "note.txt"], ["note.txt", ".csv"]),
    "empty folder": (["train", "empty"], ["empty", "sub-folder"]),
    "unreadable image": (["train", "broken"], ["x.png"]),
    "csv without the column": (
        ["train", "few.csv", "--data-options", "label=kind"],
        ["kind", "label"],
    ),
    "too few classes": (["train", "few.csv", "--ways", "5"], ["ways=5"]),
    "one class": (["train", "few.csv", "--ways", "1"], ["ways=1", "2 or more"]),
    "too few examples": (
        ["train", "wide.csv", "--ways", "2", "--shots", "10", "--queries", "10"],
        ["shots=10", "queries=10"],
    ),
    "unknown data option": (
        ["train", "mnist1d", "--data-options", "num_sample=100"],
        ["num_sample", "num_samples"],
    ),
    "data option with a flag of its own": (
        ["train", "mnist1d", "--data-options", "ways=2"],
        ["--ways 2"],
    ),
    "ways for regression": (["train", "sinusoid", "--ways", "3"], ["--ways", "regression"]),
    "unknown flag": (["train", "sinusoid", "--iteratons", "3"], ["--iteratons", "--iterations"]),
    "flag of the wrong type": (["train", "sinusoid", "--tasks", "many"], ["--tasks", "many"]),
    "unknown choice": (["train", "sinusoid", "--schedule", "linear"], ["--schedule", "linear"]),
    "no steps": (["train", "sinusoid", "--iterations", "0"], ["--iterations 0"]),
    "negative stiffness": (["train", "sinusoid", "--lam", "-1"], ["--lam -1"]),
    "unknown estimator": (
        ["train", "sinusoid", "--estimator", "fobmalm"],
        ["fobmalm", "Did you mean 'fobmaml'?"],
    ),
    "unknown estimator option": (
        ["train", "sinusoid", "--estimator", "fobmaml:mu=1"],
        ["mu", "Did you mean 'nu'?"],
    ),
    "bad estimator value": (["train", "sinusoid", "--estimator", "fobmaml:nu=-1"], ["nu", "-1"]),
    "unknown solver": (
        ["train", "sinusoid", "--solver", "gradient"],
        ["gradient", "gradient_descent"],
    ),
    "solver without its steps": (
        ["train", "sinusoid", "--solver", "gradient_descent:lr=1"],
        ["steps"],
    ),
    "estimator that cannot use the solver": (
        ["train", "sinusoid", "--estimator", "maml", "--solver", "lbfgs"],
        ["MAML", "LBFGS"],
    ),
    "engine that the estimator cannot use": (
        ["train", "sinusoid", "--estimator", "maml:products=unrolled", "--engine", "inplace"],
        ["MAML", "stacked"],
    ),
    "unknown optimizer": (
        ["train", "sinusoid", "--optimizer", "adamm:lr=1"],
        ["adamm", "Did you mean 'adam"],
    ),
    "bad optimizer value": (["train", "sinusoid", "--optimizer", "adam:lr=-1"], ["adam", "-1"]),
    "unknown model": (
        ["train", "sinusoid", "--model", "conv5"],
        ["conv5", "Did you mean 'conv4'?"],
    ),
    "model that does not fit": (["train", "sinusoid", "--model", "conv4"], ["conv4"]),
    "model that is nowhere": (["train", "sinusoid", "--model", "my_nets:Net"], ["my_nets"]),
    "model that is no model": (
        ["train", "sinusoid", "--model", "os:getcwd"],
        ["os:getcwd", "nn.Module"],
    ),
    "run folder not empty": (["train", "sinusoid", "--out", "full"], ["full", "thesis.tex"]),
    "run folder is a file": (["train", "sinusoid", "--out", "note.txt"], ["note.txt"]),
    "run folder cannot be made": (
        ["train", "sinusoid", *TINY, "--out", "note.txt/run"],
        ["note.txt"],
    ),
    "unknown setting in a file": (
        ["train", "sinusoid", "--config", "bad.json"],
        ["bad.json", "iteratons", "iterations"],
    ),
    "file that is no JSON": (["train", "sinusoid", "--config", "not.json"], ["not.json"]),
    "file that is not there": (["train", "sinusoid", "--config", "gone.json"], ["gone.json"]),
    "resume of nothing": (["train", "--resume", "gone"], ["gone"]),
    "resume of no run": (["train", "--resume", "full"], ["full", "config.json"]),
    "resume and config": (
        ["train", "--resume", "full", "--config", "bad.json"],
        ["--resume", "--config"],
    ),
    "precision against dtype": (
        ["train", "sinusoid", "--precision", "bf16", "--dtype", "float64"],
        ["bf16", "float64"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_named_and_nothing_is_written(
    here: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    bad_data(here)
    before = tree(here)
    arguments, words = CASES[case]
    assert call(*arguments) == 2
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    for word in words:
        assert word in said.err, said.err
    assert tree(here) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("train", "sinusoid", "--device", "cuda") == 2
    assert "--device cpu" in capsys.readouterr().err
    assert tree(here) == []


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_an_extra_that_is_not_installed(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda module: None if module == name else find(module)
    )
    assert call("train", "sinusoid", f"--{name}") == 2
    assert f"pip install 'metanudge[{name}]'" in capsys.readouterr().err
    assert tree(here) == []


def test_a_full_disk_stops_the_run_with_a_message(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object, **options: object) -> None:
        raise CheckpointError(
            here / "run", "could not be written: no space left on device", "Free some space."
        )

    monkeypatch.setattr(CheckpointStore, "add", full)
    assert call("train", "sinusoid", *TINY, "--out", "run") == 6
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert "space" in said
    assert not (here / "run" / "checkpoints").exists()
