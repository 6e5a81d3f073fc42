"""Hyper-cleaning, in small: it runs, and finds the wrong labels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_hyper_cleaning(script, tmp_path, capsys):
    example = script(EXAMPLES / "hyper_cleaning.py")
    small = {
        "train": 500,
        "validation": 400,
        "filters": 32,
        "outer-steps": 10,
        "inner-steps": 25,
        "seeds": 1,
    }
    result = example.main(
        [*(f"--{name}={value}" for name, value in small.items()), f"--out={tmp_path}"]
    )
    runs = {run["method"]: run for run in result["runs"]}
    assert set(runs) == set(example.METHODS)
    (noisy,) = result["references"]["all labels as they are"]
    (right,) = result["references"]["all labels right"]
    for run in runs.values():
        assert run["auroc"] >= 0.9
        assert noisy + 0.03 < run["accuracy"] < right + 0.02
        assert run["cosine"] > 0.5
    for name in ("FO-B-MAML symmetric", "FO-B-MAML gradient nudge"):
        assert runs[name]["megabytes"] < runs["MAML"]["megabytes"] / 4
    assert json.loads((tmp_path / "hyper_cleaning.json").read_text()) == json.loads(
        json.dumps(result)
    )
    assert (tmp_path / "hyper_cleaning.png").stat().st_size > 10_000
    assert "iMAML, 10 CG steps" in capsys.readouterr().out


def test_auroc_by_hand(script):
    auroc = script(EXAMPLES / "hyper_cleaning.py").auroc
    assert auroc(torch.tensor([0.9, 0.8, 0.1]), torch.tensor([True, True, False])) == 1
    assert auroc(
        torch.tensor([0.9, 0.2, 0.5, 0.2]), torch.tensor([True, True, False, False])
    ) == pytest.approx((2 + 0 + 0.5) / 4)
