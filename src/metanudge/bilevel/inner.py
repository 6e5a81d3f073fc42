"""A bilevel problem in the place of a group of one task: its values and derivatives by plain
autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, Unpack

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from metanudge.bilevel.problem import Bilevel, Level
from metanudge.engines import Cost, Inner, Measured
from metanudge.engines.inner import NudgedOracle, Nudging
from metanudge.engines.once import NoSecondDerivative, refuse_once_differentiable
from metanudge.estimators import NonFiniteError
from metanudge.params import Params, flatten, norm, wide
from metanudge.solvers.base import LinearSolver, Solution, Trace, unroll
from metanudge.solvers.conjugate_gradient import LinearSolve

Gradients = dict[str, Tensor | None]
Taken = TypeVar("Taken")


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
    solution: Solution

    def __init__(self, problem: Bilevel, cost: Cost) -> None:
        super().__init__(problem, [0], cost)
        self.theta = problem.parameters
        self.linear_residual: float | None = None
        self.depends_on_x = False
        self._settled: Params | None = None
        self._seen: list[tuple[Level, Params, Point]] = []

    # --------------------------------------------------------------------------------------- solves

    def oracle(self, **how: Unpack[Nudging]) -> NudgedOracle:
        """A shift moves x, and with it the problem itself."""
        self._forget()
        shift = how.pop("shift", None)
        if not how.get("offsets", (0.0,))[0]:
            how["nudge"] = None
        moved = self if shift is None else BilevelInner(self.problem.moved(shift), self.cost)
        return NudgedOracle(moved, **how)

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
        if bool(solve.singular):
            raise ValueError(
                "The Hessian of inner in phi is singular where the solve ended, so inner does not"
                " determine phi and there is no implicit gradient. Make inner strictly convex in"
                " phi, e.g. by adding 1e-3 * phi.square().sum()."
            )
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
        """The nudged gradient where the solve ended: both functions are evaluated there anyway. 0
        for what is compared with.
        """
        d, (nu,) = solution.displacement, offsets
        if not nu:
            return torch.zeros_like(solution.residual)
        pull = self.at("outer", d).by_phi if force is None else force
        own = self.at("inner", d).by_phi
        return norm({n: torch.add(leaf, pull[n], alpha=nu) for n, leaf in own.items()})

    def stream(self, meta_step: int, row: int) -> tuple[int, ...]:
        """One task, and no meta-steps."""
        return (0,)

    # ---------------------------------------------------------------------------- first derivatives

    def at(self, level: Level, d: Params) -> Point:
        """Value, gradient in φ and partial gradient in x, in one backward pass; kept until the next
        solve, at the solution for good.
        """
        for known, place, point in self._seen:
            if known == level and place is d:
                return point
        x, phi = _variables(self.problem.shared), _variables(self.problem.phi(d))
        value, g = self._differentiate(level, x, phi, by_x=True)
        self.depends_on_x = self.depends_on_x or any(g[n] is not None for n in x)
        point = Point(value.detach(), _rows(g, d), _filled(g, x))
        self._seen.append((level, d, point))
        return point

    def _forget(self) -> None:
        self._seen = [seen for seen in self._seen if seen[1] is self._settled]

    def query_gradient(self, d: Params, step: int = 0, *, shared: bool = False) -> Params:
        """∂_φ f, and ∂_x f with it."""
        if not shared:
            return self._gradient("outer", d, step)[1]
        point = self.at("outer", d)
        return point.by_phi | _as_rows(point.by_x)

    def shared_gradient(
        self, d: Params, offsets: Tensor | None, weights: Sequence[float]
    ) -> Params:
        """∂_x of w (g + ν f)."""
        total = {n: leaf.to(wide(leaf.dtype)) for n, leaf in self.at("inner", d).by_x.items()}
        if offsets is not None and (nu := float(offsets[0])):
            direct = self.at("outer", d).by_x
            total = {n: torch.add(leaf, direct[n], alpha=nu) for n, leaf in total.items()}
        return _as_rows({n: weights[0] * leaf for n, leaf in total.items()})

    def measure_query(self, d: Params | None, shift: Params | None = None) -> Measured:
        """f without gradients."""
        problem = self.problem if shift is None else self.problem.moved(shift)
        phi = problem.phi(self.zeros(1) if d is None else d)
        with torch.no_grad():
            value = problem.evaluate("outer", problem.shared, phi).reshape(1)
        return Measured(value, torch.full_like(value, math.nan))

    def data_value(self, d: Params, offsets: Tensor | None, step: int) -> Tensor:
        """g + ν f without gradients."""
        x, phi = self.problem.shared, self.problem.phi(d)
        with torch.no_grad():
            (value,) = _nudged(lambda level: (self.problem.evaluate(level, x, phi, step),), offsets)
        return value.reshape(1)

    def data_gradient(
        self, d: Params, offsets: Tensor | None, step: int, batch_size: int | None
    ) -> tuple[Tensor, Params]:
        """g + ν f and its gradient in φ."""
        value, g = _nudged(lambda level: self._gradient(level, d, step), offsets)
        return value.reshape(1), g

    def _gradient(self, level: Level, d: Params, step: int) -> tuple[Tensor, Params]:
        phi = _variables(self.problem.phi(d))
        value, g = self._differentiate(level, self.problem.shared, phi, step)
        # Leaves that enter as a sum share one gradient tensor, and solvers may overwrite what they
        # are given.
        return value.detach(), {n: leaf.clone() for n, leaf in _rows(g, d).items()}

    def _differentiate(
        self,
        level: Level,
        x: Params,
        phi: Params,
        step: int = 0,
        *,
        by_x: bool = False,
        create_graph: bool = False,
    ) -> tuple[Tensor, Gradients]:
        """One of the functions and its gradient, by φ alone or by both."""
        value = self.problem.evaluate(level, x, phi, step)
        self.cost.support_gradients += level == "inner"
        self.cost.query_gradients += level == "outer"
        if create_graph:
            refuse_once_differentiable(value, phi.values())
        g = gradients(value, phi | x if by_x else phi, create_graph=create_graph)
        _check_dependence(level, {n: g[n] for n in phi})
        return value, g

    # --------------------------------------------------------------------------- second derivatives

    def data_hvp(
        self, d: Params, v: Params, offsets: Tensor | None, step: int, batch_size: int | None
    ) -> tuple[Tensor, Params, Params]:
        """g + ν f, its gradient and its Hessian in φ times v."""
        value, g, hv = _nudged(lambda level: self._hvp(level, d, v, step), offsets)
        return value.reshape(1), g, hv

    def _hvp(self, level: Level, d: Params, v: Params, step: int) -> tuple[Tensor, Params, Params]:
        phi = _variables(self.problem.phi(d))
        value, g = self._differentiate(level, self.problem.shared, phi, step, create_graph=True)
        hv = _rows(self._product(g, v, phi), d)
        return value.detach(), {n: leaf.detach() for n, leaf in _rows(g, d).items()}, hv

    def _product(self, g: Gradients, v: Params, by: Params) -> Gradients:
        """The derivative of ⟨g, v⟩."""
        self.cost.hessian_products += 1
        product = torch.stack([(t * v[n][0]).sum() for n, t in g.items() if t is not None]).sum()
        return second_gradients(product, by)

    def support_gradient(self, d: Params, step: int, batch_size: int | None) -> Params:
        """∂g by φ and by x."""
        x, phi = _variables(self.problem.shared), _variables(self.problem.phi(d))
        _, g = self._differentiate("inner", x, phi, step, by_x=True)
        return self._by_both(g, d, x)

    def support_hvp(self, d: Params, v: Params, step: int, batch_size: int | None) -> Params:
        """∂⟨∂_φ g, v⟩ by φ and by x."""
        x, phi = _variables(self.problem.shared), _variables(self.problem.phi(d))
        _, g = self._differentiate("inner", x, phi, step, create_graph=True)
        return self._by_both(self._product(g, v, phi | x), d, x)

    def _by_both(self, g: Gradients, d: Params, x: Params) -> Params:
        self.depends_on_x = self.depends_on_x or any(g[n] is not None for n in x)
        # as in `_gradient`: the way back overwrites what it is given
        return {n: leaf.clone() for n, leaf in _rows(g, d).items()} | _as_rows(_filled(g, x))

    def hessian(self, d: Params) -> Tensor:
        """That of g in φ, row by row from one graph."""
        phi = _variables(self.problem.phi(d))
        _, g = self._differentiate("inner", self.problem.shared, phi, create_graph=True)
        rows = []
        for entry in torch.cat([t.flatten().to(d[n].dtype) for n, t in g.items() if t is not None]):
            self.cost.hessian_products += 1
            row = second_gradients(entry, phi, retain_graph=True)
            rows.append(flatten(_rows(row, d)))
        return torch.cat(rows).unsqueeze(0)

    def unrolled_gradient(self, solver: LinearSolver, *, unrolled: int) -> tuple[Params, Solution]:
        """d f(x, φ_K(x)) / dx, backwards through the steps."""
        trace, mu = Trace(self.oracle()), self.problem.smallest_lam
        x = _variables(self.problem.shared)

        def gradient(d: Params, step: int) -> Params:
            phi = {n: t.requires_grad_() for n, t in self.problem.phi(d).items()}
            followed = step >= solver.steps - unrolled
            value, found = self._differentiate("inner", x, phi, step, create_graph=followed)
            g = _rows(found, d)
            trace.record(value.reshape(1), {n: leaf.detach() for n, leaf in g.items()})
            return g

        d = unroll(solver, self.zeros(1), gradient, strong_convexity=mu, last=unrolled)
        found = second_gradients(self.problem.evaluate("outer", x, self.problem.phi(d)), x)
        self.cost.query_gradients += 1
        self.cost.hessian_products += unrolled
        end = {n: leaf.detach() for n, leaf in d.items()}
        return _as_rows(_filled(found, x)), trace.solution(end, solver.steps)


def second_gradients(value: Tensor, by: Params, *, retain_graph: bool | None = None) -> Gradients:
    """Gradients of what was made from gradients; says, where torch has none, who does without."""
    try:
        return gradients(value, by, retain_graph=retain_graph)
    except RuntimeError as error:
        missing = NoSecondDerivative(str(error))
        missing.add_note(
            "A second derivative was needed. FOBMAML with a finite difference, e.g."
            " stencil='symmetric', needs first derivatives only, and so do"
            " MAML(products='difference') and all solvers but NewtonCG."
        )
        raise missing from error


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


def _nudged(take: Callable[[Level], Taken], offsets: Tensor | None) -> Taken:
    """What is taken of g, plus ν times the same of f."""
    own = take("inner")
    if offsets is None:
        return own
    nu = offsets[0]

    def add(a: Tensor, b: Tensor) -> Tensor:  # a value, 0-d, may become as wide as ν
        return torch.addcmul(a, b, nu.to(a)) if a.ndim else a + nu * b

    nudged: Taken = pytree.tree_map(add, own, take("outer"))
    return nudged


def _filled(g: Gradients, like: Params) -> Params:
    """Gradients by these tensors, zero where there is none."""
    return {n: torch.zeros_like(t) if (leaf := g[n]) is None else leaf for n, t in like.items()}


def _as_rows(tensors: Params) -> Params:
    return {n: leaf.unsqueeze(0) for n, leaf in tensors.items()}


def _rows(g: Gradients, d: Params) -> Params:
    """Gradients by φ in the shape and dtype of displacements."""
    leaves = _as_rows(_filled(g, {n: leaf[0] for n, leaf in d.items()}))
    return {n: leaf.to(d[n].dtype).contiguous() for n, leaf in leaves.items()}


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
