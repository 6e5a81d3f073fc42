"""Meta-steps recorded once as CUDA graphs and replayed: what was thousands of launches from Python
becomes one.

A meta-step on tasks of the same shapes launches the same kernels every time. The first call runs as
it is (and warms everything up), the second is recorded on copies of its inputs, the others copy
their tasks there and replay. What cannot be recorded (random draws in the model, a step that waits
for the device) goes on running as it is.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor

from metanudge.engines.randomness import Habit
from metanudge.engines.stacked import MetaStep, SumT, compiles
from metanudge.problem import Problem
from metanudge.proximal import Diagonal
from metanudge.solvers.base import LinearSolver
from metanudge.task import TaskBatch

_KEPT = 4  # recordings; more means shapes change all the time, and then recording does not pay
logger = logging.getLogger("metanudge")


@dataclass
class _Recording(Generic[SumT]):
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    result: SumT

    def replay(self) -> SumT:
        """The result of the inputs as they are now, with a gradient that no replay overwrites."""
        self.graph.replay()
        result, gradient = copy.copy(self.result), self.result.gradient
        copies = torch._foreach_mul(list(gradient.values()), 1.0)
        result.gradient = dict(zip(gradient, copies, strict=True))
        return result


class Recordings:
    """The recordings of one learner."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, _Recording[Any] | str] = OrderedDict()
        self._pool: Any = None

    def run(self, step: MetaStep, tasks: TaskBatch, compute: Callable[[TaskBatch], SumT]) -> SumT:
        """What `compute` makes of the tasks. Its gradient is the caller's, all else is overwritten
        by the next run of the same step.
        """
        if not (compiles() and _repeats_itself(step)):
            return compute(tasks)
        key = (step, *_addresses(step.problem), _shapes(tasks), _precision(step.problem.device))
        known = self._known.get(key)
        if isinstance(known, _Recording):
            self._known.move_to_end(key)
            torch._foreach_copy_(known.inputs, tasks.tensors)
            return known.replay()
        if known == "seen":
            recording = self._record(tasks, compute)
            self._known[key] = recording if recording is not None else "as it is"
            if recording is not None:
                return recording.replay()
        result = compute(tasks)
        if known is None:
            self._known[key] = "seen" if Habit(step.problem.modules).is_quiet else "as it is"
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return result

    def _record(
        self, batch: TaskBatch, compute: Callable[[TaskBatch], SumT]
    ) -> _Recording[SumT] | None:
        copies = batch.mapped(torch.clone)
        graph = torch.cuda.CUDAGraph()
        try:
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = compute(copies)
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            logger.info(
                "This meta-step cannot be recorded as a CUDA graph and runs as it is: %s",
                str(error).splitlines()[0],
            )
            torch.cuda.synchronize()
            return None
        return _Recording(graph, copies.tensors, result)


def _repeats_itself(step: MetaStep) -> bool:
    """Whether every meta-step launches the same kernels and never waits for the device."""
    solver = step.solver
    steady = isinstance(solver, LinearSolver) and solver.tol is None and solver.batch_size is None
    # an operator or a regulariser may do anything
    steady = steady and isinstance(step.problem.proximal, Diagonal)
    return steady and step.problem.device.type == "cuda" and step.repeats_itself


def _addresses(problem: Problem) -> list[Hashable]:
    """Where the meta-parameters and buffers lie (the stiffness belongs to the problem), and the
    modes of the model's parts.
    """
    parameters = [leaf.data_ptr() for leaf in problem.meta_parameters.values()]
    buffers = [
        leaf.data_ptr()
        for module in problem.modules
        for leaf in module._buffers.values()
        if leaf is not None
    ]
    return [*parameters, *buffers, *(module.training for module in problem.modules)]


def _shapes(tasks: TaskBatch) -> Hashable:
    return tuple((stack.places, stack.signature) for stack in tasks.stacks)


def _precision(device: torch.device) -> Hashable:
    autocast = (
        torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    )
    return autocast, torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
