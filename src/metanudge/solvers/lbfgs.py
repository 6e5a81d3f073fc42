"""L-BFGS: torch's own, in rounds, to whatever precision the gradient has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from metanudge.params import Params
from metanudge.solvers.base import (
    Oracle,
    Solution,
    Trace,
    check_count,
    check_solver_options,
    solve_rows,
)


@dataclass(frozen=True)
class LBFGS:
    """Quasi-Newton solves to high precision with plain gradients: the solver for exact
    meta-gradients of smooth models.

    Args:
        steps: largest number of iterations. A first round uses a strong-Wolfe line search; near the
            solution the decrease of g drowns in its rounding and that search gives up, so rounds of
            full quasi-Newton steps, which need the gradient only, follow as long as they help.
        tol: stop once ‖∇g‖ is at most this.
        history: number of past steps that model the curvature.

    Cost: one to two gradients per iteration, each task on its own; memory of `2 × history` copies
    of φ.
    """

    steps: int = 200
    tol: float = 1e-10
    history: int = 20

    def __post_init__(self) -> None:
        check_solver_options(self.steps, self.tol)
        check_count(self.history, "history", "10 to 50 is usual.")

    def solve(self, oracle: Oracle, start: Params | None = None) -> Solution:
        """Minimise from `start` (default: d = 0)."""
        return solve_rows(self._solve_row, oracle, start)

    def _solve_row(self, oracle: Oracle, d: Params) -> Solution:
        trace = Trace(oracle)
        residual = float(trace.record(*oracle.gradient(d)))
        iterations = 0
        searching = True
        while iterations < self.steps and self.tol < residual < float("inf"):
            moved = {n: leaf.clone() for n, leaf in d.items()}
            most = self.steps - iterations
            taken = self._round(oracle, moved, residual, trace, most, searching)
            iterations += taken
            reached = float(trace.record(*oracle.gradient(moved)))
            # A line search goes downhill whatever the gradient's norm does; full steps must show
            # that they help.
            if not (searching or reached < residual) or taken == 0:
                # what is reported last must belong to the point that is returned
                trace.record(*oracle.gradient(d))
                break
            d, residual, searching = moved, reached, False
        return trace.solution(d, iterations)

    def _round(
        self, oracle: Oracle, d: Params, residual: float, trace: Trace, steps: int, searching: bool
    ) -> int:
        """One run of torch's L-BFGS that overwrites d; returns its iterations.

        torch measures curvature and steps against absolute constants (⟨y, s⟩ > 1e-10), so it is
        given the problem in units in which both gradient and step are of order one: u = d/r and
        g/r², with r the residual at the start. The Hessian stays the same.
        """
        start = [leaf[0].clone() for leaf in d.values()]
        units = [torch.zeros_like(leaf) for leaf in start]
        optimizer = torch.optim.LBFGS(
            units,
            lr=1.0,
            max_iter=steps,
            history_size=self.history,
            # torch looks at the largest component, we at the norm
            tolerance_grad=0.1 * self.tol / residual,
            tolerance_change=0.0,
            line_search_fn="strong_wolfe" if searching else None,
        )

        def place() -> None:
            for leaf, base, unit in zip(d.values(), start, units, strict=True):
                torch.add(base, unit, alpha=residual, out=leaf[0])

        def closure() -> Tensor:
            place()
            loss, g = oracle.gradient(d)
            trace.record(loss, g)
            for unit, leaf in zip(units, g.values(), strict=True):
                unit.grad = leaf[0] / residual
            return oracle.objective(loss, d)[0] / residual**2

        optimizer.step(closure)
        place()
        return int(optimizer.state[units[0]]["n_iter"])
