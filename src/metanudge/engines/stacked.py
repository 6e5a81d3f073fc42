"""The stacked engine: tasks × nudges on one batch axis. Groups of at most `chunk` rows bound the
memory.

Gradients are taken under `torch.func`, which runs nearly any model, unless an accelerator offers to
take them: one that is faster for models it knows. Accelerators register themselves when they are
imported, and nothing here knows who they are; without any all works, slower. They may also record
whole meta-steps and play them again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol, TypeVar

from metanudge.engines.inner import Cost, Inner
from metanudge.engines.randomness import Draws
from metanudge.engines.undisturbed import claimed, tensors_kept, uninterrupted
from metanudge.engines.vmapped import Members, StackedInner
from metanudge.params import Params
from metanudge.problem import Problem
from metanudge.solvers.base import Solver, check_count
from metanudge.task import Stack, TaskBatch

_registered: list[Accelerator] = []
_compiles = ContextVar("compiles", default=True)


@dataclass(frozen=True)
class Offer:
    """To take the gradients of a stack of tasks.

    Attributes:
        group: makes the group of its members.
        path: what it does, for people; `path_twice` where second derivatives are taken.
        fused: whether convolution blocks run as one operation.
    """

    group: Callable[[Members], Inner]
    path: str
    path_twice: str
    fused: bool


@dataclass(frozen=True)
class MetaStep:
    """All that decides what a meta-step does, apart from the tasks and the values of parameters.

    Attributes:
        repeats_itself: whether the estimator does the same every time and never waits for the
            device.
    """

    problem: Problem
    solver: Solver
    estimator: Hashable
    engine: Hashable
    metrics: bool
    first: int
    repeats_itself: bool


class Sum(Protocol):
    """What a meta-step makes: a meta-gradient, and whatever is known about it."""

    gradient: Params


SumT = TypeVar("SumT", bound=Sum)


class Recorder(Protocol):
    """Records meta-steps that repeat themselves."""

    def run(self, step: MetaStep, tasks: TaskBatch, compute: Callable[[TaskBatch], SumT]) -> SumT:
        """What `compute` makes of the tasks. Its gradient is the caller's, all else is overwritten
        by the next run of the same step.
        """


class Accelerator(Protocol):
    """Who can take gradients."""

    def offer(self, problem: Problem, stack: Stack) -> Offer | str:
        """To take the gradients of these tasks, or why not."""

    def recorder(self) -> Recorder:
        """A recorder for one learner."""


def register(accelerator: Accelerator) -> None:
    """Have the stacked engine ask this one too."""
    _registered.append(accelerator)


def offer_for(problem: Problem, stack: Stack) -> Offer | str:
    """The first offer for a stack of tasks, or why there is none."""
    refusals = []
    for accelerator in _registered:
        answer = accelerator.offer(problem, stack)
        if isinstance(answer, Offer):
            return answer
        refusals.append(answer)
    return "; ".join(refusals) or "no accelerator is installed"


def offers_for(problem: Problem, batch: TaskBatch) -> list[Offer]:
    """Offers for all stacks of a batch; empty where one was refused."""
    answers = [offer_for(problem, stack) for stack in batch.stacks]
    offers = [answer for answer in answers if isinstance(answer, Offer)]
    return offers if len(offers) == len(answers) else []


def new_recorder() -> Recorder | None:
    """A recorder for one learner, where an accelerator has one."""
    return _registered[0].recorder() if _registered else None


@contextmanager
def compilation(allowed: bool) -> Iterator[None]:
    """Within, nothing is compiled or recorded unless this and all surrounding ones allow it."""
    before = _compiles.set(_compiles.get() and allowed)
    try:
        yield
    finally:
        _compiles.reset(before)


def compiles() -> bool:
    """Whether kernels may be built and meta-steps recorded."""
    return _compiles.get()


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
        parts = (
            stack[begin : begin + tasks_at_once].moved(first)
            for stack in batch.stacks
            for begin in range(0, len(stack), tasks_at_once)
        )
        with uninterrupted(), claimed(problem), draws.preserved(), tensors_kept(problem.modules):
            problem.proximal.refresh()
            yield (_group(Members(problem, p, nudges_at_once, draws, cost)) for p in parts)

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


def _group(members: Members) -> Inner:
    offer = offer_for(members.problem, members.stack)
    if isinstance(offer, Offer):
        return offer.group(members)
    group = StackedInner(members)
    group.path = _slow_path(offer)
    return group


def _slow_path(why: str) -> str:
    return f"torch.func ({why})"
