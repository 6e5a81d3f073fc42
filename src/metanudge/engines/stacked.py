"""The stacked engine: tasks × nudges on one batch axis. Groups of at most `chunk` rows bound the
memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from metanudge.engines.chain import Chain
from metanudge.engines.chained import ChainedInner
from metanudge.engines.inner import Cost, Inner
from metanudge.engines.ownership import claimed
from metanudge.engines.randomness import Draws
from metanudge.engines.uninterrupted import tensors_kept, uninterrupted
from metanudge.engines.vmapped import StackedInner
from metanudge.problem import Problem
from metanudge.solvers.base import check_count
from metanudge.task import Batch, Stack, TaskBatch


@dataclass(frozen=True)
class StackedEngine:
    """Solves up to `chunk` rows (tasks × nudges) at once; None for all of them.

    The chunk bounds the memory and does not change the result.
    """

    chunk: int | None = None
    name = "stacked"

    def __post_init__(self) -> None:
        if self.chunk is not None:
            check_count(
                self.chunk,
                "chunk",
                "It is the number of solves (tasks × nudges) held in memory at once.",
            )

    @contextmanager
    def session(
        self,
        problem: Problem,
        batch: TaskBatch,
        *,
        width: int,
        seed: int,
        cost: Cost,
        first: int = 0,
    ) -> Iterator[Iterator[Inner]]:
        """The tasks of a batch in groups of equal shape, small enough for the chunk."""
        tasks_at_once = len(batch) if self.chunk is None else max(1, self.chunk // width)
        nudges_at_once = width if self.chunk is None else min(width, self.chunk)
        draws = Draws(seed, problem.device, problem.modules)
        groups = (
            _kind(problem, stack)(
                problem,
                stack[begin : begin + tasks_at_once].moved(first),
                nudges_at_once,
                draws,
                cost,
            )
            for stack in batch.stacks
            for begin in range(0, len(stack), tasks_at_once)
        )
        with uninterrupted(), claimed(problem), draws.preserved(), tensors_kept(problem.modules):
            problem.proximal.refresh()
            yield groups
        cost.drew = draws.used


def _kind(problem: Problem, stack: Stack) -> type[StackedInner]:
    """Chains of common layers on pairs of tensors have kernels of their own."""
    alike = len({leaf.dtype for leaf in problem.parameters.values()}) == 1
    pairs = all(map(_is_pair, (stack.support, stack.query)))
    return ChainedInner if alike and pairs and Chain.of(problem) is not None else StackedInner


def runs_chain(problem: Problem, batch: TaskBatch) -> bool:
    """Whether the model is a chain of layers that has kernels of its own, on the data of all
    tasks.
    """
    return all(_kind(problem, stack) is ChainedInner for stack in batch.stacks)


def runs_trunk(problem: Problem, batch: TaskBatch) -> bool:
    """Whether the model begins with convolution blocks that run as one operation on the data of all
    tasks.
    """
    chain = Chain.of(problem)
    sets = [data for stack in batch.stacks for data in (stack.support, stack.query)]
    return chain is not None and all(_is_pair(data) and chain.runs_trunk(data[0]) for data in sets)


def _is_pair(batch: Batch) -> bool:
    return (
        isinstance(batch, (tuple, list))
        and len(batch) == 2
        and all(isinstance(leaf, Tensor) for leaf in batch)
    )
