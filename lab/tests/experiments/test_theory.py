"""What the experiments on the paper's theory rest on: closed forms against automatic
differentiation, and fits against known laws.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

import metanudge as mn
from metanudge.testing.inexact import OffBy
from metanudge.testing.problems import logistic_regression, relative_error
from metanudge_lab.experiments import (
    bias_rates,
    complexity,
    convergence,
    lambda_effect,
    nu_sensitivity,
    power_laws,
    spending,
)
from metanudge_lab.experiments import quadratics as q
from metanudge_lab.experiments.base import FinishedCell, Result, Row
from metanudge_lab.experiments.problems import displacements, landscape, small_conv_net

CPU = torch.device("cpu")


# -------------------------------------------------------------------------------- inexact solutions


def test_solutions_are_off_by_delta_in_directions_of_their_own() -> None:
    setup = logistic_regression(tasks=2)
    learner = mn.MetaLearner(setup.model, setup.loss, lam=0.5)
    solver = mn.NewtonCG(tol=1e-12)
    exact = displacements(learner, setup.tasks, solver)
    moved = OffBy(1e-3, 0, solver)
    first, second = (displacements(learner, setup.tasks, moved) - exact for _ in range(2))
    for off in (first, second):
        torch.testing.assert_close(
            off.norm(dim=1), torch.full((2,), 1e-3, dtype=torch.float64), rtol=1e-9, atol=0
        )
    assert float(torch.cosine_similarity(first, second).abs().max()) < 0.99


def test_precision_is_how_far_the_steps_get() -> None:
    problem = q.Problem(0, dim=5, tasks=3, lam=0.1, device=CPU)
    learner = problem.learner(mn.FOMAML(), 7)
    reached = displacements(learner, problem.tasks, learner.solver)
    solved = displacements(learner, problem.tasks, mn.NewtonCG(steps=5, cg_steps=20, tol=1e-13))
    assert nu_sensitivity.precision(problem, 7) == pytest.approx(
        float((reached - solved).norm(dim=1).mean()), rel=1e-9
    )


def test_float32_rounds_where_the_nudge_is_small() -> None:
    config = dataclasses.replace(
        nu_sensitivity.Config.quick(), nus=(1e-5, 0.1), steps=(20,), dim=5, tasks=2
    )
    errors = {}
    for name in (nu_sensitivity.QUADRATIC, nu_sensitivity.SINGLE):
        rows = nu_sensitivity.measure({"problem": name, "nudge": "loss", "seed": 0}, config, CPU)
        errors[name] = [row["error_steps"] for row in rows if row["kind"] == "grid"]
    (fine, biased), (rounded, same) = errors.values()
    assert rounded > 1e-4 > 1e-8 > fine
    assert same == pytest.approx(biased, rel=1e-2)


def test_the_landscape_of_a_quadratic() -> None:
    problem = q.Problem(0, dim=5, tasks=2, lam=0.1, device=CPU, condition=8.0)
    learner = problem.learner(mn.FOMAML(), 1)
    found = landscape(learner, problem.tasks, mn.NewtonCG(steps=5, cg_steps=20, tol=1e-12))
    torch.testing.assert_close(
        found.eigenvalues[:, 0], torch.full((2,), 1 / 8, dtype=torch.float64)
    )
    torch.testing.assert_close(found.eigenvalues[:, -1], torch.ones(2, dtype=torch.float64))
    assert float(found.residual.max()) < 1e-10
    solutions = [mn.tasks.Quadratic.solution(task, problem.theta, 0.1) for task in problem.tasks]
    torch.testing.assert_close(
        found.distance, torch.stack([(phi - problem.theta).norm() for phi in solutions])
    )


def test_the_two_networks_have_the_same_weights() -> None:
    smooth, kinked = (small_conv_net(smooth=smooth, tasks=1).model for smooth in (True, False))
    assert all(
        torch.equal(a, b) for a, b in zip(smooth.parameters(), kinked.parameters(), strict=True)
    )


def test_a_learned_stiffness_is_the_best_one() -> None:
    """Against the least of the outer loss, which is known in closed form for every λ."""
    config = dataclasses.replace(lambda_effect.Config.quick(), dim=4, tasks=6, noise=1.0)
    setup, unit = lambda_effect._setup(lambda_effect.NOISY, config, 3)
    theta = next(setup.model.parameters())

    def loss(lam: float) -> float:
        total = 0.0
        for task in setup.tasks:
            phi = mn.tasks.Quadratic.solution(task, theta, lam)
            A, b = (t[0] for t in task.query)
            total += float(0.5 * phi @ A @ phi + b @ phi)
        return total

    best = min((10 ** (k / 40 - 4) for k in range(200)), key=loss)
    assert lambda_effect.learn(
        setup, config.start / unit, meta_steps=40, inner_steps=200
    ) == pytest.approx(best, rel=0.06)


# --------------------------------------------------------------------------------------------- fits


def result_of(
    module: Any, config: Any, cells: list[tuple[dict[str, Any], list[Row]]]
) -> Result[Any]:
    return Result(
        module.EXPERIMENT.name,
        "quick",
        config,
        [FinishedCell(cell, rows, 0.0, 0) for cell, rows in cells],
    )


@pytest.mark.parametrize(("power", "holds"), [(2.0, True), (1.6, False)])
def test_orders_in_nu_are_fitted(power: float, holds: bool) -> None:
    config = bias_rates.Config.full()
    rows = [{"nu": nu, "error": 3 * nu**power} for nu in config.nus]
    cell = {
        "problem": "logistic regression",
        "nudge": "loss",
        "stencil": "symmetric",
        "varied": "nu",
    }
    found = power_laws.law(
        result_of(bias_rates, config, [(cell, rows)]),
        "logistic regression",
        "loss",
        "symmetric",
        "nu",
    )
    assert found is not None
    assert found.slope == pytest.approx(power)
    assert found.holds is holds


@pytest.mark.parametrize("constant", [1.0, 1e6])
def test_orders_in_delta_are_those_of_the_best_nu(constant: float) -> None:
    """c ν² + δ/ν is least, 3/2^(2/3) (c δ²)^(1/3), at ν = (δ/(2c))^(1/3); a best ν at the edge of
    the scan does not count.
    """
    config = bias_rates.Config.full()
    rows = []
    for delta in (1e-9, 1e-7, 1e-5):
        for multiple in config.multiples:
            nu = multiple * delta ** (1 / 3)
            rows.append(
                {
                    "delta": delta,
                    "nu": nu,
                    "multiple": multiple,
                    "error": constant * nu**2 + delta / nu,
                }
            )
    cell = {
        "problem": "logistic regression",
        "nudge": "loss",
        "stencil": "symmetric",
        "varied": "delta",
    }
    found = power_laws.law(
        result_of(bias_rates, config, [(cell, rows)]),
        "logistic regression",
        "loss",
        "symmetric",
        "delta",
    )
    assert found is not None
    assert found.slope == pytest.approx(2 / 3)
    assert found.nu_slope == pytest.approx(1 / 3)
    assert found.inside is found.holds is (constant == 1.0)


def test_spending_is_interpolated_and_its_powers_are_fitted() -> None:
    """An error of exp(−K/κ): κ log(1/ε) steps."""
    config = dataclasses.replace(
        complexity.Config.quick(), conditions=(9.0, 49.0), methods=("MAML",)
    )
    cells: list[tuple[dict[str, Any], list[Row]]] = []
    for condition in config.conditions:
        rows: list[Row] = [
            {"tolerance": None, "steps": k, "error": math.exp(-k / spending.kappa(condition)),
            "delta": math.exp(-k / 3),
             "gradients": k + 1, "products": k, "seconds": k / 10}
            for k in complexity.lengths(500)
        ]  # fmt: skip
        cells.append(
            (
                {
                    "what": "precision",
                    "method": "MAML",
                    "solver": "gradient descent",
                    "condition": condition,
                    "seed": 0,
                },
                rows,
            )
        )
    result = result_of(complexity, config, cells)
    found = spending.reach(result, "MAML", "gradient descent", 9.0, 1e-3)
    assert found is not None
    assert found.steps == pytest.approx(5 * math.log(1e3), rel=1e-4)
    assert found.gradients == pytest.approx(found.steps + 1, rel=1e-4)
    powers = spending.exponents(result, "MAML", "gradient descent")
    assert powers.kappa == pytest.approx(1.0, abs=1e-3)
    assert powers.log_precision == pytest.approx(1.0, abs=1e-3)
    assert powers.straight == pytest.approx(1.0, abs=1e-6)
    assert powers.delta == pytest.approx(3 / 25, abs=1e-3)
    never = [dict(row, error=1.0) for row in cells[0][1]]
    assert spending.spent(never, 0.1).steps == math.inf


def test_a_meta_gradient_costs_what_the_rows_say() -> None:
    config = dataclasses.replace(
        complexity.Config.quick(), most_steps=64, dim=4, precisions=(1e-1, 1e-2)
    )
    cell = {
        "what": "precision",
        "method": "FO-B-MAML gradient nudge",
        "solver": "Nesterov",
        "condition": 9.0,
        "seed": 0,
    }
    rows = complexity.measure(cell, config, CPU)
    assert all(row["gradients"] == 3 * row["steps"] + 1 and row["products"] == 0 for row in rows)
    assert rows[-1]["error"] <= 1e-2 < rows[-2]["error"]
    assert rows[-1]["delta"] < rows[0]["delta"]


# ----------------------------------------------------------------------------------------- verdicts


def test_the_verdict_on_nu_follows_the_rows() -> None:
    config = dataclasses.replace(
        nu_sensitivity.Config.quick(),
        nus=(1e-3, 0.01, 0.1, 1.0),
        steps=(10, 50),
        network_steps=(),
        problems=("quadratic",),
    )

    def judged(errors: dict[int, list[float]]) -> tuple[str, str]:
        rows: list[Row] = [
            {
                "steps": k,
                "kind": "grid",
                "nu": nu,
                "error_exact": e,
                "error_steps": 1e-6,
                "optimum_residual": 0.0,
                "residual_growth": 0.1,
            }
            for k, found in errors.items()
            for nu, e in zip(config.nus, found, strict=True)
        ]
        verdict = nu_sensitivity.judge(
            result_of(
                nu_sensitivity,
                config,
                [({"problem": "quadratic", "nudge": "loss", "seed": 0}, rows)],
            )
        )
        return verdict.status, verdict.reason

    assert judged({10: [2.5, 2.0, 1.5, 3.5], 50: [0.13, 0.1, 0.2, 1.0]})[0] == "reproduced"
    flat = judged({10: [0.5, 0.5, 0.5, 0.6], 50: [0.01, 0.01, 0.05, 0.9]})
    assert flat[0] == "partly"
    assert "amplifies the noise" in flat[1]


def test_relative_errors() -> None:
    assert relative_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 3.0])) == pytest.approx(
        1 / math.sqrt(18)
    )


def test_the_verdict_on_convergence_needs_the_faster_optimizer_to_arrive() -> None:
    """Two optimizers that never arrive are not twice as fast as each other."""
    config = dataclasses.replace(
        convergence.Config.quick(),
        problems=("exponential",),
        optimizers=("GD", "ClippedGD", "NormalizedGD", "SNGDM"),
    )

    def status(clipped: int | None) -> bool:
        cells: list[tuple[dict[str, Any], list[Row]]] = []
        for name in config.optimizers:
            for sampled in (False, True):
                reached = None if name == "GD" else clipped
                row: Row = {
                    "kind": "run",
                    "rate": 1.0,
                    "schedule": "constant",
                    "reached": reached,
                    "last": 0.1 if name == "SNGDM" else 0.2,
                }
                cells.append(
                    ({"problem": "exponential", "what": name, "sampled": sampled, "seed": 0}, [row])
                )
        proof: Row = {
            "kind": "proof",
            "flat": 1.0,
            "steep": 1.0,
            "steps": 3,
            "bound": 9.0,
            "broken": 0,
            "excess": 1.0,
        }
        pairs: list[Row] = [
            {"kind": "pairs", "distance": d, "secant": 1.0, "ratio": 0.5} for d in (1.0, 2.0, 4.0)
        ]
        cells.append(
            (
                {"problem": "exponential", "what": "smoothness", "sampled": False, "seed": 0},
                [proof, *pairs],
            )
        )
        floor: Row = {"kind": "floor", "stencil": "forward", "nu": 0.1, "norm": 0.01, "bias": 0.01}
        cells.append(
            ({"problem": "exponential", "what": "floor", "sampled": False, "seed": 0}, [floor])
        )
        return convergence.judge(result_of(convergence, config, cells)).status == "reproduced"

    assert status(10)
    assert not status(None)
