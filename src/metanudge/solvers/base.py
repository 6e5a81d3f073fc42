"""What a solver sees (`Oracle`) and what it returns (`Solution`).

A solver minimises  g(d) = f̂(θ + d) + ½‖d‖²_λ + ν p(θ + d)  over the displacement d = φ − θ, for
several independent problems (rows) at once. It works on displacements, never on φ: the
meta-gradient is a small difference of displacements, and in float32 it would drown in the rounding
of φ. Solvers never differentiate through themselves; that is the estimators' business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from metanudge.params import Params, norm, select


class Oracle(Protocol):
    """The inner problem of one or more rows, as a solver sees it."""

    @property
    def rows(self) -> int:
        """Number of independent problems."""

    @property
    def strong_convexity(self) -> float | Tensor:
        """The smallest λ: a lower bound of the curvature wherever the support loss is convex. A 0-d
        tensor where λ is learned.
        """

    def zeros(self) -> Params:
        """The displacement of θ itself; the caller owns it and may overwrite it."""

    def gradient(
        self, d: Params, step: int = 0, batch_size: int | None = None
    ) -> tuple[Tensor, Params]:
        """Data losses `(rows,)` and gradient of g at `d`; the caller owns the gradient.

        `step` chooses the random numbers (dropout masks, minibatch): the same for every row of one
        task's stencil.
        """

    def objective(self, loss: Tensor, d: Params) -> Tensor:
        """g itself, `(rows,)`, from the data losses at `d`: adds the proximal term and a linear
        nudge.
        """

    def value(self, d: Params, step: int = 0) -> Tensor:
        """g at `d`, `(rows,)`, without a gradient."""

    def hvp(self, d: Params, v: Params, step: int = 0) -> Params:
        """Hessian of g at `d` times `v`, row by row."""

    def split(self) -> list[Oracle]:
        """The same problems as oracles of one row each, in row order."""


@runtime_checkable
class Descends(Protocol):
    """What an oracle may offer besides: to step downhill while the gradient comes in, and never
    hold the whole of it.
    """

    def begin(self, start: Params | None) -> Params:
        """Where to begin, in the form that `descend` overwrites: at `start`, which is used up, or
        at d = 0.
        """

    def descend(
        self, d: Params, lr: float, step: int = 0, batch_size: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """d ← d − lr ∇g(d), in place; data losses and ‖∇g‖ at the old d, `(rows,)` each."""


@dataclass(frozen=True)
class Solution:
    """Where a solver stopped, and what it knows about it.

    Attributes:
        displacement: φ − θ, leaves of shape `(rows, *shape)`.
        steps: steps taken by each row.
        residual: ‖∇g‖ at the last point where the gradient was computed (for solvers of fixed
            length: before the last step).
        delta: estimate of δ = ‖φ̃ − φ*‖, residual / λ: an upper bound where the support loss is
            convex.
        losses: data loss at every gradient evaluation, `(evaluations, rows)`.
        residuals: ‖∇g‖ at every gradient evaluation, `(evaluations, rows)`.
    """

    displacement: Params
    steps: Tensor
    residual: Tensor
    delta: Tensor
    losses: Tensor
    residuals: Tensor


class Trace:
    """Collects what a solver sees on its way, on the device, and turns it into a `Solution`."""

    def __init__(self, oracle: Oracle) -> None:
        self._strong_convexity = oracle.strong_convexity
        self._losses: list[Tensor] = []
        self._residuals: list[Tensor] = []

    def record(self, loss: Tensor, gradient: Params) -> Tensor:
        """Note one gradient evaluation; returns the residual norms `(rows,)`."""
        return self.note(loss, norm(gradient))

    def note(self, loss: Tensor, residual: Tensor) -> Tensor:
        """The same for a gradient of which only the norms `(rows,)` are left."""
        self._losses.append(loss.detach())
        self._residuals.append(residual)
        return residual

    @property
    def last_residual(self) -> Tensor:
        """The residual norms recorded last, `(rows,)`."""
        return self._residuals[-1]

    def solution(self, displacement: Params, steps: Tensor | int) -> Solution:
        """The solution reached; in as many steps by all rows, where a number is given."""
        residual, delta = self._residuals[-1], bound(self._residuals[-1], self._strong_convexity)
        losses, residuals = torch.stack(self._losses), torch.stack(self._residuals)
        if isinstance(steps, int):
            steps = torch.full_like(residual, steps, dtype=torch.long)
        return Solution(displacement, steps, residual, delta, losses, residuals)


def bound(residual: Tensor, strong_convexity: float | Tensor) -> Tensor:
    """‖φ − φ*‖ at most, residual / μ; NaN where μ is 0, so that nothing is known."""
    unknown = not isinstance(strong_convexity, Tensor) and strong_convexity == 0
    return residual / (math.nan if unknown else strong_convexity)


def solve_rows(
    solve: Callable[[Oracle, Params], Solution], oracle: Oracle, start: Params | None
) -> Solution:
    """Solve row by row, where an algorithm cannot take several at once; `start` is overwritten."""
    d = oracle.zeros() if start is None else start
    rows = [{n: leaf[r : r + 1] for n, leaf in d.items()} for r in range(oracle.rows)]
    return join([solve(one, row) for one, row in zip(oracle.split(), rows, strict=True)])


def join(solutions: list[Solution]) -> Solution:
    """Solutions of single rows as one; shorter traces are padded with their last entry."""
    if len(solutions) == 1:
        return solutions[0]
    longest = max(len(s.losses) for s in solutions)

    def padded(trace: Tensor) -> Tensor:
        return torch.cat([trace, trace[-1:].expand(longest - len(trace), -1)])

    return Solution(
        {n: torch.cat([s.displacement[n] for s in solutions]) for n in solutions[0].displacement},
        torch.cat([s.steps for s in solutions]),
        torch.cat([s.residual for s in solutions]),
        torch.cat([s.delta for s in solutions]),
        torch.cat([padded(s.losses) for s in solutions], dim=1),
        torch.cat([padded(s.residuals) for s in solutions], dim=1),
    )


@runtime_checkable
class Solver(Protocol):
    """How to solve the inner problem."""

    @property
    def steps(self) -> int:
        """The largest number of steps taken."""

    def solve(self, oracle: Oracle, start: Params | None = None) -> Solution:
        """Minimise from `start` (default: d = 0), which is overwritten."""


@runtime_checkable
class LinearSolver(Solver, Protocol):
    """A solver whose update is linear in iterate and gradient with fixed coefficients.

    Such a solver can be differentiated step by step: backwards by `MAML`, forwards in ν by the
    tangent stencil, which sends tangents through the same update.
    """

    @property
    def tol(self) -> float | None:
        """Residual at which a row stops early; None for a fixed number of steps."""

    @property
    def batch_size(self) -> int | None:
        """Support examples per step; None for all of them."""

    def memory(self, d: Params) -> Params:
        """What the update remembers between steps, at the start."""

    def update(
        self, d: Params, g: Params, memory: Params, *, mu: float | Tensor, inplace: bool
    ) -> tuple[Params, Params]:
        """One step from `d` with gradient `g`, where the strong convexity is `mu`; with `inplace`
        the three dicts' tensors may be overwritten.
        """

    def result(self, d: Params, memory: Params) -> Params:
        """The solution after the last update."""


def iterate(solver: LinearSolver, oracle: Oracle, start: Params | None) -> Solution:
    """Run a linear solver's update `steps` times; rows whose residual is at most `tol` stop where
    they are.
    """
    d = oracle.zeros() if start is None else start
    memory, trace, mu = solver.memory(d), Trace(oracle), oracle.strong_convexity
    steps = no_steps(oracle, d)
    for step in range(solver.steps):
        loss, g = oracle.gradient(d, step, solver.batch_size)
        residual = trace.record(loss, g)
        active = None if solver.tol is None else residual > solver.tol
        if active is not None and not bool(active.any()):
            break
        if active is None or bool(active.all()):
            d, memory = solver.update(d, g, memory, mu=mu, inplace=True)
            steps += 1
        else:  # a row that has converged must not move any more while the others go on
            moved, remembered = solver.update(d, g, memory, mu=mu, inplace=False)
            d, memory = select(active, moved, d), select(active, remembered, memory)
            steps += active
        # or the old gradient would still be alive while the next forward pass stores its
        # activations
        del g
    return trace.solution(solver.result(d, memory), steps)


def no_steps(oracle: Oracle, d: Params) -> Tensor:
    """A counter of the steps of each row, at 0."""
    return next(iter(d.values())).new_zeros(oracle.rows, dtype=torch.long)


def unroll(
    solver: LinearSolver,
    d: Params,
    gradient: Callable[[Params, int], Params],
    *,
    strong_convexity: float | Tensor,
    last: int,
) -> Params:
    """Run a linear solver's update `steps` times so that autograd can follow the last `last` of
    them; what comes before is constant.
    """
    memory = solver.memory(d)
    for step in range(solver.steps):
        if step == solver.steps - last:
            d, memory = _detached(d), _detached(memory)
        g = gradient(d, step)
        d, memory = solver.update(d, g, memory, mu=strong_convexity, inplace=False)
    d = solver.result(d, memory)
    return d if last else _detached(d)


def _detached(d: Params) -> Params:
    return {n: leaf.detach() for n, leaf in d.items()}


def check_kind(value: object, what: str, method: str, examples: Mapping[str, str]) -> None:
    """Raise a `TypeError` unless `value` is an object with this method; it says which of the
    examples to write, by default the first.
    """
    if not isinstance(value, type) and callable(getattr(value, method, None)):
        return
    if isinstance(value, str):
        name, got = value, repr(value)
    elif isinstance(value, type):
        name, got = value.__name__, f"the class {value.__name__}"
    else:
        name, got = type(value).__name__, f"an object of {type(value).__name__}"
    known = {label.lower(): example for label, example in examples.items()}
    example = known.get(name.lower().replace("-", "").replace("_", ""), next(iter(known.values())))
    raise TypeError(
        f"{what} must be one of metanudge's {what}s, as an object; got {got}. Write"
        f" {what}={example}."
    )


def check_positive(value: float, what: str, fix: str) -> None:
    """Raise a `ValueError` unless `value` is a positive finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"{what} must be a positive number, got {value!r}. {fix}")


def check_count(value: int, what: str, fix: str) -> None:
    """Raise a `ValueError` unless `value` is a positive whole number."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{what} must be a whole number of at least 1, got {value!r}. {fix}")


def check_solver_options(steps: int, tol: float | None, batch_size: int | None = None) -> None:
    """Raise where the options that solvers share make no sense."""
    check_count(steps, "steps", "Few-shot learners usually take 1 to 20 steps.")
    if tol is not None:
        check_positive(
            tol,
            "tol",
            "It is the residual norm at which a solve stops early; leave it out to always take all"
            " steps.",
        )
    if batch_size is not None:
        check_count(batch_size, "batch_size", "Leave it out to use the whole support set.")
