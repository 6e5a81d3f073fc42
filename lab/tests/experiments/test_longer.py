"""Adapting longer than trained: trajectories are the library's own adaptation, numbers of steps are
drawn as said, and verdicts follow the rows.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import nn

import metanudge as mn
from metanudge.models import MLP
from metanudge.tasks import Sinusoid
from metanudge_lab.experiments import fewshot, longer, longer_rows, longer_runs
from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.base import FinishedCell, Result
from metanudge_lab.experiments.longer_runs import CORE, LENGTHS, name_of
from metanudge_lab.experiments.longer_verdict import judge
from metanudge_lab.experiments.omniglot_recipes import Ingredients, Prepared, moved
from metanudge_lab.experiments.omniglot_runs import tasks_of
from metanudge_lab.experiments.trajectories import trajectory

CPU = torch.device("cpu")
LAM, RATE, CURVATURE = 2.0, 0.1, 3.0


def test_a_trajectory_on_a_parabola_is_the_closed_form() -> None:
    """½c(φ − 1)² + ½λ(φ − θ)² from θ = 0: φ_k = φ*(1 − (1 − α(c + λ))^k) with φ* = c/(c + λ)."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return CURVATURE / 2 * (output - target).square().mean()

    learner = mn.MetaLearner(model, loss, lam=LAM)
    ones = torch.ones(2, 1, 1, dtype=torch.float64)
    tasks = mn.TaskBatch((ones, ones), (ones, ones))
    rows = trajectory(learner, tasks, at=(0, 3, 7), rate=RATE, curved_at=(3,), few=1)
    best = CURVATURE / (CURVATURE + LAM)
    for row in rows:
        phi = best * (1 - (1 - RATE * (CURVATURE + LAM)) ** row["steps"])
        assert row["distance"] == pytest.approx(phi, rel=1e-12, abs=1e-15)
        assert row["residual"] == pytest.approx(abs((CURVATURE + LAM) * (phi - best)), rel=1e-12)
        assert row["support_loss"] == pytest.approx(CURVATURE / 2 * (phi - 1) ** 2, rel=1e-12)
        assert row["loss"] == pytest.approx(row["support_loss"], rel=1e-12)
    # central differences of a linear gradient: rounding 1e-16 over a reach of 1e-6
    assert rows[1]["curvature"] == pytest.approx(CURVATURE, rel=1e-8)


def test_a_trajectory_is_what_the_learner_adapts_to() -> None:
    source = Sinusoid(shots=5, queries=4, seed=0)
    model = m.seeded(0, lambda: MLP(1, 1, hidden=(6,), activation="tanh"), CPU).double()
    solver = mn.GradientDescent(lr=RATE, steps=5)
    learner = mn.MetaLearner(model, nn.functional.mse_loss, lam=LAM, solver=solver)
    tasks = source.batch(range(3)).to(torch.float64)
    for row in trajectory(learner, tasks, at=(0, 1, 9), rate=RATE):
        if row["steps"]:
            expected = learner.evaluate(tasks, steps=row["steps"]).mean_loss
        else:
            expected = float(learner.evaluate(tasks).loss_before.mean())
        assert row["loss"] == pytest.approx(expected, rel=1e-12)


def test_a_training_takes_the_numbers_of_steps_that_are_drawn() -> None:
    """By hand with one learner for each number of steps; and one number is plain training."""
    source = Sinusoid(shots=5, queries=4, seed=0)

    def trial(**options: object) -> fewshot.Trial:
        model = m.seeded(0, lambda: MLP(1, 1, hidden=(5,), activation="tanh"), CPU)
        return fewshot.Trial(model, mn.FOMAML(), source, regression=True, **options)  # type: ignore[arg-type]

    recipe, counts = fewshot.Recipe(0.1, 0.05, 3, 2), (2, 4, 2)
    drawn, by_hand = trial(drawn=lambda step: counts[min(step, 2)]), trial()
    assert drawn.train(recipe)
    learner = by_hand.learner(0.1)
    optimizer = torch.optim.Adam(learner.parameters(), lr=0.05)
    for tasks, steps in zip(source.batches(size=2, count=3), counts, strict=True):
        learner.solver = mn.GradientDescent(lr=0.1, steps=steps)
        optimizer.zero_grad()
        learner.backward(tasks)
        optimizer.step()
    pairs = zip(drawn.model.parameters(), by_hand.model.parameters(), strict=True)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
    assert trial(drawn=lambda step: 5).train(recipe)


def _result(kept: dict[str, float], *, without: str = "") -> Result[longer_runs.Config]:
    """Accuracies after the last step by method (less 0.1 for K = 5, but for the loss nudge); 0.9
    before. The curvature at θ is 10 less 8 times that.
    """
    config = dataclasses.replace(longer_runs.Config.quick(), seeds=3)
    done, missing = [], []
    for cell in longer.cells(config):
        if cell["what"] == "rates":
            done.append(FinishedCell(cell, [], 0.0, 0))
            continue
        method, length = config.trained[str(cell["trained"])]
        if method == without:
            missing.append(cell)
            continue
        end = kept[method] - 0.1 * (length == "K = 5" and method != m.LOSS)
        rows = [
            {
                "kind": kind,
                "steps": k,
                "accuracy": (0.9 if k <= 5 else end) + 0.001 * int(cell["seed"] or 0),
                "inner": 0.1,
                "rate": 0.01,
                "curvature": 10 - 8 * kept[method],
                "distance": 1.0,
                "residual": 1.0,
            }
            for kind in ("test", "slower")
            for k in config.adapt_steps
        ]
        done.append(FinishedCell(cell, rows, 0.0, 0))
    return Result("longer", "quick", config, done, [], missing)


def test_the_verdict_follows_the_rows() -> None:
    good = judge(_result({m.LOSS: 0.9, m.FO_MAML: 0.8, m.MAML: 0.8}))
    assert good.status == "reproduced", good
    assert {part.name for part in good.parts} == {
        "keeps",
        "ahead",
        "mismatch",
        "estimator",
        "why",
    }
    lost = judge(_result({m.LOSS: 0.7, m.FO_MAML: 0.95, m.MAML: 0.95}))
    holds = {part.name: part.holds for part in lost.parts}
    assert holds == {
        "keeps": False,
        "ahead": False,
        "mismatch": True,
        "estimator": False,
        "why": False,
    }


def test_there_is_a_verdict_once_what_it_needs_is_there() -> None:
    assert longer.EXPERIMENT.enough(_result(dict.fromkeys(CORE, 0.9)))
    assert not longer.EXPERIMENT.enough(_result(dict.fromkeys(CORE, 0.9), without=m.MAML))


def test_random_numbers_of_steps_cost_their_mean() -> None:
    config = longer_runs.Config.quick()
    assert longer_rows.gradients(config, name_of(m.FO_MAML, "K = 16")) == 17
    assert longer_rows.gradients(config, name_of(m.FO_MAML, "random K")) == 9.5
    assert set(LENGTHS) == {"K = 5", "K = 16", "random K"}


def test_what_diverged_counts_as_chance_and_ranks_last() -> None:
    cell = {"part": "mnist1d", "what": "training", "trained": "MAML, K = 5", "seed": 0}
    done = [FinishedCell(cell, [{"kind": "diverged"}], 0.0, 0)]
    result = Result("longer", "quick", longer_runs.Config.quick(), done)
    assert longer_rows.percent(result, "mnist1d", "MAML, K = 5", 50) == [pytest.approx(100 / 3)]
    assert longer_rows.ranks_agree([1.0, math.nan, 2.0], [1.0, 3.0, 2.0]) == pytest.approx(1.0)


def test_images_move_by_whole_pixels_in_training_only() -> None:
    source, _ = tasks_of(3, 1, 2, glyphs=True, seed=0, device=CPU)
    prepared = Prepared(source, Ingredients(shifts=True))
    (plain, labels), (new, same) = source.task(4).support, prepared.task(4).support
    assert torch.equal(labels, same)
    padded = nn.functional.pad(plain, (2, 2, 2, 2))
    for image, other in zip(padded, new, strict=True):
        shifts = [
            image[:, 2 - down : 30 - down, 2 - right : 30 - right]
            for down in range(-2, 3)
            for right in range(-2, 3)
        ]
        assert any(torch.equal(other, shifted) for shifted in shifts)
    assert not torch.equal(plain, new)
    for split in ("val", "test"):
        assert torch.equal(source.task(4, split).query[0], prepared.task(4, split).query[0])  # type: ignore[arg-type]
    image = torch.arange(9.0).reshape(1, 1, 3, 3)
    assert moved(image, torch.tensor([0]), torch.tensor([1]))[0, 0, 0].tolist() == [0.0, 0.0, 1.0]
