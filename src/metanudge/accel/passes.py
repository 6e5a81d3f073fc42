"""A chain at work on the tasks of a stack: losses and gradients of all rows.

What depends on the inputs alone is prepared once. Rows are taken in portions where the activations
of all would take much memory; support and query set go together where that is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from metanudge.accel.chain import Chain, Data
from metanudge.accel.flat import Flat
from metanudge.engines.inner import Measured
from metanudge.engines.randomness import Draws
from metanudge.engines.undisturbed import obey
from metanudge.engines.vmapped import explained, repeated
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
                outputs = self._seeded(partial(self._chain.outputs, data, some), 0, "query")
                values.append(self._explained(partial(judge, outputs, targets)))
        return Measured(*(torch.cat(column) for column in zip(*values, strict=True)))

    def smooth(self, phi: Params, part: Part, step: int) -> Tensor:
        """Weighted losses of all rows that can be differentiated twice."""
        (inputs, targets), which, weight = part
        targets = repeated(targets, num_rows(phi) // self._tasks)
        with self._draws.seeded(step, which):
            losses = self._chain.losses_layer_by_layer(inputs, targets, phi, self._objective)
        return losses if weight is None else losses * weight

    def gradient(self, d: Params, parts: list[Part], step: int) -> tuple[Tensor, Flat]:
        """Losses and gradient of a weighted sum of losses; rows do not mix, so the gradient of
        their sum has every row's.
        """
        number = num_rows(d)
        joined, weight = self._join(parts, number), parts[-1][2]
        if joined is not None and weight is not None:
            return self._gradient_of_both(d, joined, weight)
        phi, theta, objective = self.moved(d), self.theta, self._objective
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

    def _gradient_of_both(self, d: Params, joined: Joined, weight: Tensor) -> tuple[Tensor, Flat]:
        """Losses and gradient of f̂ + ν f, evaluated in one go."""
        obey()
        leaves = {n: leaf.detach().requires_grad_() for n, leaf in self.moved(d).items()}
        theta = self.theta
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


def _collect(gradients: Sequence[Tensor], into: Params) -> None:
    """Copy gradients to where they belong, unless they are there."""
    pairs = [
        (place, g)
        for place, g in zip(into.values(), gradients, strict=True)
        if place.data_ptr() != g.data_ptr()
    ]
    if pairs:
        torch._foreach_copy_([place for place, _ in pairs], [g for _, g in pairs])
