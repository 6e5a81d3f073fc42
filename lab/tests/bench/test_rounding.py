"""Rounding errors of meta-gradients: the numbers, both paths, what is left out, the command."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from metanudge.accel import chain
from metanudge.cli import main
from metanudge.engines.stacked import compiles
from metanudge_lab.bench import rounding as module
from metanudge_lab.bench import tables
from metanudge_lab.bench.cases import CASES
from metanudge_lab.bench.config import BenchConfig
from metanudge_lab.bench.contender import Contender, ReadyContender, Work, choose
from metanudge_lab.bench.plots import draw
from metanudge_lab.bench.rounding import (
    in_float64,
    median,
    paths,
    ratio,
    root_mean_square,
    rounding,
)
from metanudge_lab.bench.suite import CONTENDERS
from metanudge_lab.bench.workload import Workload
from metanudge_lab.progress import Lines
from problems import relative_error

CPU = torch.device("cpu")
QUICK = BenchConfig(quick=True, rounding=True, device="cpu", threads=1)


def contender(step: object, prepare: object = None) -> Contender:
    return Contender(
        "made",
        "Made",
        "metanudge",
        "MAML",
        prepare or (lambda workload: ReadyContender(lambda: step(workload), lambda: Work(1, 1))),
    )


def test_errors_made_by_hand() -> None:
    wrong = {torch.float32: iter([0.3, 0.1, 0.2]), torch.bfloat16: iter([1.0, 3.0, 2.0])}

    def step(workload: Workload) -> dict[str, torch.Tensor]:
        """(3, 4), off by a known share of its norm in the direction of b."""
        dtype = (
            torch.bfloat16
            if torch.is_autocast_enabled("cpu")
            else next(workload.model.parameters()).dtype
        )
        off = 5 * next(wrong[dtype]) if dtype in wrong else 0.0
        return {"a": torch.tensor([3.0]), "b": torch.tensor(4.0 + off, dtype=torch.float64)}

    result = rounding(CASES["sinusoid"], [contender(step)], QUICK, CPU, Lines())
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    full, half = result["rows"]
    assert (full["precision"], full["path"], half["precision"], half["path"]) == (
        "fp32",
        "layer by layer",
        "bf16",
        "layer by layer",
    )
    assert full["errors"] == pytest.approx([0.3, 0.1, 0.2])
    assert (full["rms"], full["median"], full["largest"]) == pytest.approx(
        (math.sqrt(0.14 / 3), 0.2, 0.3)
    )
    assert (half["rms"], half["median"], half["largest"]) == pytest.approx(
        (math.sqrt(14 / 3), 2.0, 3.0)
    )
    assert result["ratios"] == []
    assert result["batches"] == 3
    assert "precision" not in result["config"]
    assert {"commit", "torch", "device", "date"} <= set(result["provenance"])
    text = str(tables.rounding(result))
    for needed in (
        "2.16e-01  2.00e-01  3.00e-01",
        "over 3 meta-batches",
        "tf32 left out",
        "rounding errors of the meta-gradient",
    ):
        assert needed in text
    assert "blocks / layers" not in text


def test_both_paths_on_the_same_batches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A CPU takes blocks as one operation always; here only where kernels may be built, like a
    GPU.
    """
    blocks = chain.trunk_for
    monkeypatch.setattr(chain, "trunk_for", lambda *where: blocks(*where) if compiles() else None)
    (fomaml,) = choose(CONTENDERS, ["fomaml"])
    result = rounding(CASES["mnist1d"], [fomaml], QUICK, CPU, Lines())
    fused, layers, half = result["rows"]
    assert [(row["precision"], row["path"]) for row in (fused, layers)] == [
        ("fp32", "blocks"),
        ("fp32", "layer by layer"),
    ]
    assert (half["precision"], half["path"]) == ("bf16", "layer by layer")
    assert fused["errors"] != layers["errors"]
    # float32 rounds to 6e-8, bfloat16 to 4e-3; a choice that flips makes more of it, never less.
    assert all(1e-8 < error < 1e-4 for error in (*fused["errors"], *layers["errors"]))
    assert all(error > 1e-3 for error in half["errors"])
    (compared,) = result["ratios"]
    assert compared["precision"] == "fp32"
    assert compared["rms"]["ratio"] == pytest.approx(fused["rms"] / layers["rms"])
    assert compared["median"]["ratio"] == pytest.approx(fused["median"] / layers["median"])
    low, high = compared["rms"]["interval"]
    assert low <= compared["rms"]["ratio"] <= high
    text = str(tables.rounding(result))
    assert f"{compared['rms']['ratio']:.3g} ({low:.3g}–{high:.3g})" in text
    assert "95 % intervals" in text
    draw(result, tmp_path / "rounding.png")
    assert (tmp_path / "rounding.png").read_bytes().startswith(b"\x89PNG")


def test_an_error_is_the_distance_from_the_same_learner_in_float64() -> None:
    (ours,) = choose(CONTENDERS, ["fobmaml-loss"])
    result = rounding(CASES["sinusoid"], [ours], replace(QUICK, batches=2), CPU, Lines())
    for batch, error in enumerate(result["rows"][0]["errors"]):
        workload = CASES["sinusoid"].make(quick=True, seed=2 * batch)
        exact = in_float64(workload)
        assert all(
            torch.equal(a.double(), b)
            for a, b in zip(workload.model.parameters(), exact.model.parameters(), strict=True)
        )
        assert torch.equal(workload.support[0].double(), exact.support[0]), (
            "data that differ would count as an error of the arithmetic"
        )
        assert error == pytest.approx(
            relative_error(ours.prepare(workload).step(), ours.prepare(exact).step()), rel=1e-6
        )


def test_a_cpu_has_one_path() -> None:
    images, points = CASES["mnist1d"].make(quick=True), CASES["sinusoid"].make(quick=True)
    assert list(paths(images, "fp32")) == ["blocks"]
    assert list(paths(images, "bf16")) == ["layer by layer"]
    assert list(paths(points, "fp32")) == ["layer by layer"]


def test_ratios_and_their_intervals() -> None:
    errors, others = np.array([1.0, 3.0]), np.array([1.0, 1.0])
    # Two of two draws are both 1 or both 3 in a quarter of all cases each.
    assert ratio(errors, others, median) == {"ratio": 2.0, "interval": [1.0, 3.0]}
    assert ratio(errors, others, root_mean_square) == {
        "ratio": pytest.approx(math.sqrt(5)),
        "interval": pytest.approx([1.0, 3.0]),
    }
    spread = np.exp(np.random.default_rng(1).normal(size=16))
    doubled = ratio(2 * spread, spread, root_mean_square)
    assert [doubled["ratio"], *doubled["interval"]] == pytest.approx([2.0] * 3), (
        "the same luck on both sides cancels"
    )
    assert ratio(errors[:1], others[:1], median) == {"ratio": 1.0, "interval": None}


def test_what_does_not_run_is_left_out_or_failed_and_said() -> None:
    def prepare(workload: Workload, *, breaks: str) -> ReadyContender:
        autocast = torch.is_autocast_enabled("cpu")
        if next(workload.model.parameters()).dtype == torch.float32 and breaks == (
            "bf16" if autocast else "fp32"
        ):
            raise RuntimeError("no such kernel\nand more lines")
        return ReadyContender(
            lambda: {"a": torch.tensor(1.1 if autocast else 1.0)}, lambda: Work(1, 1)
        )

    for breaks in ("fp32", "bf16"):
        made = contender(None, lambda workload, breaks=breaks: prepare(workload, breaks=breaks))
        result = rounding(CASES["sinusoid"], [made], QUICK, CPU, Lines())
        assert [row["precision"] for row in result["rows"]] == [
            "bf16" if breaks == "fp32" else "fp32"
        ]
        assert [row["package"] for row in result["failed"]] == (
            ["metanudge"] if breaks == "fp32" else []
        )
        text = str(tables.rounding(result))
        expected = "failed" if breaks == "fp32" else "does not run here"
        assert f"made, {breaks}, layer by layer {expected}: RuntimeError: no such kernel" in text


def test_the_time_limit_cuts_whole_batches_but_never_the_first() -> None:
    (fomaml,) = choose(CONTENDERS, ["fomaml"])
    result = rounding(CASES["sinusoid"], [fomaml], replace(QUICK, limit_seconds=1e-9), CPU, Lines())
    assert result["batches"] == 1
    assert all(len(row["errors"]) == 1 for row in result["rows"])
    assert "2 of 3 meta-batches left out" in result["skipped"][-1]


def test_a_gpu_with_and_without_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, expected in (((9, 0), ["fp32", "tf32", "bf16"]), ((7, 5), ["fp32", "bf16"])):
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device, found=capability: found
        )
        assert module._precisions(torch.device("cuda"))[0] == expected


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--rounding", "--quick", "--case", "sinusoid", "--batches", "2", "--device", "cpu"]
    assert main(["bench", *options, "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    for needed in (
        "FO-B-MAML, loss nudge",
        "FO-B-MAML, gradient nudge",
        "FO-MAML",
        "bf16",
        "sinusoid-rounding-cpu-quick.png",
    ):
        assert needed in text
    file = tmp_path / "sinusoid-rounding-cpu-quick.json"
    file.with_suffix(".png").unlink()
    assert main(["bench", "--draw", str(file)]) == 0
    assert file.with_suffix(".png").is_file()
    assert main(["bench", *options, "--scaling"]) == 2
    assert "--scaling and --rounding measure different things" in capsys.readouterr().err
