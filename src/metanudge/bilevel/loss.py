"""`solve_bilevel`: the outer loss at the inner solution, as a node of torch's graph."""

from __future__ import annotations

from typing import Any, get_args

import torch
from torch import Tensor

from metanudge.bilevel.inner import BilevelInner
from metanudge.bilevel.problem import Bilevel, Function, Level
from metanudge.bilevel.solve import at_work, choose, differentiate
from metanudge.bilevel.tree import Tree
from metanudge.engines import Cost
from metanudge.estimators import Estimator
from metanudge.solvers import Solver


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
    solver, estimator = choose(problem, solver, estimator, strong_convexity)
    if not x_tree.tensors:
        return _value(problem, solver)
    _check_captured(problem)
    return _Solved.apply(problem, solver, estimator, *x_tree.originals)


def _value(problem: Bilevel, solver: Solver) -> Tensor:
    """f at the un-nudged solution, without any derivative in x."""
    with at_work(problem):
        d = BilevelInner(problem, Cost()).solve(solver).displacement
        return problem.evaluate("outer", problem.shared, problem.phi(d)).detach()


def _check_captured(problem: Bilevel) -> None:
    """Tensors that reach the functions past x would lose their gradient without a word."""
    with at_work(problem):
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
        total, inner = differentiate(problem, solver, estimator)
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
