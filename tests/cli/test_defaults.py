"""What `metanudge train` decides where nothing is said, and when it stops by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.test_own_data import TINY, large_numbers
from metanudge.cli import main
from metanudge.training.config import TrainConfig
from metanudge.training.sources import build_source, for_device
from trained_runs import write_images

NAMES = ("model", "head", "estimator", "tasks", "patience", "data_options")
USUAL = ("auto", "fixed", "fobmaml", 16, 3, "")
CPU = ("conv4:channels=32", "prototypes", "fomaml", 4, 3, "image_size=small")


@pytest.fixture
def data(tmp_path: Path) -> dict[str, str]:
    write_images(tmp_path / "photos", list("abcd"), 3, size=100)
    table = large_numbers(tmp_path / "table.csv")
    return {"photos": str(tmp_path / "photos"), "table": str(table), "mnist1d": "mnist1d"}


@pytest.mark.parametrize(
    ("name", "device", "said", "decided"),
    [
        ("photos", "cpu", {}, CPU),
        ("photos", "cuda", {}, USUAL),
        ("table", "cpu", {}, USUAL),
        ("mnist1d", "cpu", {}, (*USUAL[:4], 0, "")),
        ("photos", "cpu", {"learn_lam": "scalar"}, (*CPU[:2], "fobmaml", *CPU[3:])),
        ("photos", "cpu", {"adapt": "head.*"}, (CPU[0], "fixed", *CPU[2:])),
        ("photos", "cpu", {"model": "my_code:Net"}, ("my_code:Net", "fixed", *CPU[2:])),
        ("table", "cuda", {"ways": "3-5"}, ("auto", "prototypes", *USUAL[2:])),
        (
            "photos", "cpu",
            {"model": "mlp", "head": "fixed", "estimator": "maml", "tasks": 2, "patience": 1,
             "data_options": "grey=true,image_size=64"},
            ("mlp", "fixed", "maml", 2, 1, "grey=true,image_size=64"),
        ),
    ],
)  # fmt: skip
def test_what_is_decided_and_what_is_left(
    data: dict[str, str], name: str, device: str, said: dict[str, Any], decided: tuple[Any, ...]
) -> None:
    found = for_device(TrainConfig(data[name], **said), torch.device(device))
    assert tuple(getattr(found, name) for name in NAMES) == decided
    assert for_device(found, torch.device(device)) == found, "once decided, it stays"


@pytest.mark.parametrize(("size", "side"), [(100, 32), (20, 20)])
def test_small_pictures_are_not_made_larger(tmp_path: Path, size: int, side: int) -> None:
    write_images(tmp_path, list("abcdefgh"), 3, size=size)
    sizes = {"ways": 2, "shots": 1, "queries": 1}
    source = build_source(TrainConfig(str(tmp_path), data_options="image_size=small", **sizes))
    assert source.input_shape == (1, side, side)


def test_it_stops_where_validation_gets_no_better(
    data: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    still = ["--optimizer=sgd:lr=1e-30", "--eval-every=1", "--iterations=5"]
    flags = ["train", data["table"], *TINY, *still, "--model=mlp:hidden=(4,)"]

    def steps(folder: Path) -> int:
        return int(json.loads((folder / "summary.json").read_text())["steps"])

    assert main([*flags, "--patience=2", f"--out={run}"]) == 0
    assert steps(run) == 3, "the first, and two that are no better"
    assert "stopped early" in capsys.readouterr().out
    assert main(["train", "--resume", str(run)]) == 0
    assert steps(run) == 3, "what has stopped does not go on by itself"
    assert main(["train", "--resume", str(run), "--patience=0"]) == 0
    assert main([*flags, "--patience=0", f"--out={tmp_path / 'whole'}"]) == 0
    assert steps(run) == steps(tmp_path / "whole") == 5
    metrics = [(folder / "metrics.jsonl").read_bytes() for folder in (run, tmp_path / "whole")]
    assert metrics[0] == metrics[1]
