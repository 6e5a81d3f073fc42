"""How many solves fit side by side."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress

import pytest
import torch
from torch import nn

import metanudge as mn
from metanudge import engine_choice
from metanudge.engines.room import bytes_per_row, rows_that_fit
from metanudge.objective import Objective
from metanudge.problem import Problem

LOSS = nn.functional.mse_loss


def problem(width: int = 8) -> Problem:
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))
    return Problem(Objective(model, LOSS), 2.0)


def task(support: int, query: int) -> mn.Task:
    return mn.Task(
        (torch.randn(support, 4), torch.randn(support, 1)),
        (torch.randn(query, 4), torch.randn(query, 1)),
    )


def test_what_a_row_keeps_is_counted():
    """An MLP keeps its inputs, its tanh and what the loss compares: 4, 8 and twice 1 numbers of
    four bytes for each example.
    """
    parameters = 8 * 4 * sum(p.numel() for p in problem().parameters.values())
    assert bytes_per_row(problem(), task(5, 10)) == 2 * 4 * 15 * (4 + 8 + 2) + parameters
    assert (
        bytes_per_row(problem(), task(5, 10), graphs=4)
        == 2 * 4 * (5 * 12 + 10) * (4 + 8 + 2) + parameters
    )


def test_counting_changes_nothing():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    before = {n: b.clone() for n, b in model.named_buffers()}
    one = task(5, 10)
    state = torch.get_rng_state()
    bytes_per_row(Problem(Objective(model, LOSS), 2.0), one)
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


def test_what_was_counted_is_freed():
    """Also of functions that keep their own result, and where the model fails half way."""

    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("broken")

    ends = nn.Sequential(nn.Linear(8, 1)), Broken()
    for end in ends:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Softmax(-1), end)
        one = task(5, 10)
        kept = [weakref.ref(t) for t in (one.support[0], one.query[0], model[0].weight)]
        with suppress(RuntimeError):
            bytes_per_row(Problem(Objective(model, LOSS), 2.0), one)
        del model, one, end
        gc.collect()
        assert [ref() for ref in kept] == [None, None, None]


@pytest.mark.parametrize(
    "estimator",
    [mn.MAML(), mn.IMAML(), mn.FOBMAML(stencil="tangent")],
    ids=lambda estimator: type(estimator).__name__,
)
def test_second_derivatives_on_a_cpu_take_a_few_tasks_at_a_time(estimator, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    tasks = mn.TaskBatch.of([task(5, 10) for _ in range(6)])
    whole = mn.MetaLearner(model, LOSS, estimator=estimator, engine="stacked")
    want = whole.meta_gradient(tasks)[0]
    assert whole.choose_engine(tasks)[0].chunk is None, "these are small"
    per_row = bytes_per_row(
        whole.problem(), tasks[0], graphs=5 if isinstance(estimator, mn.MAML) else 1
    )
    monkeypatch.setattr(engine_choice, "BYTES_AT_ONCE_ON_CPU", 3 * per_row)
    few = mn.MetaLearner(model, LOSS, estimator=estimator, engine="stacked")
    assert few.choose_engine(tasks)[0].chunk == rows_that_fit(per_row, 3 * per_row) == 2
    for name, leaf in few.meta_gradient(tasks)[0].items():
        assert torch.allclose(leaf, want[name], atol=1e-6)
    assert mn.MetaLearner(model, LOSS, engine="stacked").choose_engine(tasks)[0].chunk is None, (
        "first derivatives need no such care"
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_little_memory_means_small_chunks_and_the_same_result(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).cuda()
    tasks = mn.TaskBatch.of([task(5, 10) for _ in range(6)]).to("cuda")
    paper = mn.FOBMAML(nu=0.1)
    whole = mn.MetaLearner(model, LOSS, engine="stacked", estimator=paper)
    want = whole.meta_gradient(tasks)[0]
    assert whole.choose_engine(tasks)[0].chunk is None
    per_row = bytes_per_row(whole.problem(), tasks[0])
    monkeypatch.setattr(engine_choice, "free_memory", lambda device: 5 * per_row)
    small = mn.MetaLearner(model, LOSS, engine="stacked", estimator=paper)
    assert small.choose_engine(tasks)[0].chunk == rows_that_fit(per_row, 5 * per_row) == 3
    for name, leaf in small.meta_gradient(tasks)[0].items():
        assert torch.allclose(leaf, want[name], atol=1e-6)


@pytest.mark.parametrize(
    "estimator",
    [mn.FOBMAML(), mn.MAML(), mn.IMAML()],
    ids=lambda estimator: type(estimator).__name__,
)
def test_what_is_wrong_with_the_data_is_told_all_the_same(estimator):
    """Looking for room runs the model before anything is checked."""
    learner = mn.MetaLearner(nn.Linear(4, 1), LOSS, estimator=estimator, engine="stacked")
    x, y = torch.zeros(2, 5, 6), torch.zeros(2, 5, 1)
    with pytest.raises(
        ValueError, match=r"failed on the support data of a task .* Check that the tasks' shapes"
    ):
        learner.backward(mn.TaskBatch((x, y), (x, y)))
    with pytest.raises(ValueError, match="support data lie on meta"):
        learner.backward(mn.TaskBatch((x[..., :4].to("meta"), y), (x[..., :4], y)))
