"""Tasks side by side with native kernels: models that are chains of common layers (see `chain`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from metanudge.accel.chain import Chain, Data
from metanudge.accel.flat import Flat
from metanudge.accel.oracle import FlatOracle
from metanudge.engines.inner import Cost, Inner, Measured
from metanudge.engines.randomness import Draws
from metanudge.engines.uninterrupted import obey
from metanudge.engines.vmapped import StackedInner, num_rows, repeated
from metanudge.params import Params, norm
from metanudge.problem import Nudge, Problem
from metanudge.proximal import Diagonal
from metanudge.solvers.base import LinearSolver, Solution, Solver, unroll
from metanudge.task import Batch, Stack

Part = tuple[Batch, str, Tensor | None]
"""Data, whether they are the support or the query set, and the weights of the rows' losses."""


@dataclass
class Joined:
    """Support and query sets that are evaluated together, with targets `(rows, examples)` and how
    much each example counts in its set.
    """

    data: Data
    targets: Tensor
    shares: Tensor
    support: int  # so many examples of all are the support's
    _last: tuple[Tensor, Tensor] | None = None

    def weighted(self, weight: Tensor) -> Tensor:
        """Shares in the sum of the support's mean loss and the query's times the rows' weight; kept
        for the next step.
        """
        if self._last is None or self._last[0] is not weight:
            first, others = self.shares.tensor_split([self.support], 1)
            self._last = weight, torch.cat([first, others * weight.unsqueeze(1)], 1)
        return self._last[1]


class ChainGroup(StackedInner):
    """Tasks of equal shape side by side, for a model that is a chain.

    Args:
        chain: the model.
        paths: what it does, for people: where first derivatives are enough, and where they are not.
    """

    def __init__(
        self,
        chain: Chain,
        paths: tuple[str, str],
        problem: Problem,
        stack: Stack,
        nudges_at_once: int,
        draws: Draws,
        cost: Cost,
    ) -> None:
        super().__init__(problem, stack, nudges_at_once, draws, cost)
        self._chain = chain
        self._paths = paths
        self.path = paths[0]
        self._first: dict[tuple[str, int | None], tuple[Tensor, Tensor]] = {}
        self._prepared: dict[str, tuple[Tensor, list[Data]]] = {}
        self._joined: dict[int, Joined | None] = {}

    @cached_property
    def _flat_theta(self) -> Flat:
        """θ as one row, laid out as the kernels want it; so is everything else here."""
        return Flat.of(self._theta, self._chain.orders)

    def zeros(self, rows: int) -> Params:
        """Zero displacements, in one matrix."""
        dtype = next(iter(self.problem.theta_dtypes.values()))
        theta = self._flat_theta
        return theta.like(
            torch.zeros(rows, theta.matrix.numel(), dtype=dtype, device=self.problem.device)
        )

    def oracle(
        self, offsets: list[float], nudge: Nudge | None, force: Params | None, shift: Params | None
    ) -> FlatOracle:
        """Oracles that work on whole matrices."""
        force = None if force is None else self._flat_theta.holding(force)
        at_theta = self._gradient_at_theta
        return FlatOracle(self, offsets, nudge, force, shift, at_theta=at_theta)

    def solve(
        self,
        solver: Solver,
        *,
        offsets: Sequence[float] = (0.0,),
        nudge: Nudge | None = None,
        force: Params | None = None,
        start: Params | None = None,
        shift: Params | None = None,
    ) -> Solution:
        """Solve from displacements in one matrix."""
        start = None if start is None else self._flat_theta.holding(start)
        return super().solve(
            solver, offsets=offsets, nudge=nudge, force=force, start=start, shift=shift
        )

    def apart(self, row: int) -> Inner:
        """One task of the group."""
        one = self._stack[row : row + 1]
        more = (self.problem, one, self.nudges_at_once, self._draws, self.cost)
        return ChainGroup(self._chain, self._paths, *more)

    def data_gradient(
        self, d: Params, offsets: Tensor | None, step: int, batch_size: int | None
    ) -> tuple[Tensor, Params]:
        """Losses and gradient of f̂ + ν f for all rows."""
        self._count(num_rows(d), offsets)
        return self._gradient(d, self._parts(offsets, step, batch_size), step)

    def _gradient_at_theta(
        self, rows: int, offsets: Tensor | None, batch_size: int | None
    ) -> tuple[Tensor, Params]:
        """At θ all nudges of a task are alike: one evaluation a task serves them all, in this solve
        and in later ones.
        """
        self._count(rows, offsets)

        def copies(which: str, size: int | None) -> Iterator[Tensor]:
            for known in self._at_theta(which, size):
                yield known.repeat(rows // self.tasks, *[1] * (known.ndim - 1))

        losses, g = copies("support", batch_size)
        if offsets is not None:
            query = copies("query", None)
            losses, g = (
                torch.addcmul(a, b, offsets.view(-1, *[1] * (b.ndim - 1)))
                for a, b in zip((losses, g), query, strict=True)
            )
        return losses, self._flat_theta.like(g)

    def _at_theta(self, which: str, batch_size: int | None) -> tuple[Tensor, Tensor]:
        """Losses and gradients of the tasks at θ in the first inner step."""
        if (which, batch_size) not in self._first:
            batch = (
                self._minibatch_of_support(0, batch_size)
                if which == "support"
                else self._stack.query
            )
            losses, g = self._gradient(self.zeros(self.tasks), [(batch, which, None)], 0)
            self._first[which, batch_size] = losses, g.matrix
        return self._first[which, batch_size]

    def query_gradient(self, d: Params, step: int = 0, *, shared: bool = False) -> Params:
        """∇f(θ + d) for all rows."""
        if shared and self._omega:
            return super().query_gradient(d, step, shared=True)
        self.cost.query_gradients += num_rows(d)
        return self._gradient(d, [(self._stack.query, "query", None)], step)[1]

    def data_hvp(
        self, d: Params, v: Params, offsets: Tensor | None, step: int, batch_size: int | None
    ) -> tuple[Tensor, Params, Params]:
        """Losses, gradient and Hessian-vector product, backwards twice: the Hessian is
        symmetric.
        """
        phi, parts = self._moved(d), self._parts(offsets, step, batch_size)

        def run() -> tuple[Tensor, Params, Params]:
            leaves = {n: leaf.detach().requires_grad_() for n, leaf in phi.items()}
            losses = torch.stack([self._smooth(leaves, part, step) for part in parts]).sum(0)
            g = torch.autograd.grad(
                losses.sum(), list(leaves.values()), create_graph=True, materialize_grads=True
            )
            bent = [
                (leaf, v[n].to(leaf.dtype))
                for n, leaf in zip(leaves, g, strict=True)
                if leaf.requires_grad
            ]
            hv: Sequence[Tensor]
            if bent:
                outputs, along = zip(*bent, strict=True)
                hv = torch.autograd.grad(
                    outputs, list(leaves.values()), along, materialize_grads=True
                )
            else:
                hv = [torch.zeros_like(leaf) for leaf in g]
            first, second = (
                {n: x.detach().to(d[n].dtype) for n, x in zip(leaves, xs, strict=True)}
                for xs in (g, hv)
            )
            return losses.detach(), first, second

        with sdpa_kernel(SDPBackend.MATH):  # the fused kernels know no second derivatives
            losses, g, hv = self._explained(run)
        self._count(num_rows(d), offsets)
        self.cost.hessian_products += num_rows(d)
        return losses, g, hv

    def unrolled_gradient(self, solver: LinearSolver, *, unrolled: int) -> tuple[Params, Solution]:
        """MAML's gradient of every row, layer by layer, where nothing but θ is learned."""
        proximal = self.problem.proximal
        if self._omega or proximal.learned or not isinstance(proximal, Diagonal):
            return super().unrolled_gradient(solver, unrolled=unrolled)
        force, mu = proximal.bind(self._theta, {})

        def run() -> tuple[Params, Params, list[Tensor], list[Tensor]]:
            theta = {
                n: leaf.detach().repeat(self.tasks, *[1] * leaf.ndim).requires_grad_()
                for n, leaf in self._theta.items()
            }

            def moved(d: Params) -> Params:
                return {n: (theta[n] + leaf).to(theta[n].dtype) for n, leaf in d.items()}

            def data_gradient(d: Params, step: int) -> tuple[Tensor, Params]:
                part: Part = (self._minibatch_of_support(step, solver.batch_size), "support", None)
                if step < solver.steps - unrolled:
                    return self._gradient(d, [part], step)
                phi = moved(d)
                loss = self._smooth(phi, part, step)
                g = torch.autograd.grad(
                    loss.sum(), list(phi.values()), create_graph=True, materialize_grads=True
                )
                return loss.detach(), {
                    n: leaf.to(d[n].dtype) for n, leaf in zip(phi, g, strict=True)
                }

            losses, residuals = [], []

            def gradient(d: Params, step: int) -> Params:
                loss, g = data_gradient(d, step)
                g = {n: leaf + g[n] for n, leaf in force(d).items()}
                losses.append(loss)
                residuals.append(norm({n: leaf.detach() for n, leaf in g.items()}))
                return g

            d = unroll(
                solver, dict(self.zeros(self.tasks)), gradient, strong_convexity=mu, last=unrolled
            )
            still = {n: leaf.detach() for n, leaf in d.items()}
            # its own second derivatives are not wanted
            along = self._gradient(still, [(self._stack.query, "query", None)], 0)[1]
            ends = moved(d)
            found = torch.autograd.grad(
                [*ends.values()],
                [*theta.values()],
                [along[n].to(leaf.dtype) for n, leaf in ends.items()],
            )
            return dict(zip(theta, found, strict=True)), still, losses, residuals

        with sdpa_kernel(SDPBackend.MATH):
            g, d, losses, residuals = self._explained(run)
        return g, self._unrolled(d, torch.stack(losses), torch.stack(residuals), unrolled)

    def measure_query(self, d: Params | None, shift: Params | None = None) -> Measured:
        """Query loss and accuracy at θ + d for all rows."""
        if shift is not None:
            d = shift if d is None else {n: leaf + shift[n] for n, leaf in d.items()}
        d = self.zeros(self.tasks) if d is None else d
        judge = vmap(self.problem.objective.judge, randomness="same")
        with torch.no_grad():
            phi, values = self._moved(d), []
            for rows, data, targets in self._portions(self._stack.query, "query", num_rows(d)):
                outputs = self._seeded(
                    partial(self._chain.outputs, data, {n: p[rows] for n, p in phi.items()}),
                    0,
                    "query",
                )
                values.append(self._explained(partial(judge, outputs, targets)))
        return Measured(*(torch.cat(column) for column in zip(*values, strict=True)))

    def _parts(self, offsets: Tensor | None, step: int, batch_size: int | None) -> list[Part]:
        """The data of f̂ + ν f."""
        support: Part = (self._minibatch_of_support(step, batch_size), "support", None)
        return [support] if offsets is None else [support, (self._stack.query, "query", offsets)]

    def _smooth(self, phi: Params, part: Part, step: int) -> Tensor:
        """Weighted losses of all rows that can be differentiated twice."""
        self.path = self._paths[1]
        (inputs, targets), which, weight = part
        targets = repeated(targets, num_rows(phi) // self.tasks)
        with self._draws.seeded(step, which):
            losses = self._chain.losses_layer_by_layer(inputs, targets, phi, self.problem.objective)
        return losses if weight is None else losses * weight

    def _gradient(self, d: Params, parts: list[Part], step: int) -> tuple[Tensor, Flat]:
        """Losses and gradient of a weighted sum of losses; rows do not mix, so the gradient of
        their sum has every row's.
        """
        number = num_rows(d)
        joined, weight = self._join(parts, number), parts[-1][2]
        if joined is not None and weight is not None:
            return self._gradient_of_both(d, joined, weight)
        phi, theta, objective = self._moved(d), self._flat_theta, self.problem.objective
        total: Tensor | None = None
        gradient: Flat | None = None
        for batch, which, weight in parts:
            losses, found = [], theta.like(theta.matrix.new_empty(number, theta.matrix.numel()))
            for rows, data, targets in self._portions(batch, which, number):
                some = rows != slice(0, number)
                leaves = {
                    n: (leaf[rows] if some else leaf).detach().requires_grad_()
                    for n, leaf in phi.items()
                }
                into = {n: leaf[rows] for n, leaf in found.items()} if some else found
                value = self._seeded(
                    partial(self._chain.losses, data, targets, leaves, objective, into), step, which
                )
                value = value if weight is None else value * weight[rows]
                _collect(
                    torch.autograd.grad(value.sum(), list(leaves.values()), materialize_grads=True),
                    into,
                )
                losses.append(value.detach())
            value = torch.cat(losses) if len(losses) > 1 else losses[0]
            total = value if total is None else total + value
            if gradient is None:
                gradient = found
            else:
                gradient.matrix.add_(found.matrix)
        assert total is not None
        assert gradient is not None
        return total, self._in_dtype_of(d, gradient)

    def _join(self, parts: list[Part], rows: int) -> Joined | None:
        """Support and query together, if both are wanted and it pays."""
        if (
            len(parts) == 1
            or parts[0][0] is not self._stack.support
            or self.problem.device.type != "cpu"
        ):
            return None
        if rows not in self._joined:
            self._joined[rows] = self._explained(lambda: self._joined_sets(rows))
        return self._joined[rows]

    def _joined_sets(self, rows: int) -> Joined | None:
        (inputs, targets), (_, other) = self._stack.support, self._stack.query
        if not all(
            isinstance(t, Tensor) and t.ndim == 2 and t.dtype == torch.long
            for t in (targets, other)
        ):
            return None
        sets = [self._data(self._stack.support, "support"), self._data(self._stack.query, "query")]
        data = self._chain.join(sets, rows)
        if data is None:
            return None
        # torch leaves examples with this label out
        counted = [(t != -100).to(inputs.dtype) for t in (targets, other)]
        shares = torch.cat([c / c.sum(1, keepdim=True) for c in counted], 1)
        labels, shares = (
            repeated(t, rows // self.tasks) for t in (torch.cat([targets, other], 1), shares)
        )
        return Joined(data, labels, shares, targets.shape[1])

    def _gradient_of_both(self, d: Params, joined: Joined, weight: Tensor) -> tuple[Tensor, Flat]:
        """Losses and gradient of f̂ + ν f, evaluated in one go."""
        obey()
        leaves = {n: leaf.detach().requires_grad_() for n, leaf in self._moved(d).items()}
        theta = self._flat_theta
        found = theta.like(theta.matrix.new_empty(num_rows(d), theta.matrix.numel()))
        run = partial(
            self._chain.losses_of_sets,
            joined.data,
            joined.targets,
            joined.weighted(weight),
            leaves,
            found,
        )
        losses = self._explained(run)
        _collect(
            torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True), found
        )
        return losses.detach(), self._in_dtype_of(d, found)

    def _in_dtype_of(self, d: Params, found: Flat) -> Flat:
        dtype = next(iter(d.values())).dtype
        return found if found.matrix.dtype == dtype else found.like(found.matrix.to(dtype))

    def _seeded(self, run: Callable[[], Tensor], step: int, which: str) -> Tensor:
        """What `run` makes with the random numbers of a step."""

        def seeded() -> Tensor:
            with self._draws.seeded(step, which):
                return run()

        return self._explained(seeded)

    def _portions(
        self, batch: Batch, which: str, rows: int
    ) -> Iterator[tuple[slice, Data, Tensor]]:
        """The rows that the chain takes at once, with their tasks' data and targets."""
        portions, targets = self._data(batch, which), batch[1]
        limit = portions[0].rows_at_once
        if len(portions) == 1 and (limit is None or rows <= limit):
            yield slice(0, rows), portions[0], repeated(targets, rows // self.tasks)
            return
        for first in range(0, rows, self.tasks):
            for data in portions:
                yield (
                    slice(first + data.tasks.start, first + data.tasks.stop),
                    data,
                    targets[data.tasks],
                )

    def _data(self, batch: Batch, which: str) -> list[Data]:
        """What the chain makes of a batch's inputs, once for all steps and nudges."""
        inputs, _ = batch
        known = self._prepared.get(which)
        if known is None or known[0] is not inputs:
            with torch.no_grad():
                known = self._prepared[which] = (
                    inputs,
                    self._explained(partial(self._chain.prepare, inputs)),
                )
        return known[1]

    def _moved(self, d: Params) -> Params:
        """φ = θ + d."""
        if isinstance(d, Flat):
            theta = self._flat_theta.matrix
            return d.like((theta + d.matrix).to(theta.dtype))
        return {n: (self._theta[n] + leaf).to(self._theta[n].dtype) for n, leaf in d.items()}


def _collect(gradients: Sequence[Tensor], into: Params) -> None:
    """Copy gradients to where they belong, unless they are there."""
    pairs = [
        (place, g)
        for place, g in zip(into.values(), gradients, strict=True)
        if place.data_ptr() != g.data_ptr()
    ]
    if pairs:
        torch._foreach_copy_([place for place, _ in pairs], [g for _, g in pairs])
