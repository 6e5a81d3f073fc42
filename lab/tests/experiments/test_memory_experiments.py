"""What the memory experiments compare is comparable, and their verdicts follow the rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import metanudge as mn
from metanudge.models import TransformerBlock
from metanudge.task import Task
from metanudge.testing.memory import trainable_bytes
from metanudge_lab.experiments import memory, memory_cnn, memory_steps
from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.base import FinishedCell, Result

CPU = torch.device("cpu")


def task(dtype: torch.dtype = torch.float64) -> Task:
    return memory.random_task((6, 8), ways=3, shots=2, queries=2, device=CPU).to(dtype)


def model() -> nn.Module:
    return m.seeded(
        0, lambda: TransformerBlock(ways=3, d_model=8, heads=2, hidden=8, length=6), CPU
    )


def test_the_textbook_maml_is_maml() -> None:
    ours, textbook = model().double(), model().double()
    solver = mn.GradientDescent(lr=memory.RATE, steps=3)
    mn.MetaLearner(
        ours, nn.functional.cross_entropy, lam=m.LAM, solver=solver, estimator=mn.MAML()
    ).backward(task())
    memory.unrolled(textbook, task(), steps=3)
    for one, other in zip(ours.parameters(), textbook.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", m.ESTIMATORS)
def test_every_method_is_measured_on_its_own_meta_gradient(method: str) -> None:
    measured, reference = model().double(), model().double()
    memory.meta_step(method, measured, task(), steps=2)()
    solver = mn.GradientDescent(lr=memory.RATE, steps=2)
    mn.MetaLearner(
        reference,
        nn.functional.cross_entropy,
        lam=m.LAM,
        solver=solver,
        estimator=m.ESTIMATORS[method],
    ).backward(task())
    for one, other in zip(measured.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-7, atol=1e-10)


def test_more_inner_steps_cost_memory_only_where_graphs_are_kept() -> None:
    few, many = ({method: _peak(method, steps) for method in m.ESTIMATORS} for steps in (2, 6))
    assert many[m.MAML] > 2 * few[m.MAML]
    for method in set(m.ESTIMATORS) - {m.MAML}:
        assert many[method] == pytest.approx(few[method], rel=0.01), method
    assert few[memory.m.LOSS] > trainable_bytes(model())


def _peak(method: str, steps: int) -> int:
    return memory.measure_step(method, model(), task(torch.float32), steps=steps, device=CPU)[
        "memory"
    ]


def judged(peaks: dict[str, float]) -> str:
    config = memory_cnn.Config(channels=(4,), shots=(2,), queries=2)
    usual = {
        m.LOSS: 105,
        m.GRADIENT: 105,
        m.FO_MAML: 100,
        m.REPTILE: 100,
        m.MAML: 500,
        m.IMAML: 300,
        memory.STEP: 90,
    }
    measured = [
        FinishedCell(
            {"shots": 2, "channels": 4, "method": method},
            [{"memory": peak, "parameters": 5}],
            0.0,
            0,
        )
        for method, peak in {**usual, **peaks}.items()
    ]
    verdict = memory_cnn.judge(Result("memory-cnn", "quick", config, measured))
    return f"{verdict.status}: {verdict.reason}"


def test_the_verdict_follows_the_rows() -> None:
    assert judged({}).startswith("reproduced")
    assert "But at 4 channels FO-B-MAML is +20% from FO-MAML, 4.0 copies" in judged({m.LOSS: 120})
    assert judged({m.REPTILE: 90}).startswith("partly")
    assert judged({m.MAML: 101}).startswith("partly")
    assert judged({m.LOSS: 1000}).startswith("not")


def test_flat_or_not() -> None:
    def status(ours: tuple[float, float], maml: tuple[float, float]) -> str:
        config = memory_steps.Config(steps=(1, 8), budget=0.0004)
        peaks = {**dict.fromkeys(m.ESTIMATORS, (100.0, 100.0)), m.LOSS: ours, m.MAML: maml}
        measured = [
            FinishedCell(
                {"steps": k, "method": method}, [{"memory": peak, "parameters": 5}], 0.0, 0
            )
            for method, both in peaks.items()
            for k, peak in zip((1, 8), both, strict=True)
        ]
        return memory_steps.judge(Result("memory-steps", "quick", config, measured)).status

    assert status((100, 100.5), (200, 900)) == "reproduced"
    assert status((100, 120), (200, 900)) == "not"
    assert status((100, 100), (200, 200)) == "not"
