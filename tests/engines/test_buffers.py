"""What a forward pass may do to buffers, and what keeping them costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import metanudge as mn
from metanudge.engines.undisturbed import Guard
from problems import Setup, classification_tasks, relative_error, seeded

LARGE = 2**16


class Counting(nn.Module):
    """Features times a factor that depends on a large buffer, which each forward pass changes."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(LARGE, dtype=torch.int32))
        self.register_buffer("table", torch.zeros(LARGE), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "in place":
            self.seen += 1
        elif self.how == "data":
            self.seen.data.add_(1)
        elif self.how == "assigned":
            self.seen = self.seen + 1
        elif self.how == "table":
            self.table.data.add_(1.0)
        elif self.how == "slice":
            self.seen[-1:].add_(1)
        factor = 1 + 0.1 * (self.seen[-1] + self.table[-1]).to(x.dtype)
        return factor * self.linear(x)


def setup_for(how: str) -> Setup:
    model = seeded(0, lambda: Counting(how))
    return Setup(model, F.cross_entropy, classification_tasks((4,), 3, 2, 5, 5, seed=0))


@pytest.mark.parametrize("how", ["in place", "data", "assigned", "table", "slice"])
def test_a_large_buffer_that_is_written_is_put_back_after_every_evaluation(how: str):
    """Each evaluation sees the buffer as it was, so that the gradient is that of a model which adds
    1 in every forward pass and forgets it.
    """
    setup, still = setup_for(how), setup_for("not at all")
    (still.model.table if how == "table" else still.model.seen).add_(1)
    learner = mn.MetaLearner(setup.model, setup.loss, engine="inplace")
    expected, _ = mn.MetaLearner(still.model, setup.loss, engine="inplace").meta_gradient(
        setup.tasks
    )
    tensor = setup.model.seen
    for _ in range(2):
        found, _ = learner.meta_gradient(setup.tasks)
        # the same operations in the same order
        assert relative_error(found, expected) < 1e-14
        assert setup.model.seen is tensor
        assert not tensor.any()
        assert not setup.model.table.any()


def test_a_large_constant_is_copied_once(monkeypatch: pytest.MonkeyPatch):
    setup = setup_for("not at all")
    learner = mn.MetaLearner(setup.model, setup.loss, engine="inplace")
    learner.backward(setup.tasks)
    held = [buffer.value for buffer in Guard(learner.problem()).buffers.all]
    assert held == [None, None]
    with monkeypatch.context() as patch:
        copies: list[int] = []
        clone = Tensor.clone

        def counted(tensor: Tensor, **options: Any) -> Tensor:
            copies.append(tensor.numel())
            return clone(tensor, **options)

        patch.setattr(Tensor, "clone", counted)
        learner.backward(setup.tasks)
    assert max(copies) < LARGE


def test_a_constant_that_is_written_after_all_is_told():
    setup = setup_for("not at all")
    learner = mn.MetaLearner(setup.model, setup.loss, engine="inplace")
    learner.backward(setup.tasks)
    setup.model.how = "in place"
    with pytest.raises(RuntimeError, match=r"written to the buffer 'seen' of Counting in place"):
        learner.backward(setup.tasks)
    setup.model.seen.zero_()
    learner.backward(setup.tasks)
    assert not setup.model.seen.any()


def test_statistics_are_always_put_back():
    """BatchNorm's kernels leave no trace in the version counter, whatever their size."""
    features = LARGE // 4
    model = nn.Sequential(nn.Linear(2, features), nn.BatchNorm1d(features), nn.Linear(features, 2))
    x, y = torch.randn(1, 4, 2), torch.randint(0, 2, (1, 4))
    learner = mn.MetaLearner(model, F.cross_entropy, engine="inplace")
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    learner.backward(mn.TaskBatch((x, y), (x, y)))
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_large_buffers_count_where_every_solve_needs_its_own():
    setup = setup_for("not at all")
    learner = mn.MetaLearner(setup.model, setup.loss)
    assert learner.choose_engine(setup.tasks)[0].name == "inplace"
    setup.model.eval()
    assert learner.choose_engine(setup.tasks)[0].name == "stacked"
