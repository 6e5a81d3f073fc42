"""Every family of models × whole or LoRA × estimator is what the same estimator gives when it is
computed by hand on the functional model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import metanudge as mn

hf = pytest.importorskip("hf_models", reason="needs transformers and peft: make check-hf")

LR, STEPS, LAM, NU, EPSILON = 0.1, 3, 2.0, 0.1, 1e-6
SOLVER = mn.GradientDescent(lr=LR, steps=STEPS)
Vector = tuple[Tensor, ...]


class ByHand:
    """Losses and gradients of one task as functions of what is learned."""

    def __init__(self, model: nn.Module, task: mn.Task) -> None:
        self._model, self._task = model, task
        self.theta = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}

    def loss(self, phi: Sequence[Tensor], batch: Any) -> Tensor:
        named = dict(zip(self.theta, phi, strict=True))
        return functional_call(self._model, named, (), dict(batch)).loss

    def gradient(self, phi: Vector, batch: Any) -> Vector:
        leaves = [p.detach().requires_grad_() for p in phi]
        g = torch.autograd.grad(self.loss(leaves, batch), leaves, materialize_grads=True)
        return tuple(g)

    def path(self, pull: Callable[[Vector], Vector] | None = None) -> list[Vector]:
        """θ = φ_0 … φ_K of gradient descent on f̂ + ½λ‖φ − θ‖², and what pulls besides."""
        start = tuple(self.theta.values())
        points = [start]
        for _ in range(STEPS):
            phi = points[-1]
            g = self.gradient(phi, self._task.support)
            force = pull(phi) if pull is not None else tuple(torch.zeros_like(p) for p in phi)
            points.append(
                tuple(
                    p - LR * (s + LAM * (p - t) + f)
                    for p, s, t, f in zip(phi, g, start, force, strict=True)
                )
            )
        return points

    def query(self, phi: Vector) -> Vector:
        return self.gradient(phi, self._task.query)

    def nudged_by_loss(self) -> Vector:
        return self._difference(lambda nu: lambda phi: tuple(nu * q for q in self.query(phi)))

    def nudged_by_gradient(self) -> Vector:
        force = self.query(self.path()[-1])
        return self._difference(lambda nu: lambda phi: tuple(nu * q for q in force))

    def _difference(self, pull: Callable[[float], Callable[[Vector], Vector]]) -> Vector:
        plus, minus = (self.path(pull(nu))[-1] for nu in (NU, -NU))
        return tuple(LAM * (m - p) / (2 * NU) for p, m in zip(plus, minus, strict=True))

    def first_order(self) -> Vector:
        return self.query(self.path()[-1])

    def walked_back(self) -> Vector:
        """MAML: v ← v − α(Hv + λv), θ gets v + αλΣv, with Hv from two gradients."""
        *points, last = self.path()
        v = self.query(last)
        total = tuple(torch.zeros_like(leaf) for leaf in v)
        for phi in reversed(points):
            total = tuple(t + LR * LAM * leaf for t, leaf in zip(total, v, strict=True))
            by = EPSILON * (1 + _norm(phi)) / _norm(v)
            ends = (
                self.gradient(
                    tuple(p + sign * by * leaf for p, leaf in zip(phi, v, strict=True)),
                    self._task.support,
                )
                for sign in (1, -1)
            )
            product = [(a - b) / (2 * by) for a, b in zip(*ends, strict=True)]
            v = tuple(leaf - LR * (h + LAM * leaf) for leaf, h in zip(v, product, strict=True))
        return tuple(t + leaf for t, leaf in zip(total, v, strict=True))

    def unrolled(self) -> Vector:
        """MAML's exact gradient, by autograd through the steps."""
        theta = [t.detach().requires_grad_() for t in self.theta.values()]
        phi = list(theta)
        for _ in range(STEPS):
            g = torch.autograd.grad(
                self.loss(phi, self._task.support), phi, create_graph=True, materialize_grads=True
            )
            phi = [p - LR * (s + LAM * (p - t)) for p, s, t in zip(phi, g, theta, strict=True)]
        loss = self.loss(phi, self._task.query)
        return torch.autograd.grad(loss, theta, materialize_grads=True)


ESTIMATORS: dict[str, tuple[mn.estimators.Estimator, Callable[[ByHand], Vector]]] = {
    "loss nudge": (mn.FOBMAML(nu=NU), ByHand.nudged_by_loss),
    "gradient nudge": (mn.FOBMAML(nu=NU, nudge="gradient"), ByHand.nudged_by_gradient),
    "FO-MAML": (mn.FOMAML(), ByHand.first_order),
    "MAML by differences": (
        mn.MAML(products="difference", epsilon=EPSILON),
        ByHand.walked_back,
    ),
}
EVERYTHING = os.environ.get("METANUDGE_HF") == "all"  # as `make check-hf` has it
KINDS = ("full", "LoRA")
CELLS = [
    (family, kind, name)
    for i, family in enumerate(hf.MODELS)
    for j, kind in enumerate(KINDS)
    for k, name in enumerate(ESTIMATORS)
    if EVERYTHING or (i + 2 * j) % len(ESTIMATORS) == k
]


def _norm(v: Sequence[Tensor]) -> Tensor:
    return torch.cat([leaf.flatten() for leaf in v]).norm()


def flat(gradient: dict[str, Tensor]) -> Tensor:
    return torch.cat([leaf.flatten().double() for leaf in gradient.values()])


def expected(model: nn.Module, tasks: list[mn.Task], by_hand: Callable[[ByHand], Vector]) -> Tensor:
    parts = [by_hand(ByHand(model, task)) for task in tasks]
    return torch.stack([torch.cat([leaf.flatten() for leaf in g]) for g in parts]).mean(0)


@pytest.mark.parametrize(("family", "kind", "name"), CELLS)
def test_in_place_it_is_the_estimator_by_hand(family: str, kind: str, name: str):
    """In float64 to 1e-8: rounding, 1e-15 of gradients, divided by ν = 0.1 or ε = 1e-6, over three
    steps.
    """
    estimator, by_hand = ESTIMATORS[name]
    model, tasks = hf.model_of(family, kind), hf.tasks_of(family)
    learner = mn.MetaLearner(model, lam=LAM, solver=SOLVER, estimator=estimator, engine="inplace")
    with hf.Double():
        found, stats = learner.meta_gradient(tasks)
        target = expected(model, tasks, by_hand)
        exact = expected(model, tasks, ByHand.unrolled) if "differences" in name else target
    assert float((flat(found) - target).norm() / target.norm()) < 1e-8
    assert 0 <= stats.query_accuracy <= 1  # known, that is
    # ε² times third derivatives
    assert float((flat(found) - exact).norm() / exact.norm()) < 1e-6


@pytest.mark.parametrize("family", hf.MODELS if EVERYTHING else ["Llama", "BERT"])
def test_engines_agree_or_the_model_goes_in_place(family: str):
    """BERT and T5 ask their masks for values, which no `vmap` knows."""
    model, tasks = hf.model_of(family), hf.tasks_of(family)
    gradients = {}
    for engine in ("inplace", "auto"):
        estimator = mn.FOBMAML(nu=NU)
        learner = mn.MetaLearner(model, lam=LAM, solver=SOLVER, estimator=estimator, engine=engine)
        with hf.Double():
            gradients[engine], stats = learner.meta_gradient(tasks)
    assert stats.engine == ("inplace" if family in ("BERT", "T5") else "stacked")
    a, b = (flat(g) for g in gradients.values())
    assert float((a - b).norm() / b.norm()) < 1e-10


IN_FEWER_BITS = (
    list(product(hf.MODELS, KINDS, ESTIMATORS, ("autocast", "bfloat16")))
    if EVERYTHING
    else [("T5", "full", "gradient nudge", "autocast"), ("Llama", "LoRA", "loss nudge", "bfloat16")]
)


@pytest.mark.parametrize(("family", "kind", "name", "precision"), IN_FEWER_BITS)
def test_in_fewer_bits(family: str, kind: str, name: str, precision: str):
    """bfloat16 has eight bits: a gradient's entries are off by 2⁻⁹ each, a difference's by 1/ν = 10
    times that, which leaves a cosine of 1 − 2e-4 where errors are independent; they are not quite.
    """
    estimator, _ = ESTIMATORS[name]
    if isinstance(estimator, mn.MAML):
        estimator = mn.MAML(products="difference", epsilon=2e-2)
    tasks = hf.tasks_of(family)
    options: dict[str, Any] = {"lam": LAM, "solver": SOLVER, "estimator": estimator}
    model = hf.model_of(family, kind)
    exact, _ = mn.MetaLearner(model, engine="inplace", **options).meta_gradient(tasks)
    dtype = torch.float32 if precision == "autocast" else torch.bfloat16
    model = hf.model_of(family, kind, dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
        found, _ = mn.MetaLearner(model, engine="inplace", **options).meta_gradient(
            mn.TaskBatch.of(tasks).to(dtype)
        )
    cosine = float(torch.cosine_similarity(flat(found), flat(exact), dim=0))
    print(f"{family}, {kind}, {name}, {precision}: cosine {cosine:.4f}")
    assert cosine > 0.99
