"""Inner solutions that are off by a known δ, as the paper's analysis has them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from metanudge.params import Params
from metanudge.solvers import NewtonCG, Oracle, Solution, Solver

EXACTLY = NewtonCG(steps=30, cg_steps=60, tol=1e-13)
"""Newton's method down to rounding error."""


@dataclass(frozen=True)
class OffBy:
    """Solves, then moves every solution by δ in a random direction: another one for every row and
    every solve.

    Args:
        delta: δ, how far.
        seed: of the directions.
        solver: what solves before that.
    """

    delta: float
    seed: int
    solver: Solver = EXACTLY
    generator: torch.Generator = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "generator", torch.Generator().manual_seed(self.seed))

    @property
    def steps(self) -> int:
        """Those of the solver."""
        return self.solver.steps

    def solve(self, oracle: Oracle, start: Params | None = None) -> Solution:
        """Solve from `start` and move the result."""
        solution = self.solver.solve(oracle, start)
        noise = {
            n: torch.randn(d.shape, generator=self.generator, dtype=d.dtype).to(d.device)
            for n, d in solution.displacement.items()
        }
        norms = torch.cat([leaf.flatten(1) for leaf in noise.values()], 1).norm(dim=1)
        for name, d in solution.displacement.items():
            d.add_(noise[name] * (self.delta / norms).view(-1, *[1] * (d.ndim - 1)))
        return solution
