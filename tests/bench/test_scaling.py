"""Scaling and explanation of meta-steps, at tiny sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from metanudge.bench.cases import CASES
from metanudge.bench.config import BenchConfig
from metanudge.bench.contender import choose
from metanudge.bench.explain import explain
from metanudge.bench.plots import draw
from metanudge.bench.run import show
from metanudge.bench.scaling import scale
from metanudge.bench.suite import CONTENDERS
from metanudge.experiments.progress import Lines

CPU = torch.device("cpu")
QUICK = BenchConfig(quick=True, repeats=1, warmup=1, first_step=False, device="cpu", threads=1)


def test_an_explanation_accounts_for_everything() -> None:
    (maml,) = choose(CONTENDERS, ["maml"])
    result = explain(CASES["sinusoid"], maml, QUICK, CPU)
    assert sum(layer["flops"] for layer in result["layers"]) == pytest.approx(result["flops"])
    assert sum(layer["seconds"] for layer in result["layers"]) == pytest.approx(result["roofline_s"])
    assert sum(op["share"] for op in result["time"]) == pytest.approx(1)
    assert result["operators"] > 100
    assert any(op["name"].startswith("aten::") for op in result["time"])
    text = "\n".join(map(str, show(result)))
    for needed in ("5 support and 1 query gradients, 5 Hessian products", "roofline", "addmm 3×1 · 1×5", "of the bound"):
        assert needed in text


def test_scaling_finds_memory_flat_or_growing_with_the_steps(tmp_path: Path) -> None:
    contenders = choose(CONTENDERS, ["fobmaml-loss", "loop-maml"])
    result = scale(CASES["sinusoid"], contenders, QUICK, CPU, Lines())
    curves = {(c["name"], c["quantity"], c["axis"]): c for c in result["curves"]}
    assert len(curves) == 2 * 4
    flat, growing = ([p["measured"] for p in curves[name, "memory", "steps"]["points"]] for name in ("fobmaml-loss", "loop-maml"))
    assert flat[2] < 1.05 * flat[1], "the first step, from θ itself, may need less than the others"
    assert growing[2] > 1.3 * growing[1]
    assert curves["loop-maml", "memory", "steps"]["exponent"] > 0.3
    assert [p["value"] for p in curves["loop-maml", "time", "tasks"]["points"]] == [1, 2, 4]
    draw(result, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_scaling_stops_at_the_time_limit() -> None:
    result = scale(CASES["sinusoid"], choose(CONTENDERS, ["reptile"]), replace(QUICK, limit_seconds=1e-9), CPU, Lines())
    assert result["curves"] == []
    assert len(result["notes"]) == 3
