"""`learner.state_dict()`: what a learner needs to go on as if nothing had happened."""

from __future__ import annotations

import io

import pytest
import torch

import metanudge as mn
from problems import Setup, mlp


def learner_for(setup: Setup) -> mn.MetaLearner:
    return mn.MetaLearner(
        setup.model, setup.loss, solver=mn.GradientDescent(lr=0.1, steps=2, batch_size=2)
    )


def saved(learner: mn.MetaLearner) -> dict[str, torch.Tensor]:
    file = io.BytesIO()
    torch.save(learner.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("calls", [0, 3])
def test_a_loaded_learner_goes_on_to_the_same_bits(calls: int):
    """Minibatches follow the call counter, ν what was found before."""
    first, second = learner_for(mlp(tasks=2)), learner_for(mlp(tasks=2, seed=1))
    tasks = mlp(tasks=2).tasks
    for _ in range(calls):
        first.backward(tasks)
    second.load_state_dict(saved(first))
    assert second.calls == calls
    assert second.tuner.state_dict() == first.tuner.state_dict()
    (g, stats), (other, told) = first.meta_gradient(tasks), second.meta_gradient(tasks)
    assert all(torch.equal(g[name], other[name]) for name in g)
    assert stats.nu == told.nu


def test_states_of_version_0_1_load():
    """They hold the model's tensors and log λ alone."""
    first, second = (learner_for(mlp(tasks=2, seed=seed)) for seed in (0, 1))
    old = {name: leaf for name, leaf in first.state_dict().items() if name != "_extra_state"}
    wrapped = torch.nn.ModuleDict({"learner": second})
    for target, prefix in ((second, ""), (wrapped, "learner.")):
        second.backward(mlp(tasks=2).tasks)
        calls = second.calls
        target.load_state_dict({prefix + name: leaf for name, leaf in old.items()})
        assert second.calls == calls
        assert all(torch.equal(second.state_dict()[name], leaf) for name, leaf in old.items())
