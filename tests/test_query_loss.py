"""A loss of the query set's own, and metrics, against plain autograd in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import metanudge as mn

LR, STEPS, LAM = 0.1, 3, 0.7


def support_loss(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def query_loss(output: Tensor, target: Tensor) -> Tensor:
    return torch.cosh(output - 2 * target).mean()


def through_the_model(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return query_loss(model(batch[0]), batch[1])


def mae(output: Tensor, target: Tensor) -> float:
    return float((output - target).abs().mean().detach())


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def tasks() -> mn.TaskBatch:
    g = torch.Generator().manual_seed(1)
    x, z = (torch.randn(2, 5, 3, generator=g, dtype=torch.float64) for _ in range(2))
    return mn.TaskBatch(support=(x, x[..., :1] ** 2), query=(z, z[..., :1] ** 2))


def by_hand(
    model: nn.Module,
    batch: mn.TaskBatch,
    *,
    second: bool,
    offset: float = 0.0,
    nudge: str = "loss",
):
    """Mean of d f(φ_K)/dθ, written with autograd alone; with an offset the mean of φ_K, nudged."""
    theta = {n: p.detach().requires_grad_() for n, p in model.named_parameters()}
    gradients = {n: torch.zeros_like(p) for n, p in theta.items()}
    ends = {n: torch.zeros_like(p) for n, p in theta.items()}

    def value(phi, data, loss):
        return loss(functional_call(model, phi, (data[0],)), data[1])

    for task in batch:
        force = by_hand(model, mn.TaskBatch.of(task), second=False) if offset else {}
        phi = dict(theta)
        for _ in range(STEPS):
            inner = value(phi, task.support, support_loss)
            if offset and nudge == "loss":
                inner = inner + offset * value(phi, task.query, query_loss)
            elif offset:
                inner = inner + offset * sum((force[n] * p).sum() for n, p in phi.items())
            inner = inner + LAM / 2 * sum(((phi[n] - theta[n]) ** 2).sum() for n in phi)
            g = torch.autograd.grad(inner, list(phi.values()), create_graph=second)
            phi = {n: p - LR * leaf for (n, p), leaf in zip(phi.items(), g, strict=True)}
        if not second:
            phi = {n: p.detach().requires_grad_() for n, p in phi.items()}
        by = theta if second else phi
        g = torch.autograd.grad(value(phi, task.query, query_loss), list(by.values()))
        for (n, p), leaf in zip(phi.items(), g, strict=True):
            gradients[n] += leaf / len(batch)
            ends[n] += p.detach() / len(batch)
    return ends if offset else gradients


def learner(estimator: Any, engine: str, loss=query_loss) -> mn.MetaLearner:
    return mn.MetaLearner(
        network(),
        support_loss,
        query_loss=loss,
        lam=LAM,
        solver=mn.GradientDescent(lr=LR, steps=STEPS),
        estimator=estimator,
        engine=engine,
        metrics={"mae": mae} if loss is query_loss else None,
    )


ENGINES = pytest.mark.parametrize("engine", ["stacked", "inplace"])
LOSSES = pytest.mark.parametrize("loss", [query_loss, through_the_model])


def close(found, wanted) -> None:
    assert found.keys() == wanted.keys()
    for name, leaf in wanted.items():
        # sums of a few hundred terms of order 1
        torch.testing.assert_close(found[name], leaf, rtol=1e-10, atol=1e-12)


@LOSSES
def test_maml_differentiates_the_query_loss_through_steps_of_the_support_loss(loss):
    g, _ = learner(mn.MAML(), "stacked", loss).meta_gradient(tasks())
    close(g, by_hand(network(), tasks(), second=True))


@LOSSES
@ENGINES
def test_fomaml_takes_the_query_loss_at_the_end(engine, loss):
    g, _ = learner(mn.FOMAML(), engine, loss).meta_gradient(tasks())
    close(g, by_hand(network(), tasks(), second=False))


@LOSSES
@ENGINES
@pytest.mark.parametrize("nudge", ["loss", "gradient"])
def test_the_nudge_is_made_of_the_query_loss(engine, loss, nudge):
    """λ(φ₋ − φ₊)/2ν of nudged steps by plain autograd."""
    nu = 0.1
    g, _ = learner(mn.FOBMAML(nu=nu, nudge=nudge), engine, loss).meta_gradient(tasks())
    plus, minus = (
        by_hand(network(), tasks(), second=False, offset=s * nu, nudge=nudge) for s in (1, -1)
    )
    close(g, {n: LAM * (minus[n] - plus[n]) / (2 * nu) for n in plus})


@ENGINES
def test_the_statistics_have_the_query_loss_and_the_metrics(engine):
    one, batch = learner(mn.FOMAML(), engine), tasks()
    _, stats = one.meta_gradient(batch)
    result = one.evaluate(batch)
    models = [one.adapt(task.support) for task in batch]
    losses, errors = (
        [float(f(m(t.query[0]).detach(), t.query[1])) for m, t in zip(models, batch, strict=True)]
        for f in (query_loss, mae)
    )
    assert stats.query_loss == pytest.approx(sum(losses) / 2, rel=1e-12)
    assert stats.extra == {"mae": pytest.approx(sum(errors) / 2, rel=1e-12)}
    assert result.loss.tolist() == pytest.approx(losses, rel=1e-12)
    assert result.extra["mae"].tolist() == pytest.approx(errors, rel=1e-12)
    before = [mae(one.model(t.query[0]), t.query[1]) for t in batch]
    assert result.extra_before["mae"].tolist() == pytest.approx(before, rel=1e-12)
    assert "mae" in str(stats)
    assert "mae" in str(result)


def test_without_a_query_loss_metrics_leave_the_fast_path_alone():
    one = mn.MetaLearner(network(), support_loss, metrics={"mae": mae})
    stats, own = one.backward(tasks()), one.evaluate(tasks()).extra["mae"]
    assert stats.path.startswith("native layers")
    errors = [mae(one.adapt(t.support)(t.query[0]), t.query[1]) for t in tasks()]
    assert own.tolist() == pytest.approx(errors, rel=1e-12)


def test_a_query_loss_leaves_the_fast_path_and_says_so():
    stats = learner(mn.FOMAML(), "stacked").backward(tasks())
    assert "the query set has a loss of its own" in stats.path


def test_an_exchanged_query_loss_counts():
    one = learner(mn.FOMAML(), "stacked")
    first = one.meta_gradient(tasks())[1].query_loss
    one.query_loss = support_loss
    assert one.meta_gradient(tasks())[1].query_loss != first


def fails(output: Tensor, target: Tensor) -> float:
    raise KeyError("labels")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"metrics": {"vector": lambda o, t: o - t}}, "metric 'vector' must return a number"),
        ({"metrics": {"text": lambda o, t: "good"}}, "metric 'text' must return a number"),
        ({"metrics": {"f1": fails}}, "metric 'f1' failed on one task's output .* KeyError"),
        ({"query_loss": lambda o, t: (o - t) ** 2}, "must be a scalar tensor"),
        (
            {"query_loss": through_the_model, "metrics": {"mae": mae}},
            "functions of .output, target., which",
        ),
        (
            {"query_loss": lambda o, t: (o.mean(), {"mae": 1.0}), "metrics": {"mae": mae}},
            "name of a number that the loss reports",
        ),
    ],
)
@ENGINES
def test_what_is_wrong_is_named_and_nothing_is_written(given, message, engine):
    one = mn.MetaLearner(network(), support_loss, engine=engine, **given)
    with pytest.raises(ValueError, match=message):
        one.backward(tasks())
    assert all(p.grad is None for p in one.parameters())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"metrics": [mae]}, "must be a mapping from names"),
        ({"metrics": {"mae": 3}}, r"metrics\['mae'\] is int"),
        ({"metrics": {3: mae}}, r"metrics\[3\]"),
        ({"query_loss": "mse"}, "query_loss must be callable, got str"),
    ],
)
def test_what_is_no_metric_or_loss_is_refused_at_once(given, message):
    with pytest.raises(TypeError, match=message):
        mn.MetaLearner(network(), support_loss, **given)
