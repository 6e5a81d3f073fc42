"""Rows spread over threads, one core each.

torch divides every single operation among its threads, which wait for each other after each of them. Rows are independent, so a thread
can take some of them all the way instead: hundreds of operations between two meetings, each on data that stays in one core's cache.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

_pools: dict[int, ThreadPoolExecutor] = {}
_making = threading.Lock()


def spread(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """`work` of every item, in as many threads as torch uses; gradients are off. A single item has all of torch's threads to itself."""

    def quietly(item: Item) -> Result:
        with torch.no_grad():
            return work(item)

    threads = torch.get_num_threads()
    if len(items) == 1 or threads == 1:
        return [quietly(item) for item in items]
    return list(_pool(threads).map(quietly, items))


def _pool(threads: int) -> ThreadPoolExecutor:
    with _making:
        if threads not in _pools:
            _pools[threads] = pool = ThreadPoolExecutor(threads, thread_name_prefix="metanudge")
            everyone = threading.Barrier(threads)
            for _ in pool.map(lambda _: (everyone.wait(), torch.set_num_threads(1)), range(threads)):
                pass
            torch.set_num_threads(threads)  # the number for threads to come is global; here nothing changes
        return _pools[threads]


# A forked process has the pools but not their threads.
os.register_at_fork(after_in_child=_pools.clear)
