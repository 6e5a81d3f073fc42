"""Scaling and explanation of meta-steps, at tiny sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from metanudge_lab.bench.cases import CASES, Case
from metanudge_lab.bench.config import BenchConfig
from metanudge_lab.bench.contender import Contender, ReadyContender, choose
from metanudge_lab.bench.explain import explain
from metanudge_lab.bench.plots import draw
from metanudge_lab.bench.run import show
from metanudge_lab.bench.scaling import scale
from metanudge_lab.bench.suite import CONTENDERS
from metanudge_lab.bench.workload import Workload
from metanudge_lab.progress import Lines

CPU = torch.device("cpu")
QUICK = BenchConfig(quick=True, repeats=1, warmup=1, first_step=False, device="cpu", threads=1)


def test_an_explanation_accounts_for_everything() -> None:
    (maml,) = choose(CONTENDERS, ["maml"])
    result = explain(CASES["sinusoid"], maml, QUICK, CPU)
    assert sum(layer["flops"] for layer in result["layers"]) == pytest.approx(result["flops"])
    assert sum(layer["seconds"] for layer in result["layers"]) == pytest.approx(
        result["roofline_s"]
    )
    assert sum(op["share"] for op in result["time"]) == pytest.approx(1)
    assert result["operators"] > 100
    assert any(op["name"].startswith("aten::") for op in result["time"])
    text = "\n".join(map(str, show(result)))
    for needed in (
        "5 support and 1 query gradients, 5 Hessian products",
        "roofline",
        "addmm 3×1 · 1×5",
        "of the bound",
    ):
        assert needed in text


def test_scaling_finds_memory_flat_or_growing_with_the_steps(tmp_path: Path) -> None:
    contenders = choose(CONTENDERS, ["fobmaml-loss", "loop-maml"])
    result = scale(CASES["sinusoid"], contenders, QUICK, CPU, Lines())
    curves = {(c["name"], c["quantity"], c["axis"]): c for c in result["curves"]}
    assert len(curves) == 2 * 4
    flat, growing = (
        [p["measured"] for p in curves[name, "memory", "steps"]["points"]]
        for name in ("fobmaml-loss", "loop-maml")
    )
    assert flat[2] < 1.05 * flat[1], "the first step, from θ itself, may need less than the others"
    assert growing[2] > 1.3 * growing[1]
    assert curves["loop-maml", "memory", "steps"]["exponent"] > 0.3
    assert [p["value"] for p in curves["loop-maml", "time", "tasks"]["points"]] == [1, 2, 4]
    draw(result, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_scaling_stops_at_the_time_limit() -> None:
    result = scale(
        CASES["sinusoid"],
        choose(CONTENDERS, ["reptile"]),
        replace(QUICK, limit_seconds=1e-9),
        CPU,
        Lines(),
    )
    assert result["curves"] == []
    assert len(result["notes"]) == 3


def test_scaling_goes_in_rounds_so_that_no_axis_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every value takes as many seconds as it is large, so two rounds take 9 of 12 seconds, and a
    third can only begin.
    """
    clock, measured = [0.0], []

    def measure(
        case: Case,
        contenders: Sequence[Contender],
        config: object,
        device: object,
        axis: str,
        value: int,
        notes: object,
    ) -> list:
        clock[0] += value
        measured.append((axis, value))
        names = {
            "name": contenders[0].name,
            "label": contenders[0].label,
            "method": contenders[0].method,
        }
        return [{**names, "axis": axis, "value": value, "seconds": float(value), "memory_bytes": 1}]

    monkeypatch.setattr("metanudge_lab.bench.scaling._measure", measure)
    monkeypatch.setattr(
        "metanudge_lab.bench.scaling.time", SimpleNamespace(monotonic=lambda: clock[0])
    )
    result = scale(
        CASES["sinusoid"],
        choose(CONTENDERS, ["reptile"]),
        replace(QUICK, limit_seconds=12),
        CPU,
        Lines(),
    )
    assert measured == [
        ("tasks", 1),
        ("steps", 1),
        ("shots", 1),
        ("tasks", 2),
        ("steps", 2),
        ("shots", 2),
        ("tasks", 4),
    ]
    assert result["notes"] == ["steps = 4 and more left out: the limit of 12 s"]
    assert [(p["axis"], p["value"]) for p in result["points"]] == sorted(
        measured, key=lambda m: ["tasks", "steps", "shots"].index(m[0])
    )
    times = {c["axis"]: c["points"] for c in result["curves"] if c["quantity"] == "time"}
    assert {axis: [p["value"] for p in points] for axis, points in times.items()} == {
        "tasks": [1, 2, 4],
        "steps": [1, 2],
        "shots": [1, 2],
    }


def test_a_contender_that_failed_on_an_axis_is_not_tried_further_up() -> None:
    (reptile,) = choose(CONTENDERS, ["reptile"])
    tried = []

    def prepare(workload: Workload) -> ReadyContender:
        tried.append((len(workload.tasks), workload.steps, workload.shape.shots))
        if workload.steps == 2:
            raise MemoryError
        return reptile.prepare(workload)

    result = scale(CASES["sinusoid"], [replace(reptile, prepare=prepare)], QUICK, CPU, Lines())
    assert result["notes"] == ["Reptile at steps = 2: MemoryError"]
    assert [steps for _, steps, _ in tried] == [5, 1, 5, 5, 2, 5, 5]
    assert {c["axis"]: len(c["points"]) for c in result["curves"] if c["quantity"] == "time"} == {
        "tasks": 3,
        "steps": 1,
        "shots": 2,
    }
