"""A head made from the support set: closed forms, hand-written derivatives, both engines."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

import metanudge as mn
from metanudge.linear_fits import centroids
from metanudge.models import MLP, Prototypes
from metanudge.task import Task, TaskBatch
from metanudge.tasks import Labelled, with_support


def _tasks(ways: int, count: int = 3, seed: int = 0) -> TaskBatch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(400, 6, generator=generator, dtype=torch.float64)
    y = torch.arange(400) % 40
    x = x + 2 * torch.randn(40, 6, generator=generator, dtype=torch.float64)[y]
    source = Labelled(x, y, ways=ways, shots=2, queries=3, dtype=torch.float64)
    return source.batch(range(count))


def _model(most: int = 64) -> Prototypes:
    torch.manual_seed(0)
    return Prototypes(MLP(6, 5, hidden=(7,), activation="tanh"), most=most).double()


def _learner(model: nn.Module, **options: object) -> mn.MetaLearner:
    solver = mn.GradientDescent(lr=0.2, steps=3)
    return mn.MetaLearner(model, cross_entropy, lam=0.5, solver=solver, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("ways", [2, 5, 12])
def test_unadapted_it_is_the_nearest_centroid(ways: int) -> None:
    model = _model()
    for task in _tasks(ways):
        (x, y), (query, _) = task.support, task.query
        logits = model(x, y, query)
        h, q = model.features(x), model.features(query)
        near = centroids(h, y, ways)(q)
        scale = model.log_scale.exp()
        assert torch.allclose(logits[:, :ways], scale * near, rtol=0, atol=1e-12)
        assert bool((logits[:, ways:] == -1e9).all())
        assert torch.equal(model(x, y), model(x, y, x))


def test_fixed_is_an_ordinary_network() -> None:
    model = _model()
    nn.init.normal_(model.weight)
    nn.init.normal_(model.bias)
    (x, y), (query, _) = _tasks(5)[0].support, _tasks(5)[0].query
    plain = model.fixed(x, y, 5)
    assert torch.allclose(plain(query), model(x, y, query)[:, :5], rtol=0, atol=1e-12)


def _by_hand(model: Prototypes, tasks: TaskBatch) -> dict[str, Tensor]:
    """MAML's meta-gradient by plain autograd through three written-out steps."""
    theta = dict(model.named_parameters())
    total = torch.zeros((), dtype=torch.float64)
    for task in tasks:
        (x, y), (q, t) = task.support, task.query
        phi = dict(theta)
        for _ in range(3):
            loss = cross_entropy(functional_call(model, phi, (x, y)), y)
            loss = loss + 0.25 * sum((phi[n] - theta[n]).square().sum() for n in theta)
            grads = torch.autograd.grad(loss, list(phi.values()), create_graph=True)
            phi = {n: p - 0.2 * g for (n, p), g in zip(phi.items(), grads, strict=True)}
        total = total + cross_entropy(functional_call(model, phi, (x, y, q)), t) / len(tasks)
    grads = torch.autograd.grad(total, list(theta.values()))
    return dict(zip(theta, grads, strict=True))


def test_the_meta_gradient_of_maml_by_hand() -> None:
    model, tasks = _model(), _tasks(4)
    learner = _learner(model, estimator=mn.MAML(), engine="stacked")
    learner.backward(with_support(tasks))
    wanted = _by_hand(_model(), tasks)
    assert float(wanted["weight"].abs().max()) > 1e-3
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, wanted[name], rtol=0, atol=1e-10), name


def test_engines_agree_on_tasks_of_different_ways() -> None:
    tasks = TaskBatch.of([*_tasks(3, 2), *_tasks(6, 2)])
    found = []
    for engine in ("stacked", "inplace"):
        model = _model()
        _learner(model, engine=engine, estimator=mn.FOBMAML(nu=0.1)).backward(with_support(tasks))
        found.append({n: p.grad for n, p in model.named_parameters()})
    for name, stacked in found[0].items():
        other = found[1][name]
        assert stacked is not None
        assert other is not None
        assert float((stacked - other).abs().max()) <= 1e-10, name


def test_trained_with_five_ways_used_with_forty() -> None:
    model = _model()
    learner = _learner(model)
    optimizer = torch.optim.SGD(learner.parameters(), lr=0.1)
    learner.backward(with_support(_tasks(5)))
    optimizer.step()
    assert bool((model.weight[5:] == 0).all())
    assert bool((model.weight[:5] != 0).any())
    x = torch.randn(80, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x, y = x + 9 * x[:40].repeat(2, 1), torch.arange(40).repeat(2)
    task = Task((x, y), (x, y))
    assert float(learner.evaluate(with_support(TaskBatch.of(task))).mean_accuracy) > 0.9


def test_mappings_reach_the_network_by_name() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 2)

        def forward(self, *, values: Tensor, mask: Tensor) -> Tensor:
            found: Tensor = self.head(values * mask)
            return found

    tasks = TaskBatch.of(
        [
            Task(
                ({"values": t.support[0], "mask": torch.ones_like(t.support[0])}, t.support[1]),
                ({"values": t.query[0], "mask": torch.ones_like(t.query[0])}, t.query[1]),
            )
            for t in _tasks(3)
        ]
    )
    result = _learner(Prototypes(Named()).double()).evaluate(with_support(tasks))
    assert bool(result.loss.isfinite().all())


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="has room for most=4"):
        with_support(_tasks(5), most=4)
    x = torch.zeros(2, 1)
    with pytest.raises(TypeError, match="means of classes"):
        with_support(TaskBatch.of(Task((x, x), (x, x))))
    with pytest.raises(ValueError, match="no linear layer called head"):
        Prototypes(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="most=1 "):
        Prototypes(MLP(2, 2), most=1)
    with pytest.raises(ValueError, match="ways=9 is not from 1 to most=4"):
        _model(4).fixed(*_tasks(3)[0].support, 9)
