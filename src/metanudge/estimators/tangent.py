"""The tangent: dφ_ν/dν at ν = 0 by forward-mode differentiation of the solver's steps in the scalar
ν.

No ν, no truncation error, and memory that does not grow with the steps (the paper's remark that
differentiating in ν costs MAML's memory holds for reverse mode only).
"""

from __future__ import annotations

from metanudge.engines import Inner
from metanudge.engines.inner import NudgedOracle
from metanudge.estimators.centre import centre_shift
from metanudge.estimators.stencils import StartName
from metanudge.estimators.total import MetaGradient
from metanudge.params import Params, norm
from metanudge.problem import Nudge
from metanudge.solvers.base import LinearSolver, Solution, Solver, Trace


def add_tangent(
    total: MetaGradient,
    inner: Inner,
    solver: Solver,
    *,
    nudge: Nudge,
    start: StartName,
    scale: Params | None,
) -> None:
    """Add −λ dφ/dν of a group of tasks; the arguments are those of `FOBMAML`, `scale` stands in
    place of λ.
    """
    assert isinstance(solver, LinearSolver)
    d, tangent = inner.zeros(inner.tasks), inner.zeros(inner.tasks)
    force: Params | None = None
    once = nudge == "loss" and start == "theta"
    # f is evaluated there anyway, or has to be
    direct_at_end = nudge == "loss" or inner.reports_solution
    if not once:
        solution = inner.solve(solver)
        total.record(inner, solution)
        if nudge == "gradient" or start == "shifted":
            force = total.query_gradient(inner, solution.displacement, direct=not direct_at_end)
        if start == "solution":
            d = solution.displacement
        elif start == "shifted":
            assert force is not None
            tangent = {n: -leaf for n, leaf in centre_shift(inner, force).items()}
    solution, tangent = _follow(inner, solver, d, tangent, force if nudge == "gradient" else None)
    total.record_solution(inner, solution, share=1.0 if once else 0.0)
    total.check(inner.places, "tangent", norm(tangent))
    if direct_at_end and inner.problem.shared:
        total.query_gradient(inner, solution.displacement)
    total.add_response(inner, solution.displacement, tangent, 1.0, scale)


def _follow(
    inner: Inner, solver: LinearSolver, d: Params, tangent: Params, force: Params | None
) -> tuple[Solution, Params]:
    """Run the solver and, beside it, the same linear update on the tangent dφ/dν, whose gradient is
    (∇²f̂ + λ)t + ∇p.
    """
    proximal, mu = inner.problem.proximal, inner.problem.smallest_lam
    trace = Trace(NudgedOracle(inner))
    memory, tangent_memory = solver.memory(d), solver.memory(tangent)
    for step in range(solver.steps):
        pull = force if force is not None else inner.query_gradient(d, step)
        loss, g, hv = inner.data_hvp(d, tangent, None, step, solver.batch_size)
        proximal.add_force(g, d, inner.theta)
        hv = proximal.add_curvature(hv, d, tangent, inner.theta)
        hv = {n: leaf + pull[n] for n, leaf in hv.items()}
        trace.record(loss, g)
        d, memory = solver.update(d, g, memory, mu=mu, inplace=False)
        tangent, tangent_memory = solver.update(tangent, hv, tangent_memory, mu=mu, inplace=False)
    solution = trace.solution(solver.result(d, memory), solver.steps)
    return solution, solver.result(tangent, tangent_memory)
