"""When the memory runs out: the same call again with half as many solves at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from metanudge.learner import MetaLearner

T = TypeVar("T")


class OutOfMemory(Exception):
    """One solve at a time is still too much; the message is torch's."""


def halving(call: Callable[[], T], learner: MetaLearner, *, rows: int, halves: Callable[[], bool], note: Callable[[int, int], None]) -> T:
    """Call, with half of `learner.chunk` after each time the memory runs out; the learner keeps the smaller chunk.

    Args:
        call: computes with the learner, and may be called again.
        learner: whose chunk is halved.
        rows: solves that the call makes; what the first chunk is when the learner has none.
        halves: whether the engine in use heeds the chunk.
        note: told the old and the new chunk.
    """
    while True:
        try:
            return call()
        except torch.OutOfMemoryError as error:
            message = str(error).splitlines()[0]
        except RuntimeError as error:
            if "can't allocate memory" not in str(error) and "not enough memory" not in str(error):
                raise
            message = str(error).splitlines()[0]
        # Out here the exception, and with it the tensors of its frames, is gone.
        if next(learner.parameters()).device.type == "cuda":
            torch.cuda.empty_cache()
        chunk = min(learner.chunk or rows, rows)
        if chunk <= 1 or not halves():
            raise OutOfMemory(message)
        learner.chunk = chunk // 2
        note(chunk, learner.chunk)
