"""FO-B-MAML on any bilevel problem: how ∂_x[g + ν f] moves with ν, by differences or by a tangent."""

from __future__ import annotations

import math

import torch

from metanudge.bilevel.estimate import Estimate, add, look, size, solve_plainly, total
from metanudge.bilevel.oracle import NudgedInner, solve
from metanudge.bilevel.problem import Bilevel
from metanudge.estimators import FOBMAML
from metanudge.estimators.stencils import STENCILS
from metanudge.params import Params
from metanudge.solvers.base import LinearSolver, Solution, Solver, Trace


def nudged(problem: Bilevel, solver: Solver, estimator: FOBMAML) -> Estimate:
    """∇F(x) = d/dν ∂_x[g + ν f](x, φ_ν) at ν = 0."""
    if estimator.stencil == "tangent":
        assert isinstance(solver, LinearSolver)
        return _tangent(problem, solver, estimator)
    return _difference(problem, solver, estimator)


def _difference(problem: Bilevel, solver: Solver, estimator: FOBMAML) -> Estimate:
    """1/ν Σ_j c_j (∂_x g(x, φ_j) + ν_j ∂_x f(x, φ_j)); with the gradient nudge 1/ν Σ_j c_j ∂_x g(x, φ_j) + ∂_x f(x, φ_0)."""
    stencil, nu = STENCILS[estimator.stencil], estimator.nu
    assert isinstance(nu, (int, float))
    solved = solve_plainly(problem, solver)
    force = solved.outer.by_phi if estimator.nudge == "gradient" else None
    start = solved.d if estimator.start == "solution" else None
    reference = solved.inner.by_x
    if stencil.base and start is not None:  # the un-nudged solve goes on as well, or its drift would look like an effect of the nudge
        reference = problem.at("inner", solve(problem, solver, start=start).displacement).by_x

    gradient, residuals = total(problem), 0.0
    for offset, coefficient in zip(stencil.offsets, stencil.coefficients, strict=True):
        d = solve(problem, solver, nu=offset * nu, force=force, start=start).displacement
        inner = problem.at("inner", d)
        # The coefficients and the base's weight sum to 0: differences from the base come to the same, with less rounding.
        add(gradient, {n: leaf - reference[n] for n, leaf in inner.by_x.items()}, coefficient / nu)
        pull = force
        if pull is None:
            outer = problem.at("outer", d)
            add(gradient, outer.by_x, coefficient * offset)
            pull = outer.by_phi
        residuals += abs(coefficient) * size({n: torch.add(leaf, pull[n], alpha=offset * nu) for n, leaf in inner.by_phi.items()})
    if force is not None:
        add(gradient, solved.outer.by_x)
    signal = nu * size(solved.outer.by_phi)
    return Estimate(gradient, solved, error=residuals / signal if signal else math.inf)


def _tangent(problem: Bilevel, solver: LinearSolver, estimator: FOBMAML) -> Estimate:
    """∂_x f(x, φ_0) + ∂_φ∂_x g(x, φ_0) t, with t = dφ_ν/dν at ν = 0 carried through the solver's steps."""
    start = problem.zeros()
    force: Params | None = None
    if estimator.nudge == "gradient" or estimator.start == "solution":
        first = solve(problem, solver).displacement
        force = problem.gradient("outer", first)[1] if estimator.nudge == "gradient" else None
        start = first if estimator.start == "solution" else start
    solution, tangent = _follow(problem, solver, start, force)
    solved = look(problem, solution)
    return Estimate(total(problem, solved.outer.by_x, problem.mixed(solved.d, tangent)), solved)


def _follow(problem: Bilevel, solver: LinearSolver, d: Params, force: Params | None) -> tuple[Solution, Params]:
    """Run the solver and, beside it, the same linear update on the tangent t = dφ/dν, whose gradient is ∇²g t + ∇p."""
    oracle = NudgedInner(problem)
    trace, mu = Trace(oracle), oracle.strong_convexity
    tangent = problem.zeros()
    memory, tangent_memory = solver.memory(d), solver.memory(tangent)
    for step in range(solver.steps):
        pull = problem.gradient("outer", d, step)[1] if force is None else force
        value, g, hv = problem.hvp("inner", d, tangent, step)
        trace.record(value.reshape(1), g)
        hv = {n: leaf + pull[n] for n, leaf in hv.items()}
        d, memory = solver.update(d, g, memory, strong_convexity=mu, inplace=False)
        tangent, tangent_memory = solver.update(tangent, hv, tangent_memory, strong_convexity=mu, inplace=False)
    steps = torch.full((1,), solver.steps)
    return trace.solution(solver.result(d, memory), steps), solver.result(tangent, tangent_memory)
