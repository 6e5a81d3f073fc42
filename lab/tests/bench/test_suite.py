"""A comparison from end to end, at tiny sizes."""

from __future__ import annotations

import json

import pytest
import torch

from metanudge_lab.bench import tables
from metanudge_lab.bench.cases import CASES
from metanudge_lab.bench.config import BenchConfig
from metanudge_lab.bench.contender import Contender, ReadyContender, choose
from metanudge_lab.bench.suite import CONTENDERS, compare
from metanudge_lab.bench.workload import Workload
from metanudge_lab.progress import Lines

CPU = torch.device("cpu")
QUICK = BenchConfig(quick=True, repeats=2, warmup=1, first_step=False, device="cpu", threads=1)

# torch's own forward-mode decompositions are scripted on first use.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script` is deprecated:DeprecationWarning"
)


def broken(workload: Workload) -> ReadyContender:
    raise RuntimeError("no such kernel\nand more lines")


BROKEN = Contender("broken", "Broken", "elsewhere", "MAML", broken)
ABSENT = Contender(
    "absent",
    "Absent",
    "elsewhere",
    "MAML",
    broken,
    module="a_package_nobody_has",
    install="pip install it",
)


def test_a_comparison_measures_reports_failures_and_says_who_is_missing() -> None:
    contenders = [*choose(CONTENDERS, ["fobmaml-loss", "loop-maml"]), BROKEN, ABSENT]
    result = compare(CASES["sinusoid"], contenders, QUICK, CPU, Lines())
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    ours, loop = result["rows"]
    assert (ours["name"], loop["name"]) == ("fobmaml-loss", "loop-maml")
    tasks = result["workload"]["tasks"]
    for row, gradients in ((ours, 20), (loop, 6)):
        seconds = row["seconds"]["median"]
        assert len(row["seconds"]["samples"]) == 2
        assert len(row["warmup_s"]) == 1
        assert row["gradients_per_s"] == pytest.approx(gradients * tasks / seconds)
        assert row["times_roofline"] == pytest.approx(seconds / row["roofline_s"])
        assert row["memory_bytes"] > 4 * result["workload"]["parameters"], (
            "at least the meta-gradient itself"
        )
    assert loop["work_per_task"] == {
        "support_gradients": 5,
        "query_gradients": 1,
        "hessian_products": 5,
    }
    assert [row["error"] for row in result["failed"]] == ["RuntimeError: no such kernel"]
    assert [row["reason"] for row in result["absent"]] == ["not installed: pip install it"]
    assert {"commit", "torch", "threads", "date", "device"} <= set(result["provenance"])
    text = str(tables.comparison(result))
    for needed in (
        "FO-B-MAML, loss nudge",
        "Broken failed",
        "pip install it: Absent",
        "without our proximal term",
    ):
        assert needed in text


@pytest.mark.parametrize("case", CASES)
def test_every_contender_of_ours_works_on_every_case(case: str) -> None:
    workload = CASES[case].make(quick=True)
    expected = {name: p.shape for name, p in workload.model.named_parameters()}
    for contender in CONTENDERS:
        if contender.ours:
            prepared = contender.prepare(workload)
            gradient = prepared.step()
            assert {name: g.shape for name, g in gradient.items()} == expected
            assert all(bool(g.isfinite().all()) for g in gradient.values())
            assert prepared.work().gradients > 0


def test_work_is_the_same_every_time() -> None:
    first, second = (CASES["omniglot"].make(quick=True) for _ in range(2))
    assert all(
        torch.equal(a, b)
        for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True)
    )
    assert torch.equal(first.support[0], second.support[0])
    assert not torch.equal(first.support[0], CASES["omniglot"].make(quick=True, seed=7).support[0])
    assert first.shape == CASES["omniglot"].quick
    on_cpu = CASES["omniglot"].make()
    assert (on_cpu.shape.tasks, CASES["omniglot"].full.tasks) == (16, 32)
