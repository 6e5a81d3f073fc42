"""Forms of losses, batches and outputs; what is refused because it would be wrong in silence."""

from __future__ import annotations

import math
from collections import UserDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import metanudge as mn
from metanudge.objective import Objective, classification_accuracy
from problems import mlp, relative_error

ON_ENGINES = pytest.mark.parametrize("engine", ["stacked", "inplace"])


class Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output / self.temperature, target)


class TemperedModel(Tempered):
    def forward(self, model: nn.Module, batch: Any) -> Tensor:
        return super().forward(model(batch[0]), batch[1])


@ON_ENGINES
@pytest.mark.parametrize("kind", [Tempered, TemperedModel])
def test_a_loss_with_parameters_that_would_not_be_learned_is_refused(kind: type, engine: str):
    setup, loss = mlp(tasks=2), kind()
    with pytest.raises(ValueError, match=r"temperature.*never be learned.*part of the model"):
        mn.MetaLearner(setup.model, loss, engine=engine)
    loss.requires_grad_(False)
    learner = mn.MetaLearner(setup.model, loss, engine=engine)
    found, _ = learner.meta_gradient(setup.tasks)
    expected, _ = mn.MetaLearner(
        setup.model, lambda output, target: F.cross_entropy(output / 1.5, target), engine=engine
    ).meta_gradient(setup.tasks)
    assert relative_error(found, expected) < 1e-14  # the same operations
    assert loss.temperature.grad is None


@ON_ENGINES
def test_a_loss_with_a_buffer_works(engine: str):
    setup = mlp(tasks=2)
    classes = setup.model(setup.tasks[0].query[0]).shape[1]
    weight = torch.linspace(1.0, 2.0, classes, dtype=torch.float64)
    losses = (nn.CrossEntropyLoss(weight=weight), lambda o, t: F.cross_entropy(o, t, weight=weight))
    one, other = (
        mn.MetaLearner(setup.model, loss, engine=engine).meta_gradient(setup.tasks)[0]
        for loss in losses
    )
    assert relative_error(one, other) < 1e-14  # the same operations


@ON_ENGINES
def test_a_meta_gradient_of_zero_is_told_once(engine: str):
    setup = mlp(tasks=2)
    loss = lambda output, target: 0.0 * output.sum()  # noqa: E731
    learner = mn.MetaLearner(setup.model, loss, engine=engine)
    with pytest.warns(mn.ZeroGradientWarning, match="exactly zero in all entries"):
        learner.backward(setup.tasks)
    learner.backward(setup.tasks)


class Model(nn.Module):
    """Speaks as models of Hugging Face do."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.net(x)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return SimpleNamespace(loss=loss, logits=logits)


def as_mapping(tasks: mn.TaskBatch) -> list[mn.Task]:
    return [
        mn.Task(*(UserDict(x=x, labels=y) for x, y in (task.support, task.query))) for task in tasks
    ]


@ON_ENGINES
def test_every_way_to_say_the_same(engine: str):
    setup = mlp(tasks=2)
    plain = mn.MetaLearner(setup.model, F.cross_entropy, engine=engine)
    expected, stats = plain.meta_gradient(setup.tasks)
    model, mappings = Model(setup.model), as_mapping(setup.tasks)
    inputs = [
        mn.Task(*(({"x": x}, y) for x, y in (task.support, task.query))) for task in setup.tasks
    ]
    accuracies = []
    for loss, tasks in (
        (None, setup.tasks),
        (None, inputs),
        (None, mappings),
        (F.cross_entropy, setup.tasks),
        (F.cross_entropy, inputs),
        (F.cross_entropy, mappings),
        (lambda model, batch: model(**batch), mappings),
        (lambda model, batch: (model(**batch).loss, {}), mappings),  # says nothing of accuracy
    ):
        learner = mn.MetaLearner(model, loss, engine=engine)
        found, told = learner.meta_gradient(tasks)
        renamed = {name.removeprefix("net."): leaf for name, leaf in found.items()}
        # the same operations, by another kernel where the plain model is a chain of layers
        assert relative_error(renamed, expected) < 1e-12
        assert told.query_loss == pytest.approx(stats.query_loss, rel=1e-12)
        accuracies.append(told.query_accuracy)
    assert accuracies[:-1] == pytest.approx([stats.query_accuracy] * 7, rel=1e-12)
    assert math.isnan(accuracies[-1])


@ON_ENGINES
def test_what_a_loss_reports_besides_comes_with_the_statistics(engine: str):
    setup = mlp(tasks=3)

    def loss(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Any]]:
        value = F.cross_entropy(output, target)
        return value, {"double": 2 * value, "seven": 7, "logits": output}

    estimator = mn.FOMAML()
    learner = mn.MetaLearner(setup.model, loss, engine=engine, estimator=estimator)
    found, stats = learner.meta_gradient(setup.tasks)
    plain = mn.MetaLearner(setup.model, F.cross_entropy, engine=engine, estimator=estimator)
    assert relative_error(found, plain.meta_gradient(setup.tasks)[0]) < 1e-12
    assert stats.extra == {
        "double": pytest.approx(2 * stats.query_loss),
        "seven": pytest.approx(7.0),
    }


def test_what_is_no_loss_is_told():
    setup = mlp(tasks=2)
    no_labels = [mn.Task({"x": t.support[0]}, {"x": t.query[0]}) for t in setup.tasks]
    with pytest.raises(ValueError, match=r"got NoneType.*'labels' in the batch|'labels'"):
        mn.MetaLearner(Model(setup.model), engine="inplace").backward(no_labels)
    learner = mn.MetaLearner(
        Model(setup.model), lambda out, y: F.cross_entropy(out.logits, y), engine="inplace"
    )
    with pytest.raises(ValueError, match=r"gets the logits.*loss\(model, batch\)"):
        learner.backward(setup.tasks)
    with pytest.raises(TypeError, match=r"\(inputs, targets\), or mappings with 'labels'"):
        mn.MetaLearner(setup.model, F.cross_entropy, engine="inplace").backward(no_labels)


def test_accuracy_by_hand():
    logits = torch.tensor([[[0.0, 1.0, 2.0], [3.0, 1.0, 2.0]], [[0.0, 9.0, 2.0], [0.0, 1.0, 2.0]]])
    labels = torch.tensor([[2, 1], [1, -100]])
    assert float(classification_accuracy(logits, labels)) == pytest.approx(2 / 3)
    # the first position's output against the second's label, which is known in one sequence
    shifted = classification_accuracy(logits, torch.tensor([[0, 2], [1, -100]]), shift=True)
    assert float(shifted) == 1.0
    assert classification_accuracy(torch.zeros(2, 3, 3), torch.zeros(2, 3).long()) is None
    assert classification_accuracy(logits, labels.double()) is None


def test_which_models_predict_the_next_token():
    class TinyForCausalLM(nn.Linear):
        pass

    class TinyForConditionalGeneration(nn.Linear):
        config = SimpleNamespace(is_encoder_decoder=True)

    for model, expected in (
        (TinyForCausalLM(1, 1), True),
        (nn.Sequential(TinyForCausalLM(1, 1)), True),
        (TinyForConditionalGeneration(1, 1), False),
        (nn.Linear(1, 1), False),
    ):
        assert Objective(model, F.cross_entropy)._predicts_the_next == expected
