"""One thread at a time works on a model: its parameters are overwritten or exchanged meanwhile, and
no other thread must see that.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from metanudge.engines.uninterrupted import restored
from metanudge.problem import Problem


@dataclass(frozen=True)
class _Claim:
    thread: threading.Thread
    things: frozenset[int]
    alone: bool


_claims: dict[object, _Claim] = {}
_lock = threading.Lock()


@contextmanager
def claimed(problem: Problem, *, alone: bool = True) -> Iterator[None]:
    """Within, no other thread may claim the problem's model or one that shares a part, a parameter
    or a buffer with it.

    Without `alone` it may if it, too, only wants to look at it. The same thread may claim it again.
    """
    claim = _Claim(threading.current_thread(), problem.parts, alone)
    token = object()
    with restored(lambda: _release(token)):
        _make(token, claim)
        yield


def _make(token: object, claim: _Claim) -> None:
    with _lock:
        for other in _claims.values():
            if (
                other.thread is not claim.thread
                and (other.alone or claim.alone)
                and not other.things.isdisjoint(claim.things)
            ):
                raise RuntimeError(
                    f"The model is in use in another thread ({other.thread.name}), or shares"
                    " parameters with one that is. Meta-gradients, evaluations and adaptations"
                    " change its parameters while they run and put them back at the end. Give each"
                    " thread a learner with its own copy of the model (copy.deepcopy(model)), or"
                    " take turns with a threading.Lock."
                )
        _claims[token] = claim


def _release(token: object) -> None:
    _claims.pop(token, None)
