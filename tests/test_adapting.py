"""Adapting costs what adapts: what an adapted model shares with the learner's, and what comes
back.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import metanudge as mn
from metanudge.testing.memory import Allocations, trainable_bytes
from problems import Setup, classification_tasks, mlp, seeded


class Based(nn.Module):
    """A large frozen base with large constants and a small adapter."""

    def __init__(self, width: int = 256, writes: bool = False) -> None:
        super().__init__()
        self.base = nn.Linear(4, width).requires_grad_(False)
        self.mixing = nn.Linear(width, width).requires_grad_(False)
        self.adapter = nn.Linear(4, 3)
        self.head = nn.Linear(width, 3).requires_grad_(False)
        self.norm = nn.BatchNorm1d(3)
        self.writes = writes
        self.register_buffer("mask", torch.ones(width, width, dtype=torch.bool))
        self.register_buffer("table", torch.zeros(width, width), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            self.table.data.add_(1.0)
        hidden = self.mixing(torch.tanh(self.base(x))) + self.table[0]
        return self.norm(self.head(hidden) + self.adapter(x))


def based(writes: bool = False) -> Setup:
    model = seeded(0, lambda: Based(writes=writes))
    return Setup(model, F.cross_entropy, classification_tasks((4,), 3, 2, 5, 5, seed=0))


def bytes_of_its_own(model: nn.Module, of: nn.Module) -> int:
    """Bytes of a model's tensors that are not those of another."""
    theirs = {t.untyped_storage().data_ptr() for t in (*of.parameters(), *of.buffers())}
    own = {t.untyped_storage().data_ptr(): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.untyped_storage().nbytes() for key, t in own.items() if key not in theirs)


def test_an_adapted_model_shares_what_does_not_change():
    setup = based()
    learner = mn.MetaLearner(setup.model, setup.loss)
    adapted = learner.adapt(setup.tasks[0].support)
    statistics = sum(b.nbytes for b in setup.model.norm.buffers())
    assert bytes_of_its_own(adapted, setup.model) == trainable_bytes(setup.model) + statistics
    before = copy.deepcopy(setup.model.state_dict())
    adapted.train()(setup.tasks[0].query[0])  # writes its own statistics
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.zero_()
    after = setup.model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("writes", [False, True])
def test_an_adapted_model_is_that_of_a_deep_copy(writes: bool):
    """By gradient descent on a deep copy, by hand; a table that forward passes write begins each
    one as it was, and is the adapted model's own.
    """
    setup = based(writes)
    learner = mn.MetaLearner(
        setup.model, setup.loss, lam=2.0, solver=mn.GradientDescent(lr=0.1, steps=3)
    )
    x, y = setup.tasks[0].support
    expected = copy.deepcopy(setup.model)
    theta = {n: p.detach().clone() for n, p in expected.named_parameters()}
    for _ in range(3):
        expected.table.zero_()
        expected.zero_grad()
        F.cross_entropy(expected(x), y).backward()
        with torch.no_grad():
            for name, p in expected.named_parameters():
                if p.grad is not None:
                    p -= 0.1 * (p.grad + 2.0 * (p - theta[name]))
    for _ in range(2):
        adapted = learner.adapt((x, y))
        for name, p in adapted.named_parameters():
            # rounding of three steps on numbers of order one
            assert torch.allclose(p, expected.get_parameter(name), rtol=0, atol=1e-14)
        assert (adapted.table is setup.model.table) == (not writes)
        adapted(x)
        assert not setup.model.table.any()


def test_memory_of_adapting_is_that_of_what_adapts():
    """The peak, activations and all: the adapter is large beside them here."""
    model = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Linear(512, 3))
    model[2].requires_grad_(False)  # 1 MiB of 1.14
    x, y = torch.randn(2, 64), torch.tensor([0, 1])
    learner = mn.MetaLearner(model, F.cross_entropy)
    adapters = trainable_bytes(model)
    activations = 6 * x.shape[0] * 512 * 4
    for use in ("adapt", "adapted_state"):
        with Allocations() as seen:
            result = getattr(learner, use)((x, y))
        assert seen.live <= 1.01 * adapters
        # θ, displacement and the gradient of the largest part; the copy, where there is one
        assert seen.peak <= (3 if use == "adapted_state" else 4) * adapters + activations
        del result


def test_within_adapted_the_model_itself_is_adapted_and_then_as_it_was():
    setup = based()
    learner = mn.MetaLearner(setup.model, setup.loss)
    task, model = setup.tasks[0], setup.model
    copied, state = learner.adapt(task.support), learner.adapted_state(task.support)
    sum(p.sum() for p in model.parameters() if p.requires_grad).backward()
    before = copy.deepcopy(model.state_dict())
    gradients = {n: p.grad for n, p in model.named_parameters()}
    for fails in (False, True):
        try:
            with learner.adapted(task.support) as inside:
                assert inside is model
                found = dict(inside.named_parameters())
                for name, p in copied.named_parameters():
                    assert torch.equal(found[name], p)
                assert set(state) == {n for n, p in found.items() if p.requires_grad}
                assert all(torch.equal(found[name], value) for name, value in state.items())
                F.cross_entropy(inside(task.query[0]), task.query[1]).backward()
                inside.eval()
                with pytest.raises(RuntimeError, match="Leave the block first"):
                    learner.backward(setup.tasks)
                if fails:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            assert fails
        after = model.state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        assert all(p.grad is gradients[n] for n, p in model.named_parameters())
        assert all(module.training for module in model.modules())
    learner.backward(setup.tasks)


def test_many_users_states_serve_one_model():
    setup = mlp(tasks=3)
    learner = mn.MetaLearner(setup.model, setup.loss, adapt="*bias")
    states = [learner.adapted_state(task.support) for task in setup.tasks]
    serving = copy.deepcopy(setup.model)
    for task, state in zip(setup.tasks, states, strict=True):
        missing, unexpected = serving.load_state_dict(state, strict=False)
        assert not unexpected
        assert set(missing) == {n for n, _ in serving.named_parameters() if n not in state}
        assert torch.equal(serving(task.query[0]), learner.adapt(task.support)(task.query[0]))
