"""Points kept in the host's memory while a CUDA device goes on: bit for bit what they were."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import metanudge as mn
from metanudge.solvers import trajectory
from problems import Setup, classification_tasks, mlp, seeded

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SOLVERS = {
    "GD": mn.GradientDescent(lr=0.1, steps=5),
    "Nesterov": mn.Nesterov(lr=0.1, steps=5),
    "Adam": mn.TorchOptimizer(torch.optim.Adam, steps=5, options={"lr": 0.01}),
}


def gradient(setup: Setup, where: Any, solver: str, truncate: int | None) -> dict[str, Tensor]:
    estimator = mn.MAML(truncate, products="difference", epsilon=1e-3, trajectory=where)
    learner = mn.MetaLearner(
        setup.model, setup.loss, estimator=estimator, solver=SOLVERS[solver], engine="inplace"
    )
    return learner.meta_gradient(setup.tasks)[0]


def assert_equal(setup: Setup, solver: str, truncate: int | None) -> None:
    found, expected = (gradient(setup, where, solver, truncate) for where in ("host", "device"))
    assert all(torch.equal(found[n], leaf) for n, leaf in expected.items())


class Late(trajectory.Host):
    """A host whose copies happen only when somebody waits for them, as a stream of its own may."""

    under_way: list[Any] = []  # noqa: RUF012
    waited = 0

    def wait(self) -> None:
        for source, copy in self.under_way:
            leaf = source()
            assert leaf is not None, "its memory was given to others before it was copied"
            copy.copy_(leaf)
        Late.waited += len(self.under_way)
        self.under_way.clear()
        super().wait()


def late(source: Any, leaf: Tensor) -> Tensor:
    copy = torch.full_like(leaf, torch.nan)
    Late.under_way.append((source, copy))
    return copy


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("truncate", [None, 1, 3])
def test_whoever_uses_a_point_waits_for_it(
    solver: str, truncate: int | None, monkeypatch: pytest.MonkeyPatch
):
    """Copies from the device need what they copy to be there still; the host's memory stays."""
    monkeypatch.setattr(trajectory, "Host", Late)
    monkeypatch.setattr(trajectory, "to_host", lambda leaf: late(weakref.ref(leaf), leaf))
    monkeypatch.setattr(trajectory, "to_device", lambda leaf, _: late(lambda: leaf, leaf))
    monkeypatch.setattr(Late, "waited", 0)
    setup = mlp(tasks=2)
    assert_equal(setup, solver, truncate)
    assert Late.under_way == []
    parts = {"GD": 1, "Nesterov": 2, "Adam": 4}[solver]  # d, what is remembered, and the gradient
    points = 2 * len(setup.tasks) * (5 if truncate is None else truncate)
    assert Late.waited == points * parts * len(list(setup.model.parameters()))


@CUDA
@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("truncate", [None, 3])
def test_on_a_device_the_bits_are_the_same(solver: str, truncate: int | None):
    """Points of 64 MB, so that copies take longer than the steps between them."""
    model = seeded(0, lambda: nn.Sequential(nn.Linear(4096, 4096), nn.Tanh(), nn.Linear(4096, 3)))
    tasks = classification_tasks((4096,), 3, 2, 6, 6, 0).to(torch.float32)
    setup = Setup(model.float().cuda(), F.cross_entropy, tasks.to("cuda"))
    for _ in range(3):
        assert_equal(setup, solver, truncate)
