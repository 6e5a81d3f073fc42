"""The learners of the experiment on intents, and how their settings are chosen: the inner rate
before training, the meta-learning rate and how long to train on the way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

import metanudge as mn
from metanudge.estimators import Estimator
from metanudge.models import Prototypes
from metanudge.task import TaskBatch
from metanudge.tasks import Episodes, with_support
from metanudge.tasks.episodes import Split
from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.base import Row

LAM, LENGTH, SHARPNESS = 0.1, 6.0, 5.0  # λ; of features; of the prototypes' logits at the start
_LAST = ("head.", "weight", "bias")
LEARNED, PROTOTYPES = "MAML, learned rates", "prototypes, "


@dataclass(frozen=True)
class Method:
    """A learner: how it differentiates, its last layer, and whether inner rates are learned."""

    estimator: Estimator
    prototypes: bool = False
    learn_lr: mn.InnerRates | None = None


METHODS: dict[str, Method] = {
    m.LOSS: Method(mn.FOBMAML()),
    m.GRADIENT: Method(mn.FOBMAML(nudge="gradient")),
    m.FO_MAML: Method(mn.FOMAML()),
    m.MAML: Method(mn.MAML()),
    LEARNED: Method(mn.MAML(), learn_lr=mn.InnerRates("step")),
    PROTOTYPES + m.LOSS: Method(mn.FOBMAML(), prototypes=True),
    PROTOTYPES + m.MAML: Method(mn.MAML(), prototypes=True),
}

LORA_METHODS = {
    PROTOTYPES + m.LOSS: METHODS[PROTOTYPES + m.LOSS],
    PROTOTYPES + m.FO_MAML: Method(mn.FOMAML(), prototypes=True),
}


class Mapped(nn.Module):
    """Features x as x + U V x, of one length; U starts at 0.

    Args:
        axes: V at the start, `(rank, width)`.
    """

    def __init__(self, axes: Tensor) -> None:
        super().__init__()
        rank, width = axes.shape
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)
        self.down.weight.data.copy_(axes)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Features `(n, width)`."""
        return LENGTH * normalize(x + self.up(self.down(x)), dim=-1)


class Classifier(nn.Module):
    """Features, a learned factor, and a linear layer that starts at 0."""

    def __init__(self, features: nn.Module, width: int, ways: int) -> None:
        super().__init__()
        self.features = features
        self.log_gain = nn.Parameter(torch.zeros(()))
        self.head = nn.Linear(width, ways)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Logits `(n, ways)`."""
        logits: Tensor = self.head(self.log_gain.exp() * self.features(x))
        return logits


def with_prototypes(features: nn.Module, width: int, ways: int) -> Prototypes:
    """Features with a last layer from the support set, as sharp as it is for a network that was
    trained.
    """
    model = Prototypes(features, width, most=ways)
    nn.init.constant_(model.log_scale, math.log(SHARPNESS / LENGTH**2))
    return model


@dataclass(frozen=True)
class Plan:
    """What is tried.

    Attributes:
        inner_rates: at the start; the one with the lowest validation loss is taken.
        meta_rates: of Adam, each in a training of its own; what scales the logits learns ten times
            as fast.
        looks: meta-steps after which validation tasks are looked at.
        tasks: a meta-step.
        val_tasks, test_tasks: how many.
        at_once: of those, side by side.
    """

    inner_rates: tuple[float, ...]
    meta_rates: tuple[float, ...]
    looks: tuple[int, ...]
    tasks: int
    val_tasks: int
    test_tasks: int
    at_once: int


@dataclass(frozen=True)
class Trained:
    """A learner with its best settings, and what was tried."""

    learner: mn.MetaLearner
    prototypes: bool
    at_once: int
    tried: list[Row]
    best: Row

    @property
    def chosen(self) -> Row:
        """The settings, as they stand beside what was tested."""
        return {"validation": self.best["accuracy"]} | {
            key: self.best[key] for key in ("inner", "rate", "step")
        }

    def accuracies(self, source: Episodes, split: Split, tasks: int) -> Tensor:
        """On the query sets of tasks 0 … tasks − 1."""
        return _scores(self.learner, source, split, tasks, self.at_once, self.prototypes)[1]


Build = Callable[[float], mn.MetaLearner]
"""A learner at its initial weights, by its inner learning rate."""


def build_on_features(method: Method, axes: Tensor, ways: int) -> Build:
    """Learners on frozen features: the map and scales are learned, the last layer adapts."""

    def build(inner: float) -> mn.MetaLearner:
        device = torch.device("cpu")
        make = with_prototypes if method.prototypes else Classifier
        model = m.seeded(0, lambda: make(Mapped(axes), axes.shape[1], ways), device)
        return learner_of(model, method, inner, adapt=("weight", "bias") if method.prototypes
                          else ("head.*",))  # fmt: skip

    return build


def learner_of(
    model: nn.Module,
    method: Method,
    inner: float,
    *,
    adapt: Sequence[str],
    compile: bool = True,
) -> mn.MetaLearner:
    """A learner with the experiment's constants."""
    return mn.MetaLearner(
        model,
        cross_entropy,
        lam=LAM,
        adapt=adapt,
        learn_lr=method.learn_lr,
        solver=mn.GradientDescent(lr=inner, steps=m.STEPS),
        estimator=method.estimator,
        compile=compile,
    )


def train(build: Build, source: Episodes, plan: Plan, *, prototypes: bool) -> Trained:
    """The learner with the best validation accuracy, of all meta-learning rates and looks."""
    losses = {inner: _validated(build(inner), source, plan, prototypes)[0]
              for inner in plan.inner_rates}  # fmt: skip
    inner = min(losses, key=lambda rate: losses[rate])
    tried: list[Row] = [
        {"kind": "inner rate", "inner": rate, "loss": loss} for rate, loss in losses.items()
    ]
    best: Row = {"accuracy": -1.0}
    kept, copies = build(inner), list[Tensor]()
    for rate in plan.meta_rates:
        learner = build(inner)
        for step in _looked_at(learner, source, plan, rate, prototypes):
            accuracy = _validated(learner, source, plan, prototypes)[1]
            row = {"kind": "tuning", "inner": inner, "rate": rate, "step": step}
            tried.append({**row, "accuracy": accuracy})
            if accuracy > best["accuracy"]:
                best, kept = tried[-1], learner
                copies = [p.detach().clone() for p in _trainable(learner)]
    with torch.no_grad():
        for p, copy in zip(_trainable(kept), copies, strict=True):
            p.copy_(copy)
    return Trained(kept, prototypes, plan.at_once, tried, best)


def _looked_at(
    learner: mn.MetaLearner, source: Episodes, plan: Plan, rate: float, prototypes: bool
) -> Iterator[int]:
    """Meta-train, and stop at each look; also before the first step. What diverges ends."""
    groups = [{"params": own, "lr": lr} for own, lr in _by_rate(learner, rate) if own]
    optimizer = torch.optim.Adam(groups)
    for step in range(max(plan.looks) + 1):
        if step == 0 or step in plan.looks:
            yield step
        first = step * plan.tasks
        batch = _given(source.batch(range(first, first + plan.tasks)), prototypes, source.ways)
        optimizer.zero_grad()
        try:
            learner.backward(batch, metrics=False)
        except mn.NonFiniteError:
            return
        optimizer.step()


def _by_rate(learner: mn.MetaLearner, rate: float) -> list[tuple[list[nn.Parameter], float]]:
    """What is learned: not the last layer's start, for labels are given at random."""
    slow, fast = [], [*learner.rate_parameters()]
    for name, parameter in learner.model.named_parameters():
        if name in ("log_gain", "log_scale"):
            fast.append(parameter)
        elif parameter.requires_grad and not name.startswith(_LAST):
            slow.append(parameter)
    return [(slow, rate), (fast, 10 * rate)]


def _trainable(learner: mn.MetaLearner) -> list[nn.Parameter]:
    return [p for p in learner.parameters() if p.requires_grad]


def _validated(
    learner: mn.MetaLearner, source: Episodes, plan: Plan, prototypes: bool
) -> tuple[float, float]:
    """Mean loss and accuracy on validation tasks."""
    loss, accuracy = _scores(learner, source, "val", plan.val_tasks, plan.at_once, prototypes)
    return float(loss.mean().nan_to_num(math.inf)), float(accuracy.mean())


def _scores(
    learner: mn.MetaLearner,
    source: Episodes,
    split: Split,
    tasks: int,
    at_once: int,
    prototypes: bool,
) -> tuple[Tensor, Tensor]:
    """Losses and accuracies on the query sets of tasks 0 … tasks − 1."""
    found = []
    for first in range(0, tasks, at_once):
        batch = source.batch(range(first, min(first + at_once, tasks)), split)
        tested = learner.evaluate(_given(batch, prototypes, source.ways))
        found.append((tested.loss.double().cpu(), tested.accuracy.double().cpu()))
    losses, accuracies = zip(*found, strict=True)
    return torch.cat(losses), torch.cat(accuracies)


def _given(batch: TaskBatch, prototypes: bool, ways: int) -> TaskBatch:
    return with_support(batch, most=ways) if prototypes else batch
