"""How much of a nudge's effect K inner steps reach, and the estimate without that factor
(`unshrink`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from metanudge.params import Params
from metanudge.problem import TwoLevels
from metanudge.proximal import Diagonal
from metanudge.solvers.base import LinearSolver, Solver, unroll


def response(solver: LinearSolver, lam: Tensor, strong_convexity: float | Tensor) -> Tensor:
    """How much of a constant force's effect a solver reaches in its K steps where the support loss
    is flat.

    The solver's own update on  λ d + 1 = 0,  as a share of the solution −1/λ: for gradient descent
    1 − (1 − αλ)^K.

    Example:
        >>> from metanudge.solvers import GradientDescent
        >>> round(float(response(GradientDescent(lr=0.01, steps=5), torch.tensor(2.0), 2.0)), 4)
        0.0961
    """

    def gradient(d: Params, step: int) -> Params:
        return {"d": lam * d["d"] + 1}

    start = {"d": torch.zeros_like(lam)}
    reached = unroll(solver, start, gradient, strong_convexity=strong_convexity, last=0)["d"]
    return -lam * reached


def unshrunk(solver: Solver, problem: TwoLevels) -> Params:
    """λ over the share that is reached: what stands in place of λ before a motion that K steps have
    shrunk.
    """
    assert isinstance(solver, LinearSolver)
    assert isinstance(problem.proximal, Diagonal)
    lam, mu = problem.proximal.lam, problem.smallest_lam
    return {n: value / response(solver, value, mu) for n, value in lam.items()}


def check_unshrink(problem: TwoLevels) -> None:
    """The factor is known where each parameter has a λ and adapts, and nothing is shared."""
    if not problem.learns_theta:
        raise ValueError(
            "unshrink=True divides out a factor that follows from the proximal term's λ, and a"
            " general inner problem has none. Leave it out, and take enough inner steps or"
            " start='solution'."
        )
    if problem.shared or not isinstance(problem.proximal, Diagonal):
        why = "some layers are shared" if problem.shared else "the proximal term has none"
        raise ValueError(
            "unshrink=True divides by a factor that is known where each parameter has a λ and"
            f" adapts, but {why}. Leave it out, and take more inner steps or Adam as outer"
            " optimizer."
        )
