"""Which support examples every evaluation of a solve sees."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import metanudge as mn
from metanudge.params import flatten
from metanudge.solvers import GradientDescent
from problems import mlp, relative_error
from solves import ENGINES, solve


def draws(
    estimator, *, seed: int | None, batch_size: int = 3, calls: int = 1
) -> list[list[list[int]]]:
    """Indices of the support examples of every evaluation, by task; in-place engine, 8 examples, 4
    steps a solve.
    """
    model, loss, tasks = mlp(tasks=2, support=8, query=9)
    seen: list[Tensor] = []

    def watching(model, batch):
        if len(batch[1]) < 9:
            seen.append(batch[0])
        return loss(model(batch[0]), batch[1])

    solver = GradientDescent(lr=0.1, steps=4, batch_size=batch_size)
    learner = mn.MetaLearner(model, watching, solver=solver, estimator=estimator, engine="inplace")
    for _ in range(calls):
        learner.meta_gradient(tasks, metrics=False, seed=seed)
    support = tasks.stacks[0].support[0]
    indices: list[list[list[int]]] = [[], []]
    for x in seen:
        # (task, example, place in the batch)
        match = (support[:, :, None] == x[None, None]).all(-1).nonzero()
        (task,) = set(match[:, 0].tolist())
        indices[task].append([int(i) for i in match[match[:, 2].argsort(), 1]])
    return indices


@pytest.mark.parametrize("nudge", ["loss", "gradient"])
def test_all_solves_of_a_stencil_see_the_same_minibatches(nudge):
    solves = 2 if nudge == "loss" else 3
    for task in draws(mn.FOBMAML(nu=0.1, nudge=nudge), seed=7):
        assert len(task) == solves * 4
        for solve_ in range(1, solves):
            assert task[4 * solve_ : 4 * solve_ + 4] == task[:4]


def test_minibatches_depend_on_seed_task_and_step():
    first, second = draws(mn.FOMAML(), seed=7)
    assert first != second
    assert len({tuple(batch) for batch in first}) == 4
    assert all(len(batch) == 3 == len(set(batch)) for batch in first + second)  # no example twice
    assert draws(mn.FOMAML(), seed=7) == [first, second]
    assert draws(mn.FOMAML(), seed=8) != [first, second]
    in_turn = draws(mn.FOMAML(), seed=None, calls=2)
    assert in_turn[0][:4] != in_turn[0][4:]  # the learner's own seeds move on
    assert {
        i for seed in range(20) for batch in draws(mn.FOMAML(), seed=seed)[0] for i in batch
    } == set(range(8))


def test_minibatches_are_the_same_on_both_engines():
    setup = mlp(support=8)
    for solver in (
        GradientDescent(lr=0.1, steps=4, batch_size=3),
        mn.Nesterov(lr=0.1, steps=4, batch_size=3),
        mn.TorchOptimizer(torch.optim.Adam, steps=4, options={"lr": 0.1}, batch_size=3),
    ):
        a, b = (
            flatten(solve(setup, solver, lam=1.0, engine=engine, seed=3).displacement)
            for engine in ENGINES
        )
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)
        whole = flatten(
            solve(setup, dataclasses.replace(solver, batch_size=None), lam=1.0, seed=3).displacement
        )
        assert relative_error(a, whole) > 1e-2
        too_large = flatten(
            solve(setup, dataclasses.replace(solver, batch_size=8), lam=1.0, seed=3).displacement
        )
        torch.testing.assert_close(too_large, whole, rtol=0, atol=0)
