"""Every estimator against closed forms: ridge regression, and logistic regression with implicit
differentiation by hand.
"""

from __future__ import annotations

import pytest
import torch

import metanudge as mn
from bilevel_problems import Known, logistic, ridge
from metanudge.estimators import Estimator
from problems import log_slope, relative_error

NU = 1e-2
EXACTLY = mn.LBFGS(steps=500, tol=1e-13)
PROBLEMS = {
    "ridge, one penalty": ridge(per_feature=False),
    "ridge, penalty per feature": ridge(),
    "ridge, outer depends on x": ridge(direct=True),
    "logistic, one penalty": logistic(per_feature=False),
    "logistic, penalty per feature": logistic(),
    "logistic, outer depends on x": logistic(direct=True),
}


def hypergradient(problem: Known, estimator, solver=EXACTLY, **options):
    return mn.hypergradient(
        problem.inner,
        problem.outer,
        problem.x,
        problem.init,
        solver=solver,
        estimator=estimator,
        **options,
    )


def descent(problem: Known, steps: int) -> mn.GradientDescent:
    return mn.GradientDescent(lr=1.6 / sum(problem.curvature), steps=steps)


@pytest.mark.parametrize(
    ("nudge", "start"),
    [("loss", "theta"), ("gradient", "theta"), ("loss", "solution"), ("gradient", "solution")],
)
@pytest.mark.parametrize(
    ("stencil", "nu"), [("forward", 1e-6), ("symmetric", 3e-4), ("five-point", 3e-3)]
)
@pytest.mark.parametrize("name", [name for name in PROBLEMS if "one" in name or "depends" in name])
def test_differences_match_the_closed_form(name, stencil, nu, start, nudge):
    problem = PROBLEMS[name]
    result = hypergradient(problem, mn.FOBMAML(nu=nu, stencil=stencil, nudge=nudge, start=start))
    assert relative_error(result.gradient, problem.truth) < (1e-5 if stencil == "forward" else 1e-6)
    torch.testing.assert_close(result.phi, problem.solution, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize(
    ("estimator", "steps", "tolerance"),
    [
        (mn.FOBMAML(stencil="tangent"), 60, 1e-8),
        (mn.FOBMAML(stencil="tangent", nudge="gradient"), 60, 1e-8),
        (mn.FOBMAML(stencil="tangent", start="solution"), 30, 1e-8),
        (mn.Exact(), None, 1e-8),
        (mn.IMAML(cg_steps=20), None, 1e-8),
        (mn.MAML(), 60, 1e-6),
    ],
    ids=[
        "tangent",
        "tangent, gradient nudge",
        "tangent from the solution",
        "exact",
        "implicit",
        "unrolled",
    ],
)
def test_others_match_the_closed_form(name, estimator, steps, tolerance):
    problem = PROBLEMS[name]
    solver = EXACTLY if steps is None else descent(problem, steps)
    result = hypergradient(problem, estimator, solver)
    assert relative_error(result.gradient, problem.truth) < tolerance
    assert result.linear_residual is None or result.linear_residual < 1e-9


@pytest.mark.parametrize("name", ["ridge, outer depends on x", "logistic, outer depends on x"])
def test_the_direct_term_is_a_large_part_of_a_right_total(name):
    problem = PROBLEMS[name]
    direct = hypergradient(problem, mn.FOMAML()).gradient
    torch.testing.assert_close(direct, problem.direct, rtol=0, atol=1e-10)
    for estimator in (
        mn.FOBMAML(nu=3e-4),
        mn.FOBMAML(nu=3e-4, nudge="gradient"),
        mn.Exact(),
        mn.IMAML(cg_steps=20),
    ):
        total = hypergradient(problem, estimator).gradient
        assert relative_error(total, problem.truth) < 1e-6
        assert relative_error(total - direct, problem.truth) > 0.3, (
            "without the direct term the answer is wrong"
        )
        assert relative_error(direct, problem.truth) > 0.03, "and with it alone as well"


@pytest.mark.parametrize(
    ("stencil", "nus", "order", "tolerance"),
    [
        ("forward", (1e-4, 1e-3, 1e-2), 1, 0.02),
        ("symmetric", (3e-3, 1e-2, 3e-2), 2, 0.02),
        ("five-point", (0.01, 0.02, 0.04), 4, 0.1),
    ],
    ids=["forward", "symmetric", "five-point"],
)
@pytest.mark.parametrize("nudge", ["loss", "gradient"])
@pytest.mark.parametrize("direct", [False, True], ids=["", "outer depends on x"])
def test_error_has_the_order_of_the_stencil(nudge, stencil, nus, order, tolerance, direct):
    problem = logistic(direct=direct)
    errors = [
        relative_error(
            hypergradient(problem, mn.FOBMAML(nu=nu, stencil=stencil, nudge=nudge)).gradient,
            problem.truth,
        )
        for nu in nus
    ]
    assert log_slope(nus, errors) == pytest.approx(order, abs=tolerance)


def blind_residual(problem: Known) -> float:
    """Where a line search that compares values may stop: g − g* ≥ ‖∇g‖²/2L is no more than a few
    roundings of g, here 8 of ε/2 each.
    """
    value = float(problem.inner(problem.x, problem.solution))
    return (2 * problem.curvature[1] * 4 * torch.finfo(problem.x.dtype).eps * value) ** 0.5


@pytest.mark.parametrize(
    "solver",
    [
        mn.GradientDescent(lr=0.3, steps=2000, tol=1e-12),
        mn.Nesterov(lr=0.3, steps=1000, tol=1e-12),
        mn.Nesterov(lr=0.3, steps=1000, tol=1e-12, momentum=0.6),
        mn.TorchOptimizer(
            torch.optim.SGD, steps=1000, options={"lr": 0.1, "momentum": 0.7}, tol=1e-12
        ),
        mn.TorchOptimizer(
            torch.optim.LBFGS,
            steps=10,
            options={
                "line_search_fn": "strong_wolfe",
                "tolerance_grad": 1e-13,
                "tolerance_change": 0,
            },
        ),
        mn.LBFGS(tol=1e-12),
        mn.NewtonCG(tol=1e-12),
    ],
    ids=[
        "gradient descent",
        "Nesterov",
        "Nesterov, momentum",
        "SGD",
        "torch's L-BFGS",
        "L-BFGS",
        "Newton",
    ],
)
@pytest.mark.parametrize("nudge", ["loss", "gradient"])
def test_every_solver(solver, nudge):
    problem = logistic(direct=True)
    assert problem.curvature[1] < 2 / 0.3
    convexity = (
        problem.curvature[0]
        if isinstance(solver, mn.Nesterov) and solver.momentum is None
        else None
    )
    result = hypergradient(
        problem,
        mn.FOBMAML(nu=NU, stencil="five-point", nudge=nudge),
        solver,
        strong_convexity=convexity,
    )
    blind = (
        blind_residual(problem)
        if isinstance(solver, mn.TorchOptimizer) and solver.optimizer is torch.optim.LBFGS
        else 0.0
    )
    assert result.residual < 1e-10 + blind
    # φ is off by up to residual / μ, ∂_x g = ½ exp(x) φ² by exp(x) φ times that, and the stencil
    # (Σ|c| = 3/2) divides it by ν.
    slope = float((problem.x.exp() * problem.solution).norm())
    assert relative_error(
        result.gradient, problem.truth
    ) < 1e-6 + 1.5 * slope * blind / problem.curvature[0] / NU / float(problem.truth.norm())
    assert 0 < result.steps <= (1000 if isinstance(solver, mn.TorchOptimizer) else solver.steps)


@pytest.mark.parametrize("make", [ridge, logistic])
@pytest.mark.parametrize(
    ("dtype", "nu", "tolerance"), [(torch.float64, 1e-3, 1e-5), (torch.float32, 1e-2, 1e-3)]
)
def test_defaults(make, dtype, nu, tolerance):
    problem = make(direct=True, dtype=dtype)
    result = mn.hypergradient(problem.inner, problem.outer, problem.x, problem.init)
    assert result.gradient.dtype == result.phi.dtype == dtype
    assert result.nu == nu
    assert relative_error(result.gradient.double(), make(direct=True).truth) < tolerance
    assert result.inner_gradients < 100
    again = mn.hypergradient(
        problem.inner,
        problem.outer,
        problem.x,
        problem.init,
        estimator=mn.FOBMAML(nu="auto", start="solution"),
    )
    assert torch.equal(again.gradient, result.gradient), "an automatic ν is that of the default"


def test_half_precision_parameters_are_solved_in_float32():
    """Displacements live in float32; what the functions see is rounded to bfloat16, so the nudge
    must be larger than its rounding.
    """
    target = torch.tensor([0.5, -1.0, 2.0])

    def inner(x, phi):
        return (phi.float() - target).square().sum() + x.float().exp() * phi.float().square().sum()

    def outer(x, phi):
        return (phi.float() - 1).square().sum()

    x, init = torch.zeros((), dtype=torch.bfloat16), torch.zeros(3, dtype=torch.bfloat16)
    solver = mn.GradientDescent(lr=0.2, steps=50)
    result = mn.hypergradient(
        inner, outer, x, init, solver=solver, estimator=mn.FOBMAML(nu=0.1, nudge="gradient")
    )
    assert result.gradient.dtype == result.phi.dtype == torch.bfloat16
    phi = target / 2  # x = 0
    assert float(result.gradient) == pytest.approx(
        float(-(2 * (phi - 1) * phi / 2).sum()), rel=0.05
    )


def test_the_default_stays_in_the_basin_of_the_solution():
    """Wells at ±1 in every coordinate, tilted by the outer loss, and a start on the ridge between
    them: cold nudged solves fall apart.
    """
    x = torch.full((3,), 0.01, dtype=torch.float64)
    init = torch.zeros(3, dtype=torch.float64)

    def inner(x, phi):
        return 0.25 * (phi.square() - 1).square().sum() - (x * phi).sum()

    def outer(x, phi):
        return 10 * phi.sum()

    warm = mn.hypergradient(inner, outer, x, init)
    assert bool((warm.phi > 0.9).all())
    truth = 10 / (3 * warm.phi.square() - 1)  # dφ/dx is 1/g''(φ)
    assert relative_error(warm.gradient, truth) < 1e-4
    cold = mn.hypergradient(inner, outer, x, init, estimator=mn.FOBMAML(nu=1e-2))
    assert relative_error(cold.gradient, truth) > 1


# ------------------------------------------------------------------- solves that have not converged


def unconverged(
    problem: Known, x: torch.Tensor, lr: float, steps: int, nu: float = 0.0
) -> torch.Tensor:
    """φ after some steps of gradient descent on g + ν f, written out."""
    phi = problem.init.clone()
    for _ in range(steps):
        phi.requires_grad_()
        (g,) = torch.autograd.grad(problem.inner(x, phi) + nu * problem.outer(x, phi), phi)
        phi = phi.detach() - lr * g
    return phi


def test_unrolled_is_the_gradient_of_the_steps():
    """Against central differences of f(x, φ_K(x)) in each entry of x."""
    problem = logistic(direct=True)
    numeric = torch.empty_like(problem.x)
    for j in range(len(numeric)):
        e = torch.zeros_like(problem.x)
        e[j] = 1e-5
        up, down = (
            problem.outer(x, unconverged(problem, x, 0.2, 3))
            for x in (problem.x + e, problem.x - e)
        )
        numeric[j] = (up - down) / 2e-5
    result = hypergradient(problem, mn.MAML(), mn.GradientDescent(lr=0.2, steps=3))
    assert relative_error(result.gradient, numeric) < 1e-8
    assert relative_error(numeric, problem.truth) > 1e-2, "three steps are far from the solution"


def test_truncated_unrolling():
    problem = logistic(direct=True)
    solver = mn.GradientDescent(lr=0.2, steps=4)
    whole, direct = (hypergradient(problem, e, solver).gradient for e in (mn.MAML(), mn.FOMAML()))
    cut = [hypergradient(problem, mn.MAML(truncate=t), solver).gradient for t in (0, 1, 2, 3, 4, 9)]
    torch.testing.assert_close(cut[0], direct, rtol=0, atol=0)
    torch.testing.assert_close(cut[4], whole, rtol=0, atol=0)
    torch.testing.assert_close(cut[5], whole, rtol=0, atol=0)
    # One step by hand: φ_4 = φ_3 − α ∂_φ g(x, φ_3) with φ_3 fixed, and ∂_x ∂_φ g = diag(exp(x) φ).
    phi_3, phi_4 = (unconverged(problem, problem.x, 0.2, k) for k in (3, 4))
    force = torch.func.grad(problem.outer, argnums=1)(problem.x, phi_4)
    torch.testing.assert_close(cut[1], direct - 0.2 * problem.x.exp() * phi_3 * force)


def test_tangent_is_the_limit_of_differences_at_any_number_of_steps():
    """d/dν ∂_x[g + νf](x, φ_K(ν)) of the algorithm as run, with ∂_x written out and K steps by
    hand.
    """
    problem = ridge(direct=True)

    def partial(nu: float) -> torch.Tensor:
        phi = unconverged(problem, problem.x, 0.2, 3, nu)
        return 0.5 * problem.x.exp() * phi.square() + nu * 0.5 * (2 * problem.x + phi)

    limit = (8 * (partial(1e-3) - partial(-1e-3)) - (partial(2e-3) - partial(-2e-3))) / 12e-3
    solver = mn.GradientDescent(lr=0.2, steps=3)
    result = hypergradient(problem, mn.FOBMAML(stencil="tangent"), solver)
    assert relative_error(result.gradient, limit) < 1e-10
    assert relative_error(limit, problem.truth) > 1e-2
    torch.testing.assert_close(result.phi, unconverged(problem, problem.x, 0.2, 3))
    difference = hypergradient(problem, mn.FOBMAML(nu=1e-2, stencil="five-point"), solver)
    assert relative_error(difference.gradient, limit) < 1e-6


def test_a_warm_forward_difference_cancels_the_drift():
    """With an unconverged base solve the un-nudged problem goes on as well: without that the drift
    over ν would swamp the estimate.
    """
    problem = ridge()
    solver = descent(problem, 12)
    result = hypergradient(
        problem, mn.FOBMAML(nu=1e-6, stencil="forward", start="solution"), solver
    )
    assert result.residual > 1e-4
    assert relative_error(result.gradient, problem.truth) < 0.05


@pytest.mark.parametrize("damping", [0.0, 0.7])
def test_damping_stiffens_the_linear_system(damping):
    """∇²g + damping is the Hessian of g + damping/2 ‖φ − φ*‖², whose solution and mixed derivatives
    are those of g.
    """
    problem = logistic(direct=True)

    def stiffer(x, phi):
        return problem.inner(x, phi) + 0.5 * damping * (phi - problem.solution).square().sum()

    expected = mn.hypergradient(
        stiffer, problem.outer, problem.x, problem.init, solver=EXACTLY, estimator=mn.Exact()
    ).gradient
    assert (
        relative_error(
            hypergradient(problem, mn.IMAML(cg_steps=8, damping=damping)).gradient, expected
        )
        < 1e-9
    )
    assert (relative_error(expected, problem.truth) > 0.05) == (damping > 0)


class Alone(Estimator):
    """An estimator that somebody else wrote and that notes nothing: the direct term."""

    def accumulate(self, inner, solver, total):
        total.query_gradient(inner, inner.solve(solver).displacement)


def test_an_estimator_of_ones_own():
    """What it does not report is found out: the solution, at the price of one more solve."""
    problem, solver = ridge(direct=True), mn.GradientDescent(lr=0.2, steps=5)
    own, known = (hypergradient(problem, estimator, solver) for estimator in (Alone(), mn.FOMAML()))
    assert torch.equal(own.gradient, known.gradient)
    assert torch.equal(own.phi, known.phi)
    assert (own.inner_gradients, known.inner_gradients) == (2 * 5 + 1, 5 + 1)


def test_evolution_strategies_converge_to_the_gradient():
    """With one x the estimate is F′ mean ε²: its relative error is about (2/n)^½."""
    problem = ridge(per_feature=False)
    errors = {n: [] for n in (4, 36)}
    for n, found in errors.items():
        for seed in range(3):
            result = hypergradient(
                problem, mn.ESMAML(sigma=1e-3, samples=n, seed=seed), descent(problem, 20)
            )
            found.append(relative_error(result.gradient, problem.truth))
    rms = {n: (sum(e * e for e in found) / len(found)) ** 0.5 for n, found in errors.items()}
    for n, error in rms.items():
        assert 0.4 * (2 / n) ** 0.5 < error < 2 * (2 / n) ** 0.5


# --------------------------------------------------------------------------------- what is reported


class Counted:
    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self, x, phi):
        self.calls += 1
        return self.function(x, phi)


@pytest.mark.parametrize(
    ("estimator", "inner", "outer", "products"),
    [
        (mn.FOBMAML(nu=0.1), 3 * 5 + 3, 2 * 5 + 3, 0),
        (mn.FOBMAML(nu=0.1, nudge="gradient"), 3 * 5 + 3, 1, 0),
        (mn.FOBMAML(nu=0.1, stencil="forward"), 2 * 5 + 2, 5 + 2, 0),
        (mn.FOBMAML(nu=0.1, stencil="forward", start="solution"), 3 * 5 + 3, 5 + 2, 0),
        (mn.FOBMAML(nu=0.1, stencil="five-point"), 5 * 5 + 5, 4 * 5 + 5, 0),
        (mn.FOBMAML(stencil="tangent"), 5 + 2, 5 + 1, 5 + 1),
        (mn.FOBMAML(stencil="tangent", nudge="gradient"), 10 + 2, 2, 5 + 1),
        (mn.FOMAML(), 5 + 1, 1, 0),
        (mn.MAML(), 5 + 1, 2, 5),
        (mn.IMAML(cg_steps=3), 5 + 2 + 3, 1, 3 + 1),
        (mn.Exact(), 5 + 3, 1, 4 + 1),
        (mn.ESMAML(samples=2), 5 * 5 + 1, 1, 0),
    ],
    ids=lambda value: (
        str(value).replace("unshrink=False", "") if not isinstance(value, int) else ""
    ),
)
def test_costs(estimator, inner, outer, products):
    """Gradients counted are calls counted (but for the outer values that evolution strategies look
    at).
    """
    problem = ridge()
    g, f = Counted(problem.inner), Counted(problem.outer)
    result = mn.hypergradient(
        g,
        f,
        problem.x,
        problem.init,
        solver=mn.GradientDescent(lr=0.2, steps=5),
        estimator=estimator,
    )
    assert (result.inner_gradients, result.outer_gradients, result.hessian_products) == (
        inner,
        outer,
        products,
    )
    assert g.calls == inner
    assert f.calls == outer + (2 * estimator.samples if isinstance(estimator, mn.ESMAML) else 0)
    assert result.steps == 5


def test_values_and_residual_belong_to_the_solution():
    problem = logistic(direct=True)
    result = hypergradient(problem, mn.FOBMAML(nu=0.1), mn.GradientDescent(lr=0.2, steps=3))
    assert result.outer == pytest.approx(float(problem.outer(problem.x, result.phi)), abs=1e-15)
    assert result.inner == pytest.approx(float(problem.inner(problem.x, result.phi)), abs=1e-15)
    assert result.residual == pytest.approx(
        float(torch.func.grad(problem.inner, argnums=1)(problem.x, result.phi).norm()), rel=1e-12
    )
    text = str(result)
    for part in (
        "|hypergradient|",
        "residual",
        "after 3 steps",
        "ν 0.1",
        "unconverged",
        "12 inner and 9 outer gradients",
    ):
        assert part in text
    assert "linear residual" in str(hypergradient(problem, mn.Exact()))


def test_the_estimated_error_bounds_that_of_independent_solves():
    """Solves that stop at random places near the solution: what they add to the error is below the
    estimate, and not far.
    """
    problem = ridge()
    converged = hypergradient(problem, mn.FOBMAML(nu=1e-2)).gradient
    sloppy = hypergradient(
        problem, mn.FOBMAML(nu=1e-2), mn.GradientDescent(lr=0.3, steps=1000, tol=1e-4)
    )
    added = relative_error(sloppy.gradient, converged)
    assert 0 < added < 10 * sloppy.error
    assert hypergradient(problem, mn.FOBMAML(nu=1e-2)).error < 1e-8 < sloppy.error
