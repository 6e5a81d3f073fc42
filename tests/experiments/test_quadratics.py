"""The closed forms behind Figure 1, against direct computation."""

from __future__ import annotations

import math

import pytest
import torch

import metanudge as mn
from metanudge.experiments import gradient_quality, outer_loss
from metanudge.experiments import quadratics as q
from metanudge.experiments.base import Measured, Result
from metanudge.experiments.quadratics import Problem
from metanudge.tasks import Quadratic

CPU = torch.device("cpu")


@pytest.fixture
def problem() -> Problem:
    return Problem(3, dim=5, tasks=3, lam=0.3, device=CPU)


def test_outer_loss_at_the_inner_solution(problem: Problem) -> None:
    outer = problem.outer()
    direct = torch.stack([_query(task, Quadratic.solution(task, problem.theta, problem.lam)) for task in problem.tasks]).mean()
    assert outer(problem.theta) == pytest.approx(float(direct), rel=1e-12)
    torch.testing.assert_close(outer.hessian @ problem.theta + outer.linear, problem.exact, rtol=1e-12, atol=1e-14)


def test_outer_loss_after_some_steps(problem: Problem) -> None:
    outer, losses = problem.outer(4), []
    for task in problem.tasks:
        A, b = (t[0] for t in task.support)
        phi = problem.theta
        for _ in range(4):
            phi = phi - problem.rate * (A @ phi + b + problem.lam * (phi - problem.theta))
        losses.append(_query(task, phi))
    assert outer(problem.theta) == pytest.approx(float(torch.stack(losses).mean()), rel=1e-12)


def test_the_lowest_value_is_the_lowest(problem: Problem) -> None:
    for outer in (problem.outer(), problem.outer(4)):
        theta = problem.theta.clone()
        for _ in range(4000):
            theta -= (outer.hessian @ theta + outer.linear) / outer.curvature
        assert outer.excess(theta) == pytest.approx(0.0, abs=1e-9)
        assert outer.excess(problem.theta) > 1e-3


def test_maml_descends_the_loss_after_the_steps(problem: Problem) -> None:
    """MAML's gradient is that of the K-step outer loss, and with many steps every exact method's is that of the other."""
    outer = problem.outer(4)
    (gradient,) = problem.learner(mn.MAML(), 4).meta_gradient(problem.tasks)[0].values()
    torch.testing.assert_close(gradient, outer.hessian @ problem.theta + outer.linear, rtol=1e-11, atol=1e-13)


def test_errors_are_those_of_the_estimator() -> None:
    """Forward differences at the inner solution have the error that the closed form of φ_ν says."""
    config = gradient_quality.Config(steps=(100,), lams=(0.3,), nu=0.05, dim=5, tasks=3, seeds=1)
    problem = Problem(0, dim=5, tasks=3, lam=0.3, device=CPU)
    moved = [
        Quadratic.solution(task, problem.theta, 0.3, nu=0.05) - Quadratic.solution(task, problem.theta, 0.3) for task in problem.tasks
    ]
    forward = -0.3 * torch.stack(moved).mean(0) / 0.05
    (row,) = gradient_quality.measure({"lam": 0.3, "method": q.FORWARD, "seed": 0}, config, CPU)
    expected = float((forward - problem.exact).norm() / problem.exact.norm())
    assert row["error"] == pytest.approx(expected, rel=1e-6)
    assert expected > 1e-3


def test_the_first_meta_step_is_gradient_descent() -> None:
    config = outer_loss.Config(iterations=1, rates=(0.5,), dim=5, tasks=3, seeds=1, lam=0.3, steps=4)
    problem = Problem(0, dim=5, tasks=3, lam=0.3, device=CPU)
    exact, adapted = problem.outer(), problem.outer(4)
    theta = problem.theta - 0.5 / exact.curvature * (adapted.hessian @ problem.theta + adapted.linear)
    rows = outer_loss.measure({"method": q.MAML, "seed": 0, "rate": 0.5}, config, CPU)
    assert [row["iteration"] for row in rows] == [0, 1]
    assert rows[0]["exact"] == pytest.approx(exact.excess(problem.theta), rel=1e-4)
    assert rows[1]["exact"] == pytest.approx(exact.excess(theta), rel=1e-4)
    assert rows[1]["adapted"] == pytest.approx(adapted.excess(theta), rel=1e-4)


def test_a_rate_that_diverges_is_a_row_and_never_the_best() -> None:
    config = outer_loss.Config(iterations=12, rates=(0.1, 1e60), dim=4, tasks=2, seeds=1, steps=2, methods=(q.FO_MAML,))
    cells = outer_loss.cells(config)
    result = Result("outer-loss", "quick", config, [Measured(cell, outer_loss.measure(cell, config, CPU), 0.0, 0) for cell in cells])
    assert math.isnan(result.values("exact", rate=1e60)[-1])
    assert outer_loss.best_rate(result, q.FO_MAML, "exact") == 0.1


def judged(errors: dict[str, list[float]], steps: tuple[int, ...] = (5, 20, 100)) -> str:
    config = gradient_quality.Config(steps=steps, lams=(1.0,), seeds=1)
    rivals = {q.GRADIENT: [0.1, 0.01, 0.001], q.FO_MAML: [1.0, 1.0, 1.0], q.REPTILE: [1.0, 0.9, 0.9]}
    measured = [
        Measured({"lam": 1.0, "method": method, "seed": 0}, [{"steps": k, "error": e} for k, e in zip(steps, row, strict=True)], 0.0, 0)
        for method, row in {**rivals, **errors}.items()
    ]
    return gradient_quality.judge(Result("gradient-quality", "quick", config, measured)).status


def test_the_verdict_follows_the_rows() -> None:
    good = {q.SYMMETRIC: [0.5, 0.1, 0.01], q.IMAML_2: [0.4, 0.3, 0.3], q.IMAML_5: [0.4, 0.2, 0.2]}
    assert judged(good) == "reproduced"
    assert judged({**good, q.IMAML_5: [0.4, 0.05, 0.05]}) == "partly", "ahead only later than K = 20"
    assert judged({**good, q.IMAML_2: [0.4, 1e-3, 1e-3]}) == "partly", "never ahead"
    assert judged({**good, q.SYMMETRIC: [0.5, 0.1, 0.15]}) == "not", "does not go on falling"
    assert judged({**good, q.FO_MAML: [1.0, 0.5, 0.1]}) == "not", "FO-MAML goes on falling too"


def test_the_verdict_on_the_outer_loss_follows_the_rows() -> None:
    config = outer_loss.Config(iterations=1, rates=(1.0,), seeds=1)

    def status(ours: float, ten: float = 0.6) -> str:
        ends = {q.SYMMETRIC: ours, q.GRADIENT: 0.1, q.IMAML_2: 2.0, q.IMAML_5: 1.0, q.IMAML_10: ten, q.FO_MAML: 4.0, q.REPTILE: 5.0}
        cells = [({"method": m, "seed": 0, "rate": 1.0}, [{"iteration": 1, "exact": end, "adapted": end}]) for m, end in ends.items()]
        return outer_loss.judge(Result("outer-loss", "quick", config, [Measured(cell, rows, 0.0, 0) for cell, rows in cells])).status

    assert status(0.9) == "reproduced"
    assert status(1.1) == "partly", "above iMAML with 5 CG steps"
    assert status(0.9, ten=0.3) == "partly", "not near iMAML with 10 CG steps"
    assert status(9.0) == "not"
    assert status(math.nan) == "not"


def _query(task: mn.Task, phi: torch.Tensor) -> torch.Tensor:
    A, b = (t[0] for t in task.query)
    return 0.5 * phi @ A @ phi + b @ phi
