"""The seam between the stacked engine and whatever is faster than `torch.func` for models that it
knows.

An accelerator registers itself when it is imported. The engine asks every one of them to take the
gradients of a stack of tasks, and takes the first offer; nothing here knows who they are, and
without any all works, slower. They may also record whole meta-steps and play them again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol, TypeVar

from metanudge.engines.inner import Cost, Inner
from metanudge.engines.randomness import Draws
from metanudge.params import Params
from metanudge.problem import Problem
from metanudge.solvers.base import Solver
from metanudge.task import Stack, TaskBatch

_registered: list[Accelerator] = []
_compiles = ContextVar("compiles", default=True)


@dataclass(frozen=True)
class Offer:
    """To take the gradients of a stack of tasks.

    Attributes:
        group: makes the group, from what every group of the stacked engine is made of.
        path: what it does, for people; `path_twice` where second derivatives are taken.
        fused: whether convolution blocks run as one operation.
    """

    group: Callable[[Problem, Stack, int, Draws, Cost], Inner]
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
