"""The inner problem of a group of tasks, as estimators use it: solve it, nudge it, look at the
query loss.

What is here is common to both engines; each engine adds how a gradient, a Hessian-vector product
and a loss are evaluated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypedDict, TypeVar, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from metanudge.params import Params, dot, flatten, per_row, tiled, unflatten, wide
from metanudge.problem import Nudge, TwoLevels
from metanudge.solvers import trajectory
from metanudge.solvers.base import LinearSolver, Oracle, Solution, Solver
from metanudge.solvers.conjugate_gradient import LinearSolve
from metanudge.solvers.rated import update_of
from metanudge.spread import local

T = TypeVar("T")


@dataclass
class Cost:
    """Evaluations summed over tasks; one gradient of the nudged loss is one support and one query
    gradient.
    """

    support_gradients: int = 0
    query_gradients: int = 0
    hessian_products: int = 0


@dataclass(frozen=True)
class Measured:
    """Loss and accuracy on a data set, and what else the loss reports, `(rows,)` each; accuracy is
    NaN where the task is no classification.
    """

    loss: Tensor
    accuracy: Tensor
    extra: Params = field(default_factory=dict)


class Nudging(TypedDict, total=False):
    """Which nudged problems of every task are solved; by default the un-nudged one.

    Attributes:
        offsets: the ν of each nudge.
        nudge: `"loss"` adds ν·(query loss), `"gradient"` adds ν·⟨force, φ⟩, None adds nothing.
        force: ∇f(φ_0) of each task, for the gradient nudge.
        shift: moves θ itself (start and centre) by this much, `(rows, ...)`; in a bilevel
            problem x.
    """

    offsets: Sequence[float]
    nudge: Nudge | None
    force: Params | None
    shift: Params | None


class Inner(ABC):
    """A group of tasks on one engine, or a bilevel problem as a group of one.

    Rows are ordered nudge by nudge: with offsets ν_0 … ν_{J−1}, row j·tasks + i belongs to task i
    and nudge ν_j.

    Attributes:
        reports_solution: whether the un-nudged solution is wanted for itself, and solved for where
            the estimator does without.
        columns_at_once: how many columns of a Hessian it makes side by side.
        unrolls: whether it knows `unrolled_gradient`.
        path: how it takes gradients, and why not faster, for people.
        nudges_at_once: how many nudged problems of one task are solved side by side.
        theta: the meta-parameters that adapt.
    """

    reports_solution = False
    columns_at_once = 1
    unrolls = True
    path = ""
    nudges_at_once = 1
    theta: Params

    def __init__(self, problem: TwoLevels, places: Sequence[int], cost: Cost) -> None:
        self.problem = problem
        self.places = tuple(places)
        self.cost = cost

    @property
    def tasks(self) -> int:
        """Number of tasks in the group."""
        return len(self.places)

    def count(self, rows: int, offsets: Tensor | None, *, products: int = 0) -> None:
        """So many rows were evaluated, with the query loss where there are offsets, and each
        Hessian multiplied with so many vectors.
        """
        self.cost.support_gradients += rows
        self.cost.query_gradients += rows if offsets is not None else 0
        self.cost.hessian_products += rows * products

    def zeros(self, rows: int) -> Params:
        """Zero displacements."""
        return {
            n: torch.zeros((rows, *local(p).shape), dtype=wide(p.dtype), device=p.device)
            for n, p in self.problem.parameters.items()
        }

    def solve(
        self, solver: Solver, *, start: Params | None = None, **how: Unpack[Nudging]
    ) -> Solution:
        """Solve the (nudged) inner problem of every task for every offset.

        Args:
            start: displacements to start from, `(rows, ...)`; overwritten.
            how: see `Nudging`.
        """
        oracle, rates = self.oracle(**how), self.problem.rates
        if rates is None:
            solution = solver.solve(oracle, start)
        else:
            assert start is None
            solution, _ = trajectory.solve(update_of(solver, oracle, rates), oracle, last=0)
        self.verify(solution, oracle.offsets)
        return solution

    def verify(self, solution: Solution, offsets: Sequence[float]) -> None:  # noqa: B027 (to look at it would wait for the device)
        """Raise where a solve gave no solution."""

    def oracle(self, **how: Unpack[Nudging]) -> NudgedOracle:
        """The nudged problems as solvers see them."""
        return NudgedOracle(self, **how)

    def parts(self, nudges: Sequence[T]) -> Iterator[Sequence[T]]:
        """What describes the nudges, one by one, in the portions that this engine solves at
        once.
        """
        for first in range(0, len(nudges), self.nudges_at_once):
            yield nudges[first : first + self.nudges_at_once]

    def settle(self, solution: Solution) -> None:  # noqa: B027 (engines that average over tasks have no use for it)
        """Hear of the un-nudged solution."""

    def judge(self, solve: LinearSolve) -> None:  # noqa: B027 (to look at it would wait for the device)
        """Hear of the linear system of an implicit gradient; raise where it has no solution."""

    def imprecision(
        self, solution: Solution, offsets: Sequence[float], force: Params | None
    ) -> Tensor:
        """λ δ of each row, the force that is left where a nudged solve stopped; `force` is that of
        the gradient nudge.
        """
        return solution.delta * self.problem.smallest_lam

    def stream(self, meta_step: int, row: int) -> tuple[int, ...]:
        """What seeds random numbers that belong to one task of the group in one meta-step."""
        return meta_step, self.places[row]

    def unrolled_gradient(self, solver: LinearSolver, *, unrolled: int) -> tuple[Params, Solution]:
        """d f(φ_K(h)) / dh by all meta-parameters h through the last `unrolled` steps of the
        solver, and the solution φ_K.

        Displacements before those steps count as constants, so that `unrolled=0` is FO-MAML and
        `unrolled=steps` is MAML.
        """
        raise NotImplementedError

    def hessian(self, d: Params) -> Tensor:
        """Dense Hessian of f̂(θ + d) and the proximal term of each task, `(tasks, n, n)`; some
        columns at a time.
        """
        size, dtype = sum(leaf[0].numel() for leaf in d.values()), next(iter(d.values())).dtype
        columns = []
        for part in torch.arange(size, device=self.problem.device).split(self.columns_at_once):
            basis = F.one_hot(part, size).to(dtype).repeat_interleave(self.tasks, 0)
            here = {n: torch.cat([leaf] * len(part)) for n, leaf in d.items()}
            v = unflatten(basis, d)
            hv = self.data_hvp(here, v, None, 0, None)[2]
            hv = self.problem.proximal.add_curvature(hv, here, v, self.theta)
            columns.append(flatten(hv).unflatten(0, (len(part), self.tasks)))
        return torch.cat(columns).permute(1, 2, 0)

    def shifted(self, d: Params | None, shift: Params | None) -> Params:
        """Displacements d (None for those of θ itself) from a θ that was moved by a shift."""
        if shift is None:
            return self.zeros(self.tasks) if d is None else d
        return shift if d is None else {n: leaf + shift[n] for n, leaf in d.items()}

    @abstractmethod
    def query_gradient(self, d: Params, step: int = 0, *, shared: bool = False) -> Params:
        """∇f(θ + d), rows as in `d`; its cost is one query gradient a row. With `shared` also the
        rows' sum by the shared parameters.
        """

    @abstractmethod
    def shared_gradient(
        self, d: Params, offsets: Tensor | None, weights: Sequence[float]
    ) -> Params:
        """Gradient of Σ_r w_r [f̂(θ + d_r) + ν_r f(θ + d_r)] by the shared parameters, with a row
        axis of length 1.

        There is one weight per nudge; without offsets f is not evaluated.
        """

    def shared_hvp(self, d: Params, v: Params) -> Params:
        """∂²f̂/∂ω∂φ at θ + d times v: how the gradient by the shared parameters ω changes as φ
        moves along v.
        """
        found = self.support_hvp(d, v, 0, None)
        return {n: found[n] for n in self.problem.shared}

    @abstractmethod
    def measure_query(self, d: Params | None, shift: Params | None = None) -> Measured:
        """Query loss and accuracy at θ + d (at θ itself for None), without gradients."""

    @abstractmethod
    def data_gradient(
        self, d: Params, offsets: Tensor | None, step: int, batch_size: int | None
    ) -> tuple[Tensor, Params]:
        """Losses `(rows,)` and gradient of f̂(θ + d) + ν f(θ + d); without offsets f is not
        evaluated at all.
        """

    @abstractmethod
    def data_value(self, d: Params, offsets: Tensor | None, step: int) -> Tensor:
        """f̂(θ + d) + ν f(θ + d), `(rows,)`, without gradients."""

    @abstractmethod
    def data_hvp(
        self, d: Params, v: Params, offsets: Tensor | None, step: int, batch_size: int | None
    ) -> tuple[Tensor, Params, Params]:
        """Losses, gradient, and Hessian of f̂(θ + d) + ν f(θ + d) times v."""

    @abstractmethod
    def support_gradient(self, d: Params, step: int, batch_size: int | None) -> Params:
        """∇f̂(θ + d) in an inner step by all that it depends on: what adapts and, row by row, the
        shared parameters.
        """

    def support_difference(
        self, d: Params, v: Params, epsilon: Tensor, step: int, batch_size: int | None
    ) -> Params:
        """`support_gradient` at d + εv less that at d − εv, with one ε a row."""
        total: Params = {}
        for signs in self.parts((1.0, -1.0)):
            moved = {
                n: torch.cat(
                    [torch.addcmul(leaf, v[n], per_row(epsilon, leaf), value=s) for s in signs]
                )
                for n, leaf in d.items()
            }
            for name, leaf in self.support_gradient(moved, step, batch_size).items():
                parts = leaf.unflatten(0, (len(signs), -1))
                for sign, part in zip(signs, parts, strict=True):
                    known = total.get(name)
                    total[name] = part * sign if known is None else known.add_(part, alpha=sign)
        return total

    @abstractmethod
    def support_hvp(self, d: Params, v: Params, step: int, batch_size: int | None) -> Params:
        """How `support_gradient` changes as φ moves along v: second derivatives of f̂ times v."""

    def apart(self, row: int) -> Inner:
        """The group's task of this row on its own; a group of one is that already."""
        return self


class NudgedOracle:
    """The nudged problems of a group of tasks, in the form solvers want (see
    `metanudge.solvers.base.Oracle`).
    """

    def __init__(
        self,
        inner: Inner,
        *,
        offsets: Sequence[float] = (0.0,),
        nudge: Nudge | None = None,
        force: Params | None = None,
        shift: Params | None = None,
    ) -> None:
        self.inner = inner
        self.offsets = offsets
        self.nudge = nudge
        self.force = force
        self.shift = shift
        self.nu: Tensor | None = None
        if nudge == "loss":
            first = next(iter(inner.problem.parameters.values()))
            like = torch.empty(inner.tasks, dtype=wide(first.dtype), device=first.device)
            self.nu = torch.cat([torch.full_like(like, nu) for nu in offsets])
        # of a linear nudge with a single ν; with several it is in `pull`
        self.pull_scale = offsets[0] if nudge == "gradient" and len(offsets) == 1 else 1.0

    @cached_property
    def pull(self) -> Params | None:
        """The force of a linear nudge on all rows, to be multiplied by `pull_scale`."""
        if self.nudge != "gradient":
            return None
        assert self.force is not None
        return self.force if len(self.offsets) == 1 else tiled(self.force, self.offsets)

    @property
    def rows(self) -> int:
        """Number of independent problems."""
        return len(self.offsets) * self.inner.tasks

    @property
    def strong_convexity(self) -> float | Tensor:
        """The smallest λ."""
        return self.inner.problem.smallest_lam

    def zeros(self) -> Params:
        """The displacement of θ itself."""
        return self.inner.zeros(self.rows)

    def begin(self, start: Params | None) -> Params:
        """Where those begin that descend."""
        return self.zeros() if start is None else start

    def gradient(
        self, d: Params, step: int = 0, batch_size: int | None = None
    ) -> tuple[Tensor, Params]:
        """Data losses and gradient of the nudged objective."""
        loss, g = self.data_gradient(d, step, batch_size)
        self.complete(g, d)
        return loss, g

    def data_gradient(self, d: Params, step: int, batch_size: int | None) -> tuple[Tensor, Params]:
        """Losses and gradient of what the data say."""
        return self.inner.data_gradient(self._place(d), self.nu, step, batch_size)

    def complete(self, g: Params, d: Params) -> None:
        """Add proximal term and linear nudge to the data's gradient, in place."""
        self.inner.problem.proximal.add_force(g, d, self.theta)
        if self.pull is not None:
            for name, leaf in g.items():
                leaf.add_(self.pull[name], alpha=self.pull_scale)

    def objective(self, loss: Tensor, d: Params) -> Tensor:
        """The data losses plus proximal term and linear nudge."""
        total = loss + self.inner.problem.proximal.energy(d, self.theta)
        if self.pull is not None:
            total = total + self.pull_scale * dot(self.pull, d)
        return total

    def value(self, d: Params, step: int = 0) -> Tensor:
        """The nudged objective without a gradient."""
        return self.objective(self.inner.data_value(self._place(d), self.nu, step), d)

    def hvp(self, d: Params, v: Params, step: int = 0) -> Params:
        """Hessian of the nudged objective times v."""
        _, _, hv = self.inner.data_hvp(self._place(d), v, self.nu, step, None)
        return self.inner.problem.proximal.add_curvature(hv, d, v, self.theta)

    @cached_property
    def theta(self) -> Params:
        """The centre of the proximal term, with a row axis where it was shifted."""
        theta = self.inner.theta
        if self.shift is None or not self.inner.problem.proximal.uses_theta:
            return theta
        return {n: theta[n] + leaf for n, leaf in self.shift.items()}

    def split(self) -> list[Oracle]:
        """One oracle per row."""
        if self.rows == 1:
            return [self]
        tasks = self.inner.tasks

        def pick(p: Params | None, row: int) -> Params | None:
            return None if p is None else {n: leaf[row : row + 1] for n, leaf in p.items()}

        return [
            self.inner.apart(r % tasks).oracle(
                offsets=[self.offsets[r // tasks]],
                nudge=self.nudge,
                force=pick(self.force, r % tasks),
                shift=pick(self.shift, r),
            )
            for r in range(self.rows)
        ]

    def _place(self, d: Params) -> Params:
        return self.inner.shifted(d, self.shift)
