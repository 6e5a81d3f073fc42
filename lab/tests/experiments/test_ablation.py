"""The ablation: its verdict follows the rows, and its errors have the right targets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

import metanudge as mn
from metanudge.models import MLP, Conv1D
from metanudge.tasks import MNIST1D, Sinusoid
from metanudge_lab.experiments import ablation, ablation_runs, fewshot
from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.base import FinishedCell, Result
from metanudge_lab.experiments.network_errors import curvature
from metanudge_lab.experiments.variants import (
    AT_EQUAL_COST,
    POINTS,
    Choice,
    Other,
    Variant,
    all_variants,
    equal_cost_choices,
    trained_choices,
)

CPU = torch.device("cpu")


def ablation_result(
    accuracies: dict[Choice, float],
    more: dict[Choice, float] | None = None,
    at_equal_cost: dict[Choice, float] | None = None,
) -> Result[ablation.Config]:
    config = ablation.Config(steps=(5,), omniglot_seeds=0)

    def measured() -> Iterator[FinishedCell]:
        for view, choices, known in (
            ("", trained_choices(config.options), accuracies),
            (AT_EQUAL_COST, equal_cost_choices(config.options), at_equal_cost or {}),
        ):
            for choice, seed in itertools.product(choices, range(2)):
                found = {
                    "accuracy": known.get(choice, 0.9),
                    "accuracy_more": (more or {}).get(choice, 0.8),
                }
                yield FinishedCell(
                    {"part": f"mnist1d{view}", **choice.keys, "seed": seed},
                    [{**found, "ci95": 0.01, "ci95_more": 0.01}],
                    0.0,
                    0,
                )
        for point in POINTS:
            row = {
                "error_implicit": 0.5,
                "error_steps": 0.5,
                "cosine_implicit": 0.8,
                "cosine_steps": 0.8,
            }
            rows = [{**variant.keys, **row} for variant in all_variants(config.options)]
            yield FinishedCell(
                {"part": "error", "point": point, "steps": 5, "seed": 0}, rows, 0.0, 0
            )

    return Result("ablation", "quick", config, list(measured()))


def test_the_verdict_on_the_defaults_follows_the_rows() -> None:
    default = Variant.default()
    assert ablation.judge(ablation_result({})).status == "reproduced"
    other = default.changed(
        "start", next(start for start in ("shifted", "theta") if start != default.start)
    )
    assert ablation.judge(ablation_result({other: 0.904})).status == "reproduced", (
        "within the noise"
    )
    verdict = ablation.judge(ablation_result({other: 0.95}, {other: 0.9}))
    assert verdict.status == "partly"
    assert (
        f"start = {other.start} (+0.050 on MNIST-1D, +0.100 on MNIST-1D, 16 steps)"
        in verdict.reason
    )
    assert ablation.judge(ablation_result({other: 0.95})).status == "reproduced", (
        "no better with 16"
    )
    assert ablation.judge(ablation_result({other: 0.95}, {other: 0.7})).status == "reproduced", (
        "better with 5 steps, worse with 16"
    )
    assert ablation.judge(ablation_result({default: 0.5}, {default: 0.5})).status == "not"
    failed = ablation.judge(ablation_result({default: 0.0}, {default: 0.0}))
    assert failed.status == "partly"
    assert failed.parts[-1].holds is False, "the defaults fail: that is said, no mean is compared"
    failing = ablation_result({other: 0.95}, {other: 0.9})
    next(
        one for one in failing.measured if one.cell == {"part": "mnist1d", **other.keys, "seed": 0}
    ).rows[0]["accuracy_more"] = 0.0
    assert ablation.judge(failing).status == "reproduced", (
        "one training in two ended in NaN: no noise, whatever its interval"
    )


def test_estimators_that_nudge_nothing_are_compared_at_equal_steps_and_at_equal_cost() -> None:
    other = Other("MAML by differences")
    steps = ablation.judge(ablation_result({other: 0.95}, {other: 0.9}))
    assert steps.status == "partly"
    assert "estimator = MAML by differences (+0.050 on MNIST-1D, " in steps.reason
    assert "at equal cost = " not in steps.reason, "it costs more than it brings"
    cost = ablation.judge(ablation_result({}, {other: 0.9}, at_equal_cost={other: 0.95}))
    assert (
        "estimator at equal cost = MAML by differences (+0.050 on MNIST-1D, equal cost, "
        in cost.reason
    )
    cells = ablation.cells(ablation.Config())
    assert {"part": "omniglot, equal cost", "method": "FO-MAML", "seed": 1} in cells


def test_equal_cost_is_as_many_gradients_as_the_default_takes() -> None:
    """K = 5: two nudged solves of 5 support and 5 query gradients each for the default; 5 and 1 for
    FO-MAML, 3·5 and 1 for MAML by differences, 2·5, 1 and 5 products for that by autograd.
    """
    config = ablation.Config(sinusoid_iterations=3, test_tasks=1, more_steps=1)
    expected = {"FO-MAML": 6, "MAML by differences": 16, "MAML, autograd products": 21}
    for name, gradients in expected.items():
        cell = {"part": "sinusoid, equal cost", "method": name, "seed": 0}
        (row,) = ablation.measure(cell, config, CPU)
        assert row["gradients"] == gradients
        assert row["iterations"] == round(3 * 20 / gradients)


def test_rates_of_its_own_are_those_that_validate_best() -> None:
    config = ablation.Config(
        sinusoid_iterations=20,
        test_tasks=20,
        own_inner_rates=(0.01, 1e6),
        own_rates=(1e-2, 1e-9),
        own_rounds=(20,),
        own_seeds=1,
    )
    other = {"method": "FO-MAML"}
    *tried, chosen = ablation.measure({"part": "sinusoid, search", **other}, config, CPU)
    assert len(tried) == 4
    assert (chosen["inner"], chosen["rate"]) == (0.01, 1e-2), "else nothing is explained or learned"
    (row,) = ablation.measure({"part": "sinusoid, own rates", **other, "seed": 0}, config, CPU)
    fixed = replace(config, sinusoid_inner=0.01, sinusoid_rate=1e-2)
    (same,) = ablation.measure({"part": "sinusoid", **other, "seed": 0}, fixed, CPU)
    assert row == {"inner": 0.01, "rate": 1e-2, **same}
    part = FinishedCell({"part": "sinusoid, search", **other}, [*tried, chosen], 0.0, 0)
    ablation_runs._known.clear()
    ablation_runs.remember(Result("ablation", "full", config, [part]))
    assert ablation_runs._known == {
        ("sinusoid", Other("FO-MAML"), config): {"inner": 0.01, "rate": 1e-2}
    }
    default = {"part": "sinusoid, own rates", **Variant.default().keys, "seed": 0}
    assert default in ablation.cells(config)


def test_a_trained_variant_is_tested_with_more_steps_too() -> None:
    config = ablation.Config(iterations=2, tasks=2, test_tasks=3, more_steps=7)
    (row,) = ablation.measure({"part": "mnist1d", **Variant.default().keys, "seed": 0}, config, CPU)
    source = MNIST1D(ways=3, shots=5, queries=10, seed=0)
    trial = fewshot.Trial(m.seeded(0, lambda: Conv1D(ways=3), CPU), mn.FOBMAML(), source)
    trial.train(fewshot.Recipe(config.inner, config.rate, 2, 2))
    for suffix, steps in (("", 5), ("_more", 7)):
        exact = (
            trial._learners[config.inner]
            .evaluate(source.batch(range(3), "test"), steps=steps)
            .mean_accuracy
        )
        assert row[f"accuracy{suffix}"] == pytest.approx(exact, abs=1e-9)


def test_a_regression_is_scored_by_the_variance_it_explains() -> None:
    config = ablation.Config(sinusoid_iterations=3, test_tasks=20, more_steps=7)
    (row,) = ablation.measure({"part": "sinusoid", **Variant.paper().keys, "seed": 0}, config, CPU)
    source = Sinusoid(shots=10, queries=10, seed=0)
    trial = fewshot.Trial(
        m.seeded(0, lambda: MLP(1, 1, hidden=(40, 40)), CPU),
        mn.FOBMAML(nu=0.1),
        source,
        regression=True,
    )
    trial.train(fewshot.Recipe(config.sinusoid_inner, config.sinusoid_rate, 3, 8))
    batch = source.batch(range(20), "test")
    found = trial._learners[config.sinusoid_inner].evaluate(batch, steps=7)
    shares = 1 - found.loss / batch.stacks[0].query[1].double().square().mean()
    assert row["accuracy_more"] == pytest.approx(float(shares.clamp(min=0).mean()), rel=1e-6)
    wild = ablation.Config(sinusoid_iterations=3, test_tasks=5, sinusoid_inner=1e6)
    assert (
        ablation.measure({"part": "sinusoid", **Variant.paper().keys, "seed": 0}, wild, CPU)[0][
            "accuracy"
        ]
        == 0
    )


def test_the_default_is_the_library_s() -> None:
    assert Variant.default().estimator == mn.FOBMAML()
    assert Variant("gradient", "shifted", "tangent", "").estimator == mn.FOBMAML(
        nudge="gradient", start="shifted", stencil="tangent"
    )
    assert len(all_variants(ablation.Config().options)) == 2 * 3 * (3 * 5 + 1)


def test_errors_are_measured_against_the_right_targets() -> None:
    """With one step, the gradient nudge with its centre and start shifted is MAML's gradient; the
    tangent takes it without error.
    """
    config = ablation.Config(
        nudges=("gradient",),
        starts=("shifted",),
        stencils=("tangent",),
        steps=(1,),
        reach=3,
        error_tasks=2,
        channels=2,
        error_seeds=1,
    )
    (row,) = ablation.measure(
        {"part": "error", "point": "untrained", "steps": 1, "seed": 0}, config, CPU
    )
    assert row["error_steps"] < 1e-9
    assert row["cosine_implicit"] == pytest.approx(row["agreement"], abs=1e-9)


def test_curvature_is_the_hessian_s() -> None:
    x = torch.randn(1, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    learner = mn.MetaLearner(nn.Linear(3, 1, bias=False).double(), nn.functional.mse_loss)
    tasks = mn.TaskBatch((x, x[..., :1]), (x, x[..., :1]))
    assert curvature(learner, tasks) == pytest.approx(
        float(torch.linalg.eigvalsh(2 * x[0].T @ x[0] / 6)[-1]), rel=1e-9
    )
