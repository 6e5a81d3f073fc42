"""A chain at work on the tasks of a stack: losses and gradients of all rows.

What depends on the inputs alone is prepared once. Rows are taken in portions where the activations
of all would take much memory; support and query set go together where that is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map

from metanudge.accel.chain import Chain, Data
from metanudge.accel.flat import Flat
from metanudge.engines.inner import Measured
from metanudge.engines.randomness import Draws
from metanudge.engines.undisturbed import obey
from metanudge.engines.vmapped import explained, repeated
from metanudge.objective import metrics_of_rows
from metanudge.params import Params, num_rows
from metanudge.problem import Problem
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


class Passes:
    """Runs a chain forwards and backwards.

    Attributes:
        theta: θ as one row, laid out as the kernels want it; so are all gradients.
    """

    def __init__(self, chain: Chain, problem: Problem, stack: Stack, draws: Draws) -> None:
        self.theta = Flat.of(problem.theta, chain.orders)
        self._chain = chain
        self._objective = problem.objective
        self._metrics = problem.metrics
        self._stack = stack
        self._tasks = len(stack)
        self._draws = draws
        self._explained: Callable[[Callable[[], Any]], Any] = partial(explained, problem, stack)
        self._prepared: dict[str, tuple[Tensor, list[Data]]] = {}
        self._joined: dict[int, Joined | None] = {}

    def measure(self, d: Params) -> Measured:
        """Query loss and accuracy at θ + d."""
        judge = vmap(self._objective.judge, randomness="same")
        with torch.no_grad():
            phi, values = self.moved(d), []
            for rows, data, targets in self._portions(self._stack.query, "query", num_rows(d)):
                some = {n: p[rows] for n, p in phi.items()}
                run = partial(self._seeded, 0, "query", self._chain.outputs, data, some)
                outputs = self._explained(run)
                values.append(self._explained(partial(judge, outputs, targets)))
                if self._metrics:
                    loss, accuracy, extra = values.pop()
                    own = metrics_of_rows(self._metrics, (outputs, targets), len(outputs), extra)
                    values.append((loss, accuracy, extra | own))
        return Measured(*tree_map(lambda *portions: torch.cat(portions), *values))

    def smooth(self, phi: Params, part: Part, step: int) -> Tensor:
        """Weighted losses of all rows that can be differentiated twice."""
        (inputs, targets), which, weight = part
        targets = repeated(targets, num_rows(phi) // self._tasks)
        losses = self._seeded(step, which, self._chain.losses_layer_by_layer, inputs, targets, phi)
        return losses if weight is None else losses * weight

    def gradient(self, d: Params, parts: list[Part], step: int) -> tuple[Tensor, Flat]:
        """Losses and gradient of a weighted sum of losses; rows do not mix, so the gradient of
        their sum has every row's.
        """
        number, phi = num_rows(d), self.moved(d)
        joined, weight = self._join(parts, number), parts[-1][2]
        if joined is not None and weight is not None:
            obey()
            found, shares = self._room(number), joined.weighted(weight)
            both = partial(self._chain.losses_of_sets, joined.data, joined.targets, shares)
            return self._backward(both, phi, found), self._in_dtype_of(d, found)
        total, gradient = self._by_portions(phi, parts[0], step)
        for part in parts[1:]:
            losses, found = self._by_portions(phi, part, step)
            total = total + losses
            gradient.matrix.add_(found.matrix)
        return total, self._in_dtype_of(d, gradient)

    def _by_portions(self, phi: Params, part: Part, step: int) -> tuple[Tensor, Flat]:
        """Weighted losses on one set of data, and their gradient."""
        (batch, which, weight), number = part, num_rows(phi)
        losses, found = [], self._room(number)
        for rows, data, targets in self._portions(batch, which, number):
            own, into = (
                of if rows == slice(0, number) else {n: leaf[rows] for n, leaf in of.items()}
                for of in (phi, found)
            )
            one = partial(self._seeded, step, which, self._chain.losses, data, targets)
            share = None if weight is None else weight[rows]
            losses.append(self._backward(one, own, into, share))
        return torch.cat(losses) if len(losses) > 1 else losses[0], found

    def _backward(
        self,
        run: Callable[[Params, Params], Tensor],
        phi: Params,
        into: Params,
        weight: Tensor | None = None,
    ) -> Tensor:
        """Losses of rows, times their weights; `run` makes them of φ and places for gradients."""
        leaves = {n: leaf.detach().requires_grad_() for n, leaf in phi.items()}
        losses: Tensor = self._explained(partial(run, leaves, into))
        losses = losses if weight is None else losses * weight
        found = torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True)
        # some are there already
        pairs = [
            (place, g)
            for place, g in zip(into.values(), found, strict=True)
            if place.data_ptr() != g.data_ptr()
        ]
        if pairs:
            torch._foreach_copy_([place for place, _ in pairs], [g for _, g in pairs])
        return losses.detach()

    def _room(self, rows: int) -> Flat:
        """For a gradient."""
        return self.theta.like(self.theta.matrix.new_empty(rows, self.theta.matrix.numel()))

    def _join(self, parts: list[Part], rows: int) -> Joined | None:
        """Support and query together, if both are wanted and it pays."""
        if (
            len(parts) == 1
            or parts[0][0] is not self._stack.support
            or self.theta.matrix.device.type != "cpu"
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
            repeated(t, rows // self._tasks) for t in (torch.cat([targets, other], 1), shares)
        )
        return Joined(data, labels, shares, targets.shape[1])

    def _in_dtype_of(self, d: Params, found: Flat) -> Flat:
        dtype = next(iter(d.values())).dtype
        return found if found.matrix.dtype == dtype else found.like(found.matrix.to(dtype))

    def _seeded(self, step: int, which: str, run: Callable[..., Tensor], *args: Any) -> Tensor:
        """What `run` makes with the random numbers of a step."""
        with self._draws.seeded(step, which):
            return run(*args)

    def _portions(
        self, batch: Batch, which: str, rows: int
    ) -> Iterator[tuple[slice, Data, Tensor]]:
        """The rows that the chain takes at once, with their tasks' data and targets."""
        portions, targets = self._data(batch, which), batch[1]
        limit = portions[0].rows_at_once
        if len(portions) == 1 and (limit is None or rows <= limit):
            yield slice(0, rows), portions[0], repeated(targets, rows // self._tasks)
            return
        for first in range(0, rows, self._tasks):
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

    def moved(self, d: Params) -> Params:
        """φ = θ + d."""
        if isinstance(d, Flat):
            theta = self.theta.matrix
            return d.like((theta + d.matrix).to(theta.dtype))
        return {n: (self.theta[n] + leaf).to(self.theta[n].dtype) for n, leaf in d.items()}
