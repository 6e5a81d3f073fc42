"""`hypergradient`, the derivative of an outer loss through the solution of an inner problem, and
`solve_bilevel`, that loss as a node of torch's graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from metanudge.bilevel.inner import BilevelInner
from metanudge.bilevel.problem import Bilevel, Function, Level
from metanudge.bilevel.tree import Tree
from metanudge.engines import Cost
from metanudge.engines.undisturbed import uninterrupted
from metanudge.estimators import ESTIMATORS, FOBMAML, Estimator, NonFiniteError
from metanudge.estimators.total import MetaGradient
from metanudge.html_table import html_table
from metanudge.params import norm
from metanudge.solvers import LBFGS, Nesterov, Solver
from metanudge.solvers.base import check_positive


@dataclass(frozen=True)
class Hypergradient:
    """∇F(x), and what is known about it.

    Attributes:
        gradient: ∇F, in the structure of x; None in the place of leaves that are no floating
            tensors.
        phi: the inner solution φ_0, in the structure of `init`.
        outer, inner: values of the two functions at (x, φ_0).
        residual: ‖∂_φ g‖ at φ_0; 0 at an exact solution.
        steps: steps of the un-nudged solve.
        nu: nudge used; None for estimators without one.
        error: estimated relative error of the difference from nudged solves that stopped early,
            `Σ_j |c_j| residual_j / (ν ‖∂_φ f‖)`; errors that the solves share cancel, so it is a
            cautious one. None for estimators without a difference.
        linear_residual: relative residual of the linear system of `IMAML` and `Exact`; None for the
            others.
        inner_gradients, outer_gradients, hessian_products: backward passes through each function,
            and second ones, in all.
    """

    gradient: Any
    phi: Any
    outer: float
    inner: float
    residual: float
    steps: int
    nu: float | None
    error: float | None
    linear_residual: float | None
    inner_gradients: int
    outer_gradients: int
    hessian_products: int

    def _facts(self) -> dict[str, str]:
        leaves = [leaf for leaf in pytree.tree_leaves(self.gradient) if leaf is not None]
        size = math.sqrt(sum(float(leaf.double().square().sum()) for leaf in leaves))
        cost = f"{self.inner_gradients} inner and {self.outer_gradients} outer gradients"
        if self.hessian_products:
            cost += f", {self.hessian_products} Hessian products"
        facts = {"|hypergradient|": f"{size:.4g}", "outer": f"{self.outer:.4g}"}
        facts |= {"inner": f"{self.inner:.4g}"}
        facts |= {"residual": f"{self.residual:.2g} after {self.steps} steps"}
        if self.nu is not None:
            facts["ν"] = f"{self.nu:g}"
        if self.error is not None:
            facts["error from unconverged solves"] = f"at most about {self.error:.1g}"
        if self.linear_residual is not None:
            facts["linear residual"] = f"{self.linear_residual:.1g}"
        return facts | {"cost": cost}

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self._facts().items())

    def _repr_html_(self) -> str:
        return html_table(self._facts().items())


def hypergradient(
    inner: Function,
    outer: Function,
    x: Any,
    init: Any,
    *,
    solver: Solver | None = None,
    estimator: Estimator | None = None,
    strong_convexity: float | None = None,
    seed: int = 0,
) -> Hypergradient:
    """∇F(x) of F(x) = f(x, φ*(x)), φ*(x) = argmin_φ g(x, φ), for any two functions of pytrees of
    tensors.

    Args:
        inner: g(x, phi), a scalar; no proximal term is added to it.
        outer: f(x, phi), a scalar; it may depend on x directly as well.
        x: what to differentiate by: a tensor, or a dict, list or tuple of tensors. Every floating
            tensor in it counts.
        init: where solves start, in the structure that `phi` shall have. It counts as a constant,
            also where it was made from x.
        solver: how to solve the inner problem. Default: `LBFGS()`, to a residual of 10⁻¹⁰ (10⁻⁵ in
            float32).
        estimator: how to differentiate. Default: `FOBMAML` with a symmetric loss nudge of 10⁻³
            (10⁻² in float32), its nudged solves started at the solution, so that they stay in its
            basin where inner is not convex. `MAML()` differentiates the solver's steps all at once,
            `MAML(products="autograd")` or `"difference"` one at a time in the memory of one,
            `IMAML(cg_steps=…)` and `Exact()` use the implicit function theorem, `FOMAML()` takes
            ∂_x f alone, `ESMAML()` perturbs x at random; `Reptile()` has no meaning here.
        strong_convexity: lower bound of g's curvature in φ; `Nesterov` computes its momentum from
            it.
        seed: of random numbers that the functions draw (dropout); every solve sees the same.

    Cost: of FO-B-MAML three solves (forward two, five-point five), with an outer gradient in every
    step of the nudged ones for the loss nudge and one outer gradient in all for the gradient nudge;
    memory of one gradient, however many steps. Nothing is written to `.grad`.

    Example:
        >>> A, b = torch.eye(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
        >>> inner = lambda x, phi: (A @ phi - b).square().sum() + x.exp() * phi.square().sum()
        >>> outer = lambda x, phi: (phi - 0.25).square().sum()
        >>> result = hypergradient(inner, outer, torch.zeros((), dtype=torch.float64),
        ...     torch.zeros_like(b))
        >>> # φ = 1/(1 + eˣ), dF/dx = −3 · 2 (φ − ¼) eˣ/(1 + eˣ)²
        >>> result.phi, round(float(result.gradient), 5)
        (tensor([0.5000, 0.5000, 0.5000], dtype=torch.float64), -0.375)
    """
    x_tree, init_tree = Tree(x, "x"), Tree(init, "phi")
    problem = Bilevel(inner, outer, x_tree, init_tree, strong_convexity=strong_convexity, seed=seed)
    solver, estimator = _choose(problem, solver, estimator, strong_convexity)
    total, found = _differentiate(problem, solver, estimator)
    d, cost = found.solution.displacement, found.cost
    lower, upper = found.at("inner", d), found.at("outer", d)
    signal, linear = float(norm(upper.by_phi)), found.linear_residual
    return Hypergradient(
        gradient=x_tree.build(
            {n: leaf.to(problem.shared[n].dtype) for n, leaf in total.gradient.items()}, alone=True
        ),
        phi=init_tree.build(problem.phi(d)),
        outer=float(upper.value),
        inner=float(lower.value),
        residual=float(norm(lower.by_phi)),
        steps=int(found.solution.steps),
        nu=total.nu,
        error=None if total.error is None else float(total.error) / signal if signal else math.inf,
        linear_residual=None if linear is None else linear / signal if signal else 0.0,
        inner_gradients=cost.support_gradients,
        outer_gradients=cost.query_gradients,
        hessian_products=cost.hessian_products,
    )


def solve_bilevel(
    inner: Function,
    outer: Function,
    x: Any,
    init: Any,
    *,
    solver: Solver | None = None,
    estimator: Estimator | None = None,
    strong_convexity: float | None = None,
    seed: int = 0,
) -> Tensor:
    """F(x) = f(x, φ*(x)) as a scalar tensor whose backward pass hands the hypergradient to x.

    The arguments are those of `hypergradient`. x may come out of a larger computation, and the loss
    may go into one; tensors of x that do not require gradients count as constants. The
    hypergradient is computed here, not in `backward`; where gradients are switched off or x needs
    none, the inner problem is solved once and nothing more. F cannot be differentiated twice.

    Example:
        >>> x = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        >>> inner = lambda x, phi: (phi - 1).square().sum() + (x.exp() * phi.square()).sum()
        >>> loss = solve_bilevel(inner, lambda x, phi: phi.sum(), x,
        ...     torch.zeros(2, dtype=torch.float64))
        >>> loss.backward()
        >>> loss.item(), x.grad  # φ = 1/(1 + eˣ), whose derivative is −eˣ/(1 + eˣ)²
        (1.0, tensor([-0.2500, -0.2500], dtype=torch.float64))
    """
    wanted = torch.is_grad_enabled()
    x_tree, init_tree = Tree(x, "x", lambda leaf: wanted and leaf.requires_grad), Tree(init, "phi")
    problem = Bilevel(inner, outer, x_tree, init_tree, strong_convexity=strong_convexity, seed=seed)
    solver, estimator = _choose(problem, solver, estimator, strong_convexity)
    if not x_tree.tensors:
        return _value(problem, solver)
    _check_captured(problem)
    return _Solved.apply(problem, solver, estimator, *x_tree.originals)


@contextmanager
def _at_work(problem: Bilevel) -> Iterator[None]:
    """Within, signals wait, gradients are on, also where the caller has them off, and random states
    come out as they went in.
    """
    with (
        uninterrupted(),
        torch.inference_mode(False),
        torch.enable_grad(),
        problem.draws.preserved(),
    ):
        yield


def _differentiate(
    problem: Bilevel, solver: Solver, estimator: Estimator
) -> tuple[MetaGradient, BilevelInner]:
    """Run an estimator, look at both functions where it solved the inner problem, and check what
    comes out.
    """
    with _at_work(problem):
        inner, total = BilevelInner(problem, Cost()), MetaGradient(problem, 1, metrics=False)
        estimator.accumulate(inner, solver, total)
        if not inner.settled:
            inner.settle(inner.solve(solver))
        inner.at("inner", inner.solution.displacement)
        inner.at("outer", inner.solution.displacement)
    if not inner.depends_on_x:
        raise ValueError(
            "Neither inner(x, phi) nor outer(x, phi) depends on x, so the hypergradient is zero. "
            "Use x in one of them, and look for .detach(), torch.no_grad() or .item() on the way."
        )
    bad = [n for n, leaf in total.gradient.items() if not bool(torch.isfinite(leaf).all())]
    if bad:
        raise NonFiniteError(
            f"The hypergradient by {', '.join(bad)} is not finite although the inner solves were: a"
            " derivative in x overflowed or does not exist at the solution. Look at inner and"
            " outer there. Nothing was written to .grad."
        )
    return total, inner


def _choose(
    problem: Bilevel,
    solver: Solver | None,
    estimator: Estimator | None,
    strong_convexity: float | None,
) -> tuple[Solver, Estimator]:
    """The user's solver and estimator, or the defaults, checked for use on a general bilevel
    problem.

    An automatic ν balances a truncation error of order ν² against the rounding, or the solver's
    tolerance, over ν.
    """
    tensors = (*problem.shared.values(), *problem.parameters.values())
    single = any(torch.finfo(t.dtype).bits < 64 for t in tensors)
    if solver is None:
        solver = LBFGS(tol=1e-5) if single else LBFGS()
    if estimator is None:
        estimator = FOBMAML(start="solution")
    if isinstance(estimator, FOBMAML) and estimator.automatic:
        estimator = replace(estimator, nu=1e-2 if single else 1e-3)
    _check_solver(solver, strong_convexity)
    if isinstance(estimator, type) or not callable(getattr(estimator, "accumulate", None)):
        known = ", ".join(kind.__name__ for kind in ESTIMATORS)
        raise TypeError(
            f"estimator must be one of {known}, got {estimator!r}. Pass an object, e.g."
            " mn.FOBMAML()."
        )
    estimator.check_problem(problem)
    estimator.check(solver)
    return solver, estimator


def _check_solver(solver: Any, strong_convexity: float | None) -> None:
    if not isinstance(solver, Solver):
        raise TypeError(
            "solver must be one of metanudge's solvers, e.g. mn.LBFGS() or"
            f" mn.GradientDescent(lr=0.1, steps=100), got {solver!r}."
        )
    if getattr(solver, "batch_size", None) is not None:
        raise ValueError(
            f"{solver!r} draws minibatches, but inner(x, phi) is a function without examples to"
            " draw from. Leave batch_size out, and draw a minibatch inside inner if you want one."
        )
    if strong_convexity is not None:
        check_positive(
            strong_convexity,
            "strong_convexity",
            "It is a lower bound of inner's curvature in phi; leave it out if unknown.",
        )
    elif isinstance(solver, Nesterov) and solver.momentum is None:
        raise ValueError(
            "Nesterov computes its momentum from the inner problem's strong convexity, which a"
            " general inner function does not reveal. Give strong_convexity=… (a lower bound of the"
            " curvature, e.g. the weight of an L2 penalty), or Nesterov(momentum=0.9, …)."
        )


def _value(problem: Bilevel, solver: Solver) -> Tensor:
    """f at the un-nudged solution, without any derivative in x."""
    with _at_work(problem):
        d = BilevelInner(problem, Cost()).solve(solver).displacement
        return problem.evaluate("outer", problem.shared, problem.phi(d)).detach()


def _check_captured(problem: Bilevel) -> None:
    """Tensors that reach the functions past x would lose their gradient without a word."""
    with _at_work(problem):
        for level in get_args(Level):
            if problem.evaluate(level, problem.shared, problem.parameters).requires_grad:
                raise ValueError(
                    f"{level}(x, phi) uses a tensor that requires gradients and is neither in x nor"
                    " in phi; loss.backward() would not reach it. Put it into x to have its"
                    " gradient; if it is a constant, detach it (a module: requires_grad_(False))."
                )


class _Solved(torch.autograd.Function):
    """f at the inner solution; its derivative is the estimator's hypergradient."""

    @staticmethod
    def forward(
        ctx: Any, problem: Bilevel, solver: Solver, estimator: Estimator, *x: Tensor
    ) -> Tensor:
        total, inner = _differentiate(problem, solver, estimator)
        ctx.save_for_backward(*x)
        ctx.gradient = [g.to(t.dtype) for g, t in zip(total.gradient.values(), x, strict=True)]
        return inner.at("outer", inner.solution.displacement).value

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        pairs = zip(ctx.gradient, ctx.saved_tensors, strict=True)
        return None, None, None, *(_Once.apply(g, outputs[0], x) for g, x in pairs)


class _Once(torch.autograd.Function):
    """gradient × output. In a graph for second derivatives it stands for a dependence on x that
    nobody has computed, and says so.
    """

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, output: Tensor, x: Tensor) -> Tensor:
        return gradient * output.to(gradient)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        raise RuntimeError(
            "solve_bilevel can be differentiated once, but a second derivative was asked for. Take"
            " it out of what is differentiated twice (an inner function, or a term made with"
            " create_graph=True)."
        )
