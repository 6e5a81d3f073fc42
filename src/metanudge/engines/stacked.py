"""The stacked engine: tasks × nudges on one batch axis. Groups of at most `chunk` rows bound the
memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from metanudge.engines.accelerators import Offer, offer_for
from metanudge.engines.inner import Cost, Inner
from metanudge.engines.ownership import claimed
from metanudge.engines.randomness import Draws
from metanudge.engines.uninterrupted import tensors_kept, uninterrupted
from metanudge.engines.vmapped import StackedInner
from metanudge.problem import Problem
from metanudge.solvers.base import check_count
from metanudge.task import Stack, TaskBatch


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
            _group(
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

    def path(self, problem: Problem, batch: TaskBatch, *, second_order: bool) -> str:
        """How the gradients of these tasks are taken, and why not faster."""
        answers = [offer_for(problem, stack) for stack in batch.stacks]
        paths = [
            _slow_path(answer)
            if isinstance(answer, str)
            else (answer.path_twice if second_order else answer.path)
            for answer in answers
        ]
        return " and ".join(dict.fromkeys(paths))


def _group(problem: Problem, stack: Stack, nudges: int, draws: Draws, cost: Cost) -> Inner:
    offer = offer_for(problem, stack)
    if isinstance(offer, Offer):
        return offer.group(problem, stack, nudges, draws, cost)
    group = StackedInner(problem, stack, nudges, draws, cost)
    group.path = _slow_path(offer)
    return group


def _slow_path(why: str) -> str:
    return f"torch.func ({why})"
