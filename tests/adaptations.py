"""Inner loops as plain tensor operations, for autograd to go through: what the tests of learned
rates and of multi-step losses compare with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import metanudge as mn
from metanudge.solvers.rated import own_rate
from problems import Setup, relative_error
from walks import LR, OPTIMIZERS, Inside, Parameters, loss_at, solver_of

LAM = 1.5
SOLVERS: dict[str, Callable[[int], Any]] = {
    "GD": lambda steps: mn.GradientDescent(LR, steps),
    "Nesterov": lambda steps: mn.Nesterov(LR, steps, momentum=0.5),
    **{n: lambda steps, n=n: solver_of(n, steps) for n in ("momentum", "Adam", "AdamW")},
}
ON_SOLVERS = pytest.mark.parametrize("solver", SOLVERS)
ON_ENGINES = pytest.mark.parametrize("engine", ["inplace", "stacked"])


class Walk:
    """The steps of one of the solvers on displacements."""

    def __init__(self, solver: Any, beta: Any) -> None:
        self.solver, self.beta = solver, beta
        self.x: Parameters | None = None
        if isinstance(solver, mn.TorchOptimizer):
            known = {(kind, str(options)): name for name, (kind, options) in OPTIMIZERS.items()}
            self.inside = Inside(known[solver.optimizer, str(solver.options)])

    def step(self, d: Parameters, g: Parameters, rates: Parameters) -> Parameters:
        if isinstance(self.solver, mn.TorchOptimizer):
            return self.inside.step(d, g, rates)
        new = {n: leaf - rates[n] * g[n] for n, leaf in d.items()}
        if isinstance(self.solver, mn.GradientDescent):
            return new
        before, self.x = (d if self.x is None else self.x), new
        return {n: leaf + self.beta * (leaf - before[n]) for n, leaf in new.items()}

    def result(self, d: Parameters) -> Parameters:
        return d if self.x is None else self.x

    def forget(self, d: Parameters) -> Parameters:
        """All that was made so far as constants."""
        if isinstance(self.solver, mn.TorchOptimizer):
            state = self.inside.state.items()
            self.inside.state = {n: [part.detach() for part in parts] for n, parts in state}
        if self.x is not None:
            self.x = {n: leaf.detach() for n, leaf in self.x.items()}
        return {n: leaf.detach() for n, leaf in d.items()}


def rate_in(learner: mn.MetaLearner, h: Parameters, name: str, step: int) -> Any:
    """r of a parameter in a step, from leaves that are named as the learner's."""
    what = learner.learn_lr
    if what is None:
        return own_rate(learner.solver)
    prefix = "log_lr" if what.positive else "lr"
    kept = h[f"{prefix}.{'all' if what.per == 'scalar' else name}"]
    if what.per == "step":
        kept = kept[min(step, len(kept) - 1)]
    return kept.exp() if what.positive else kept


def wanted(
    setup: Setup,
    learner: mn.MetaLearner,
    *,
    steps: int | None = None,
    truncate: int | None = None,
    weights: Sequence[float] | None = None,
    beta: Callable[[Parameters], Any] = lambda h: 0.5,
) -> tuple[Parameters, Parameters]:
    """The mean over the tasks of d Σ_k w_k f(φ_k)/dh by all that the learner learns (by default of
    f(φ_K)); and φ_K of the last task.
    """
    total: Parameters = {}
    steps = learner.solver.steps if steps is None else steps
    names = list(learner.problem().parameters)
    for task in setup.tasks:
        h = {n.removeprefix("model."): p for n, p in learner.named_parameters()}
        h = {n: p.detach().clone().requires_grad_() for n, p in h.items()}
        shared = {n: h[n] for n, _ in setup.model.named_parameters() if n not in names}
        d = {n: torch.zeros_like(h[n]) for n in names}
        walk = Walk(learner.solver, beta(h))
        losses = []
        for step in range(steps):
            phi = {n: h[n] + leaf for n, leaf in d.items()}
            g = torch.autograd.grad(
                loss_at(setup, {**phi, **shared}, task.support),
                list(phi.values()),
                create_graph=True,
            )
            lam = {n: h[f"log_lam.{n}"].exp() if learner.learn_lam else LAM for n in names}
            whole = {n: leaf + lam[n] * d[n] for n, leaf in zip(names, g, strict=True)}
            d = walk.step(d, whole, {n: rate_in(learner, h, n, step) for n in names})
            if truncate is not None and step + 1 == steps - truncate:
                d = walk.forget(d)
            phi = {n: h[n] + leaf for n, leaf in walk.result(d).items()}
            losses.append(loss_at(setup, {**phi, **shared}, task.query))
        each = [0.0] * (steps - 1) + [1.0] if weights is None else weights
        outer = sum(w * loss for w, loss in zip(each, losses, strict=True))
        found = torch.autograd.grad(outer, list(h.values()), materialize_grads=True)
        for name, leaf in zip(h, found, strict=True):
            total[name] = total.get(name, 0) + leaf / len(setup.tasks)
    return total, {n: leaf.detach() for n, leaf in phi.items()}


def assert_same(gradient: Parameters, right: Parameters, tolerance: float) -> None:
    """Each kind by itself: rates, stiffness, the model's."""
    assert gradient.keys() == right.keys()
    for kind in ("log_lr.", "lr.", "log_lam.", ""):
        names = [n for n in right if n.startswith(kind)]
        if names:
            parts = ({n: part[n] for n in names} for part in (gradient, right))
            assert relative_error(*parts) < tolerance, kind
