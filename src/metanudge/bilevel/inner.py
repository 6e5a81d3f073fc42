"""A bilevel problem in the place of a group of one task: its values and derivatives by plain
autograd.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from metanudge.bilevel.problem import Bilevel, Level
from metanudge.engines import Cost, Inner, Measured
from metanudge.engines.inner import NudgedOracle
from metanudge.estimators import NonFiniteError
from metanudge.params import Params, norm
from metanudge.problem import Nudge
from metanudge.solvers.base import LinearSolver, Solution, Trace, unroll
from metanudge.solvers.conjugate_gradient import LinearSolve

Gradients = dict[str, Tensor | None]


@dataclass(frozen=True)
class Point:
    """One of the two functions at a point (x, φ).

    Attributes:
        value: the function's value.
        by_phi: its gradient in φ, with a row axis.
        by_x: its partial gradient in x, at fixed φ.
    """

    value: Tensor
    by_phi: Params
    by_x: Params


class BilevelInner(Inner):
    """g in the place of the support loss, f in that of the query loss, x in that of shared
    parameters; one row.

    Attributes:
        solution: the un-nudged one.
        linear_residual: that of the linear system of an implicit gradient, if there was one.
        depends_on_x: whether one of the functions does.
    """

    problem: Bilevel
    reports_solution = True
    nudges_at_once = 1
    solution: Solution

    def __init__(self, problem: Bilevel, cost: Cost) -> None:
        super().__init__(problem, [0], cost)
        self.linear_residual: float | None = None
        self.depends_on_x = False
        self._settled: Params | None = None
        self._seen: list[tuple[Level, Params, Point]] = []

    # --------------------------------------------------------------------------------------- solves

    def oracle(
        self, offsets: list[float], nudge: Nudge | None, force: Params | None, shift: Params | None
    ) -> NudgedOracle:
        """A shift moves x, and with it the problem itself."""
        self._forget()
        inner = self if shift is None else self._moved(shift)
        return NudgedOracle(inner, offsets, nudge if offsets[0] else None, force, None)

    def verify(self, solution: Solution, offsets: Sequence[float]) -> None:
        """The solution must be finite; a line search may have seen other points on its way."""
        _check_finite(solution, offsets[0])

    def settle(self, solution: Solution) -> None:
        """The solution to be reported."""
        _check_finite(solution)
        self.solution, self._settled = solution, solution.displacement

    @property
    def settled(self) -> bool:
        """Whether there is one."""
        return self._settled is not None

    def judge(self, solve: LinearSolve) -> None:
        """Without curvature along ∂_φ f there is no implicit gradient."""
        if bool(solve.indefinite) and float(norm(solve.x)) == 0:
            residual = float(norm(self.at("inner", self.solution.displacement).by_phi))
            raise ValueError(
                "inner has no positive curvature along the gradient of outer where the solve"
                " ended, so phi is no strict minimum and there is no implicit gradient. The"
                f" residual there is {residual:.3g}: solve more precisely, or make inner strictly"
                " convex in phi, e.g. by adding 1e-3 * phi.square().sum(). Autograd functions of"
                " your own must be differentiable twice."
            )
        self.linear_residual = float(solve.residual)

    def imprecision(
        self, solution: Solution, offsets: Sequence[float], force: Params | None
    ) -> Tensor:
        """The nudged gradient where the solve ended: both functions are evaluated there anyway.
        Nothing for what is compared with.
        """
        d = solution.displacement
        if not offsets[0]:
            return torch.zeros_like(solution.residual)
        pull = self.at("outer", d).by_phi if force is None else force
        return norm(
            {
                n: torch.add(leaf, pull[n], alpha=offsets[0])
                for n, leaf in self.at("inner", d).by_phi.items()
            }
        )

    def stream(self, meta_step: int, row: int) -> tuple[int, ...]:
        """One task, and no meta-steps."""
        return (0,)

    def apart(self, row: int) -> Inner:
        """It is one row already."""
        return self

    @property
    def theta(self) -> Params:
        """Where solves start."""
        return self.problem.parameters

    def _moved(self, shift: Params) -> BilevelInner:
        return BilevelInner(self.problem.moved(shift), self.cost)

    # ---------------------------------------------------------------------------- first derivatives

    def at(self, level: Level, d: Params) -> Point:
        """Value, gradient in φ and partial gradient in x, in one backward pass; kept until the next
        solve, at the solution for good.
        """
        for known, place, point in self._seen:
            if known == level and place is d:
                return point
        x, phi = _variables(self.problem.shared), _variables(self.problem.phi(d))
        value = self.problem.evaluate(level, x, phi)
        self._count(level)
        g = gradients(value, {**phi, **x})
        _check_dependence(level, {n: g[n] for n in phi})
        self.depends_on_x = self.depends_on_x or any(g[n] is not None for n in x)
        point = Point(
            value.detach(),
            _rows(g, d),
            {n: torch.zeros_like(t) if (leaf := g[n]) is None else leaf for n, t in x.items()},
        )
        self._seen.append((level, d, point))
        return point

    def _forget(self) -> None:
        self._seen = [seen for seen in self._seen if seen[1] is self._settled]

    def query_gradient(self, d: Params, step: int = 0, *, shared: bool = False) -> Params:
        """∂_φ f, and ∂_x f with it."""
        if not shared:
            return self._gradient("outer", d, step)[1]
        point = self.at("outer", d)
        return {**point.by_phi, **{n: leaf.unsqueeze(0) for n, leaf in point.by_x.items()}}

    def shared_gradient(
        self, d: Params, offsets: Tensor | None, weights: Sequence[float]
    ) -> Params:
        """∂_x of w (g + ν f)."""
        dtypes = {n: leaf.dtype for n, leaf in self.problem.zero_gradient().items()}
        total = {n: leaf.to(dtypes[n]) for n, leaf in self.at("inner", d).by_x.items()}
        if offsets is not None and (nu := float(offsets[0])):
            total = {
                n: torch.add(total[n], leaf, alpha=nu)
                for n, leaf in self.at("outer", d).by_x.items()
            }
        return {n: (weights[0] * leaf).unsqueeze(0) for n, leaf in total.items()}

    def measure_query(self, d: Params | None, shift: Params | None = None) -> Measured:
        """f without gradients."""
        problem = self.problem if shift is None else self.problem.moved(shift)
        with torch.no_grad():
            value = problem.evaluate(
                "outer", problem.shared, problem.phi(self.zeros(1) if d is None else d)
            ).reshape(1)
        return Measured(value, torch.full_like(value, math.nan))

    def data_value(self, d: Params, offsets: Tensor | None, step: int) -> Tensor:
        """g + ν f without gradients."""
        with torch.no_grad():
            x, phi = self.problem.shared, self.problem.phi(d)
            value = self.problem.evaluate("inner", x, phi, step)
            if offsets is not None:
                value = value + offsets[0] * self.problem.evaluate("outer", x, phi, step)
            return value.reshape(1)

    def data_gradient(
        self, d: Params, offsets: Tensor | None, step: int, batch_size: int | None
    ) -> tuple[Tensor, Params]:
        """g + ν f and its gradient in φ."""
        value, g = self._gradient("inner", d, step)
        if offsets is not None:
            outer, pull = self._gradient("outer", d, step)
            value = value + offsets[0] * outer
            g = {n: leaf.addcmul_(pull[n], offsets[0].to(leaf)) for n, leaf in g.items()}
        return value.reshape(1), g

    def _gradient(self, level: Level, d: Params, step: int) -> tuple[Tensor, Params]:
        phi = _variables(self.problem.phi(d))
        value = self.problem.evaluate(level, self.problem.shared, phi, step)
        self._count(level)
        g = gradients(value, phi)
        _check_dependence(level, g)
        # Leaves that enter as a sum share one gradient tensor, and solvers may overwrite what they
        # are given.
        return value.detach(), {n: leaf.clone() for n, leaf in _rows(g, d).items()}

    # --------------------------------------------------------------------------- second derivatives

    def data_hvp(
        self, d: Params, v: Params, offsets: Tensor | None, step: int, batch_size: int | None
    ) -> tuple[Tensor, Params, Params]:
        """g + ν f, its gradient and its Hessian in φ times v."""
        value, g, hv = self._hvp("inner", d, v, step)
        if offsets is not None:
            more = self._hvp("outer", d, v, step)
            value = value + offsets[0] * more[0]
            g, hv = (
                {n: a[n] + offsets[0].to(a[n]) * b[n] for n in a}
                for a, b in ((g, more[1]), (hv, more[2]))
            )
        return value.reshape(1), g, hv

    def _hvp(self, level: Level, d: Params, v: Params, step: int) -> tuple[Tensor, Params, Params]:
        phi = _variables(self.problem.phi(d))
        value, g = self._graph(level, self.problem.shared, phi, step)
        hv = self._second(g, v, phi)
        return (
            value.detach(),
            _rows({n: None if t is None else t.detach() for n, t in g.items()}, d),
            _rows(hv, d),
        )

    def shared_hvp(self, d: Params, v: Params) -> Params:
        """∂_x ⟨∂_φ g, v⟩, which is the derivative of ∂_x g along v in φ."""
        x, phi = _variables(self.problem.shared), _variables(self.problem.phi(d))
        _, g = self._graph("inner", x, phi, 0)
        product = self._second(g, v, x)
        return {
            n: (torch.zeros_like(t) if (leaf := product[n]) is None else leaf).unsqueeze(0)
            for n, t in x.items()
        }

    def support_gradient(self, d: Params, step: int, batch_size: int | None) -> Params:
        """∂g by φ and by x."""
        x, phi = _variables(self.problem.shared), _variables(self.problem.phi(d))
        value = self.problem.evaluate("inner", x, phi, step)
        self._count("inner")
        return self._by_both(gradients(value, {**phi, **x}), d, x)

    def support_hvp(self, d: Params, v: Params, step: int, batch_size: int | None) -> Params:
        """∂⟨∂_φ g, v⟩ by φ and by x."""
        x, phi = _variables(self.problem.shared), _variables(self.problem.phi(d))
        _, g = self._graph("inner", x, phi, step)
        return self._by_both(self._second(g, v, {**phi, **x}), d, x)

    def _by_both(self, g: Gradients, d: Params, x: Params) -> Params:
        self.depends_on_x = self.depends_on_x or any(g[n] is not None for n in x)
        by_x = {n: (torch.zeros_like(t) if (leaf := g[n]) is None else leaf) for n, t in x.items()}
        return {**_rows(g, d), **{n: leaf.unsqueeze(0) for n, leaf in by_x.items()}}

    def hessian(self, d: Params) -> Tensor:
        """That of g in φ, row by row from one graph; refused where it is singular."""
        phi = _variables(self.problem.phi(d))
        _, g = self._graph("inner", self.problem.shared, phi, 0)
        rows = []
        for entry in torch.cat([t.flatten().to(d[n].dtype) for n, t in g.items() if t is not None]):
            self.cost.hessian_products += 1
            with second_derivatives():
                row = _rows(gradients(entry, phi, retain_graph=True), d)
            rows.append(torch.cat([leaf.flatten() for leaf in row.values()]))
        hessian = torch.stack(rows)
        if bool(torch.linalg.lu_factor_ex(hessian).info):
            raise ValueError(
                "The Hessian of inner in phi is singular where the solve ended, so inner does not"
                " determine phi and there is no implicit gradient. Make inner strictly convex in"
                " phi, e.g. by adding 1e-3 * phi.square().sum()."
            )
        return hessian.unsqueeze(0)

    def unrolled_gradient(self, solver: LinearSolver, *, unrolled: int) -> tuple[Params, Solution]:
        """d f(x, φ_K(x)) / dx, backwards through the steps."""
        trace = Trace(self.oracle([0.0], None, None, None))
        x = _variables(self.problem.shared)

        def gradient(d: Params, step: int) -> Params:
            if step < solver.steps - unrolled:
                value, g = self._gradient("inner", d, step)
            else:
                phi = {
                    n: t if t.requires_grad else t.requires_grad_()
                    for n, t in self.problem.phi(d).items()
                }
                value, graph = self._graph("inner", x, phi, step)
                g = _rows(graph, d)
            trace.record(value.reshape(1), {n: leaf.detach() for n, leaf in g.items()})
            return g

        d = unroll(
            solver,
            self.zeros(1),
            gradient,
            strong_convexity=self.problem.smallest_lam,
            last=unrolled,
        )
        with second_derivatives():
            found = gradients(self.problem.evaluate("outer", x, self.problem.phi(d)), x)
        self._count("outer")
        self.cost.hessian_products += unrolled
        g = {
            n: (torch.zeros_like(x[n]) if leaf is None else leaf).unsqueeze(0)
            for n, leaf in found.items()
        }
        return g, trace.solution(
            {n: leaf.detach() for n, leaf in d.items()}, torch.full((1,), solver.steps)
        )

    def _graph(self, level: Level, x: Params, phi: Params, step: int) -> tuple[Tensor, Gradients]:
        value = self.problem.evaluate(level, x, phi, step)
        self._count(level)
        g = gradients(value, phi, create_graph=True)
        _check_dependence(level, g)
        return value, g

    def _second(self, g: Gradients, v: Params, by: Params) -> Gradients:
        self.cost.hessian_products += 1
        product = torch.stack([(t * v[n][0]).sum() for n, t in g.items() if t is not None]).sum()
        with second_derivatives():
            return gradients(product, by)

    def _count(self, level: Level) -> None:
        self.cost.support_gradients += level == "inner"
        self.cost.query_gradients += level == "outer"


@contextmanager
def second_derivatives() -> Iterator[None]:
    """Say, where torch cannot take a second derivative, who does without."""
    try:
        yield
    except RuntimeError as error:
        error.add_note(
            "A second derivative was needed. FOBMAML with a finite difference, e.g."
            " stencil='symmetric', needs first derivatives only, and so do all solvers but"
            " NewtonCG."
        )
        raise


def gradients(
    value: Tensor, by: Params, *, create_graph: bool = False, retain_graph: bool | None = None
) -> Gradients:
    """Gradients of a scalar; None where it does not depend on a tensor."""
    if not value.requires_grad:
        return dict.fromkeys(by)
    found = torch.autograd.grad(
        value,
        list(by.values()),
        create_graph=create_graph,
        retain_graph=retain_graph,
        allow_unused=True,
    )
    return dict(zip(by, found, strict=True))


def _variables(tensors: Params) -> Params:
    return {n: t.detach().requires_grad_() for n, t in tensors.items()}


def _rows(g: Gradients, d: Params) -> Params:
    return {
        n: (
            torch.zeros_like(at)
            if (leaf := g[n]) is None
            else leaf.to(at.dtype).unsqueeze(0).contiguous()
        )
        for n, at in d.items()
    }


def _check_dependence(level: Level, g: Gradients) -> None:
    unused = [n for n, leaf in g.items() if leaf is None]
    if level == "inner" and unused:
        raise ValueError(
            f"inner(x, phi) does not depend on {', '.join(unused)}, so nothing determines the"
            " solution there. Use it in inner (and look for .detach(), torch.no_grad() or .item()"
            " on the way), or leave it out of init."
        )
    if level == "outer" and len(unused) == len(g):
        raise ValueError(
            "outer(x, phi) does not depend on phi, so the inner problem plays no part and the"
            " hypergradient is the plain gradient of outer in x. Use phi in outer (and look for"
            " .detach(), torch.no_grad() or .item() on the way), or call outer(x, phi).backward()"
            " without a bilevel solve."
        )


def _check_finite(solution: Solution, nu: float = 0.0) -> None:
    ends = [solution.residual, *(leaf.sum() for leaf in solution.displacement.values())]
    if all(bool(torch.isfinite(end).all()) for end in ends):
        return
    seen = torch.isfinite(solution.losses) & torch.isfinite(solution.residuals)
    first = int(torch.nonzero(~seen)[0, 0]) if not bool(seen.all()) else len(seen)
    nudged = f" nudged by ν = {nu:g}" if nu else ""
    raise NonFiniteError(
        f"The inner problem{nudged} became NaN or Inf at gradient evaluation {first} of its solve."
        " Usually the steps diverge: use a smaller lr, or a solver with a line search (LBFGS,"
        " NewtonCG). At evaluation 0, look for NaN in x, init or the data. Nothing was written to"
        " .grad."
    )
