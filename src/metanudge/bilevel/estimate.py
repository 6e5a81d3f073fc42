"""What every way to differentiate starts from and hands back."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from metanudge.bilevel.oracle import check_finite, solve
from metanudge.bilevel.problem import Bilevel, Point
from metanudge.bilevel.tree import wide
from metanudge.params import Params, norm
from metanudge.solvers.base import Solution, Solver


@dataclass(frozen=True)
class Solved:
    """The un-nudged solve, and both functions where it ended."""

    solution: Solution
    inner: Point
    outer: Point

    @property
    def d(self) -> Params:
        """φ_0 − init."""
        return self.solution.displacement


@dataclass(frozen=True)
class Estimate:
    """A hypergradient and where it was taken.

    Attributes:
        gradient: keyed like the variables of x.
        solved: the inner solution.
        error: estimated relative error from nudged solves that stopped early; None for estimators without a difference.
        linear_residual: ‖∇f − ∇²g v‖ / ‖∇f‖ of the linear system; None for estimators without one.
    """

    gradient: Params
    solved: Solved
    error: float | None = None
    linear_residual: float | None = None


def solve_plainly(problem: Bilevel, solver: Solver) -> Solved:
    """Solve the inner problem without a nudge."""
    return look(problem, solve(problem, solver))


def look(problem: Bilevel, solution: Solution) -> Solved:
    """Both functions at the end of an un-nudged solve."""
    check_finite(solution)
    d = solution.displacement
    return Solved(solution, problem.at("inner", d), problem.at("outer", d))


def total(problem: Bilevel, *parts: Params) -> Params:
    """A sum of gradients in x, in float32 or wider; of none: zeros to add to."""
    sum_ = {n: torch.zeros_like(t, dtype=wide(t.dtype)) for n, t in problem.x.items()}
    for part in parts:
        add(sum_, part)
    return sum_


def add(sum_: Params, gradient: Params, weight: float = 1.0) -> None:
    """sum_ += weight · gradient."""
    for name, leaf in sum_.items():
        leaf.add_(gradient[name], alpha=weight)


def size(gradient: Params) -> float:
    """Norm of a gradient in φ (one row)."""
    return float(norm(gradient))
