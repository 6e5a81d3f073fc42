"""The other ways to differentiate a bilevel problem: unrolled, implicit, dense, direct, and by evolution strategies."""

from __future__ import annotations

import torch

from metanudge.bilevel.estimate import Estimate, Solved, add, look, size, solve_plainly, total
from metanudge.bilevel.oracle import NudgedInner, solve
from metanudge.bilevel.problem import Bilevel, gradients, second_derivatives
from metanudge.engines.randomness import mix
from metanudge.estimators import ESMAML, FOMAML, IMAML, MAML, Exact
from metanudge.params import Params, flatten, unflatten
from metanudge.solvers.base import LinearSolver, Solver, Trace
from metanudge.solvers.conjugate_gradient import conjugate_gradient


def direct(problem: Bilevel, solver: Solver, estimator: FOMAML) -> Estimate:
    """∂_x f(x, φ_0): what moves F through φ is left out."""
    solved = solve_plainly(problem, solver)
    return Estimate(total(problem, solved.outer.by_x), solved)


def unrolled(problem: Bilevel, solver: Solver, estimator: MAML) -> Estimate:
    """d f(x, φ_K(x)) / dx, backwards through the solver's steps (the last `truncate` of them)."""
    assert isinstance(solver, LinearSolver)
    differentiated = estimator.graphs(solver)
    oracle = NudgedInner(problem)
    trace = Trace(oracle)
    x = {n: t.detach().requires_grad_() for n, t in problem.x.items()}
    d = problem.zeros()
    memory = solver.memory(d)
    for step in range(solver.steps):
        if step < solver.steps - differentiated:
            value, g = problem.gradient("inner", d, step)
        else:
            value, g = problem.differentiable_gradient(x, d, step)
        trace.record(value.reshape(1), {n: leaf.detach() for n, leaf in g.items()})
        d, memory = solver.update(d, g, memory, strong_convexity=oracle.strong_convexity, inplace=False)
    d = solver.result(d, memory)
    with second_derivatives():
        found = gradients(problem.evaluate("outer", x, problem.phi(d)), x)
    problem.evaluations.outer_gradients += 1
    problem.evaluations.hessian_products += differentiated
    end = {n: leaf.detach() for n, leaf in d.items()}
    solved = look(problem, trace.solution(end, torch.full((1,), solver.steps)))
    return Estimate(total(problem, {n: torch.zeros_like(x[n]) if leaf is None else leaf for n, leaf in found.items()}), solved)


def implicit(problem: Bilevel, solver: Solver, estimator: IMAML) -> Estimate:
    """The implicit function theorem at φ_0, its linear system solved by conjugate gradient."""
    solved = solve_plainly(problem, solver)

    def matvec(v: Params) -> Params:
        return problem.hvp("inner", solved.d, v)[2]

    linear = conjugate_gradient(matvec, solved.outer.by_phi, steps=estimator.cg_steps, tol=estimator.tol)
    if bool(linear.indefinite) and size(linear.x) == 0:
        raise ValueError(
            "inner has no positive curvature along the gradient of outer where the solve ended, so phi is no strict minimum and there is "
            f"no implicit gradient. The residual there is {size(solved.inner.by_phi):.3g}: solve more precisely, or make inner strictly "
            "convex in phi, e.g. by adding 1e-3 * phi.square().sum(). Autograd functions of your own must be differentiable twice."
        )
    return _implicit(problem, solved, linear.x, float(linear.residual))


def dense(problem: Bilevel, solver: Solver, estimator: Exact) -> Estimate:
    """The implicit function theorem at φ_0 with the whole Hessian: the oracle the others are measured against."""
    count = sum(t.numel() for t in problem.init.values())
    if count > estimator.max_parameters:
        raise ValueError(
            f"Exact builds a dense Hessian of {count} × {count} entries; the limit is {estimator.max_parameters} entries of phi. "
            "Use IMAML(cg_steps=200, tol=1e-10) instead, or raise max_parameters."
        )
    solved = solve_plainly(problem, solver)
    hessian, target = problem.hessian(solved.d), flatten(solved.outer.by_phi)[0]
    v, info = torch.linalg.solve_ex(hessian, target)
    if int(info):
        raise ValueError(
            "The Hessian of inner in phi is singular where the solve ended, so inner does not determine phi and there is no implicit "
            "gradient. Make inner strictly convex in phi, e.g. by adding 1e-3 * phi.square().sum()."
        )
    return _implicit(problem, solved, unflatten(v.unsqueeze(0), solved.d), float((hessian @ v - target).norm()))


def _implicit(problem: Bilevel, solved: Solved, v: Params, residual: float) -> Estimate:
    """∂_x f − ∂_x⟨∂_φ g, v⟩ with ∇²g v = ∇f."""
    gradient = total(problem, solved.outer.by_x)
    add(gradient, problem.mixed(solved.d, v), -1.0)
    signal = size(solved.outer.by_phi)
    return Estimate(gradient, solved, linear_residual=residual / signal if signal else 0.0)


def smoothed(problem: Bilevel, solver: Solver, estimator: ESMAML) -> Estimate:
    """1/(2σn) Σ_s [F(x + σε_s) − F(x − σε_s)] ε_s with F(x) = f(x, φ(x)): no gradient of f, and none in x, is used."""
    solved = solve_plainly(problem, solver)
    gradient = total(problem)
    for sample in range(estimator.samples):
        generator = torch.Generator().manual_seed(mix(estimator.seed, 0, sample, 3))
        noise = {n: torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t) for n, t in problem.x.items()}
        for sign in (1.0, -1.0):
            moved = problem.moved({n: torch.add(t, noise[n], alpha=sign * estimator.sigma) for n, t in problem.x.items()})
            d = solve(moved, solver).displacement
            with torch.no_grad():
                value = float(moved.evaluate("outer", moved.x, moved.phi(d)))
            add(gradient, noise, sign * value / (2 * estimator.sigma * estimator.samples))
    return Estimate(gradient, solved)
