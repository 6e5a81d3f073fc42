"""Meta-steps recorded once as CUDA graphs and replayed: what was thousands of launches from Python
becomes one.

A meta-step on tasks of the same shapes launches the same kernels every time. The first call runs as
it is (and warms everything up), the second is recorded on copies of its inputs, the others copy
their tasks there and replay. What cannot be recorded (random draws in the model, a step that waits
for the device) goes on running as it is.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from metanudge.task import TaskBatch, tensors

_KEPT = 4  # recordings; more means shapes change all the time, and then recording does not pay
logger = logging.getLogger("metanudge")
Result = TypeVar("Result")


@dataclass
class _Recording(Generic[Result]):
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    result: Result


class Captures:
    """The recordings of one learner."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, _Recording[Any] | str] = OrderedDict()
        self._pool: Any = None

    def run(
        self,
        key: Hashable,
        batch: TaskBatch,
        compute: Callable[[TaskBatch], Result],
        *,
        drew: Callable[[], bool],
    ) -> Result:
        """What `compute` makes of the batch; its tensors are overwritten by the next run with the
        same key.

        Args:
            key: everything that decides which kernels run on which memory, apart from the tasks'
                contents.
            drew: whether the computation just made used random numbers.
        """
        known = self._known.get(key)
        if isinstance(known, _Recording):
            self._known.move_to_end(key)
            torch._foreach_copy_(known.inputs, _leaves(batch))
            known.graph.replay()
            return known.result
        if known == "seen":
            recording = self._record(batch, compute)
            self._known[key] = recording if recording is not None else "as it is"
            if recording is not None:
                recording.graph.replay()
                return recording.result
        result = compute(batch)
        if known is None:
            self._known[key] = "as it is" if drew() else "seen"
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return result

    def _record(
        self, batch: TaskBatch, compute: Callable[[TaskBatch], Result]
    ) -> _Recording[Result] | None:
        copy = batch.mapped(torch.clone)
        graph = torch.cuda.CUDAGraph()
        try:
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = compute(copy)
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            logger.info(
                "This meta-step cannot be recorded as a CUDA graph and runs as it is: %s",
                str(error).splitlines()[0],
            )
            torch.cuda.synchronize()
            return None
        return _Recording(graph, _leaves(copy), result)


def _leaves(batch: TaskBatch) -> list[Tensor]:
    return [
        leaf
        for stack in batch.stacks
        for part in (stack.support, stack.query)
        for leaf in tensors(part)
    ]
