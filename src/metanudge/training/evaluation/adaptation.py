"""The tasks of a batch adapted with different numbers of steps, on the engine that suits them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from metanudge.engines import Cost, Engine, Inner, InplaceEngine, StackingError
from metanudge.learner import MetaLearner
from metanudge.params import Params
from metanudge.task import TaskBatch


def adapted(
    learner: MetaLearner, batch: TaskBatch, steps: Sequence[int], *, first: int
) -> Iterator[tuple[list[int], int, Params]]:
    """Groups of tasks of a batch, as places in it, with their adapted parameters after each number
    of steps; largest number first.
    """
    problem = learner.problem()

    def groups(engine: Engine) -> Iterator[tuple[list[int], int, Params]]:
        with (
            torch.enable_grad(),
            engine.session(problem, batch, width=1, seed=0, cost=Cost(), first=first) as inners,
        ):
            for inner in inners:
                for k in sorted(steps, reverse=True):
                    yield [place - first for place in inner.places], k, _phi(inner, learner, k)

    engine, _ = learner.choose_engine(batch)
    begun = False
    try:
        for group in groups(engine):
            begun = True
            yield group
    except StackingError:
        if begun or learner.engine != "auto":
            raise
        yield from groups(InplaceEngine())


def _phi(inner: Inner, learner: MetaLearner, steps: int) -> Params:
    solver = learner.solver if steps == 0 else dataclasses.replace(learner.solver, steps=steps)  # type: ignore[type-var]
    d = inner.zeros(inner.tasks) if steps == 0 else inner.solve(solver).displacement
    theta = inner.theta
    return {n: (theta[n] + leaf).to(theta[n].dtype) for n, leaf in d.items()}
