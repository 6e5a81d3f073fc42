"""Adaptation step by step: how well it does, how far it has come and how curved it is there."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor

import metanudge as mn
from metanudge.curvature import largest_curvatures
from metanudge.engines import Cost, Inner, StackedEngine
from metanudge.params import Params, norm
from metanudge.task import TaskBatch
from metanudge_lab.experiments.base import Row

PROBES = 20  # of the power iteration
_SEEN = ("accuracy", "loss", "support_loss", "residual", "distance")


def trajectory(
    learner: mn.MetaLearner,
    tasks: TaskBatch,
    *,
    at: Collection[int],
    rate: float,
    curved_at: Collection[int] = (),
    few: int = 0,
) -> list[Row]:
    """Rows for the numbers of steps in `at`: accuracy and losses are means over the tasks; the
    residual ‖∇g(φ)‖, the distance ‖φ − θ‖ and the largest curvature of the support loss at φ are
    medians, which a few tasks that diverge do not decide.

    Args:
        learner: its model, loss and λ; its own solver is not used.
        tasks: on which, all of the same sizes.
        at: after how many steps to look.
        rate: of gradient descent on the inner problem.
        curved_at: of these, where to measure the curvature.
        few: on how many of the tasks that is done.
    """
    lam = learner.lam
    assert isinstance(lam, float | int), "one λ for all"
    with _session(learner, tasks) as groups:
        found = [_walk(inner, lam, at, rate) for inner in groups]
    rows: dict[int, Row] = {}
    for steps in sorted(at):
        seen = {key: torch.cat([one[steps][key] for one in found]).double() for key in _SEEN}
        means = {key: float(seen[key].mean()) for key in _SEEN[:3]}
        rows[steps] = {"steps": steps, **means, **{k: _middle(seen[k]) for k in _SEEN[3:]}}
    for steps in sorted(curved_at) if few else ():
        with _session(learner, tasks[:few]) as groups:
            curved = [
                largest_curvatures(inner, PROBES, _descend(inner, lam, steps, rate))
                for inner in groups
            ]
        rows[steps]["curvature"] = _middle(torch.cat(curved).double().cpu())
    return list(rows.values())


def _session(learner: mn.MetaLearner, tasks: TaskBatch) -> AbstractContextManager[Iterator[Inner]]:
    return StackedEngine().session(learner.problem(), tasks, width=2, seed=0, cost=Cost())


def _walk(
    inner: Inner, lam: float, at: Collection[int], rate: float
) -> dict[int, dict[str, Tensor]]:
    seen: dict[int, dict[str, Tensor]] = {}
    d = inner.zeros(inner.tasks)
    for step in range(max(at) + 1):
        losses, g = _gradient(inner, d, lam)
        if step in at:
            query = inner.measure_query(d)
            values = (query.accuracy, query.loss, losses.detach(), norm(g), norm(d))
            seen[step] = {key: value.cpu() for key, value in zip(_SEEN, values, strict=True)}
        d = {n: leaf - rate * g[n] for n, leaf in d.items()}
    return seen


def _descend(inner: Inner, lam: float, steps: int, rate: float) -> Params:
    d = inner.zeros(inner.tasks)
    for _ in range(steps):
        _, g = _gradient(inner, d, lam)
        d = {n: leaf - rate * g[n] for n, leaf in d.items()}
    return d


def _gradient(inner: Inner, d: Params, lam: float) -> tuple[Tensor, Params]:
    """Support losses, and the gradient of f̂(θ + d) + λ/2 ‖d‖²."""
    losses, g = inner.data_gradient(d, None, 0, None)
    return losses, {n: leaf.detach() + lam * d[n] for n, leaf in g.items()}


def _middle(values: Tensor) -> float:
    """The median; what diverged counts as infinitely much."""
    return float(values.nan_to_num(nan=torch.inf).quantile(0.5, interpolation="nearest"))
