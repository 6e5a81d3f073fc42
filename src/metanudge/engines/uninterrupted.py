"""Signals wait while the user's module is not as it was.

A handler that raises (Ctrl-C does) may do so between any two instructions: of ours, and of torch's,
where a parameter is exchanged or a `vmap` is entered. Blocking the signal does not help, since
another thread may take it and Python runs the handler in the main thread all the same. So within
`uninterrupted` all of Python's handlers are replaced by one that takes a note. What was noted goes
to the handler that was there before, at the next loss evaluation (`obey`) and on the way out;
nothing else can raise there, so that all that was touched is put back. Handlers exist in the main
thread only; in others there is nothing to do.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal.getsignal makes an enum of its answer, which takes 40 times as long
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import nn

PATIENCE = 2.0
"""Seconds that a signal waits; then one more is obeyed wherever the program is, since the
evaluation may hang.
"""

_NUMBERS = range(1, _signal.NSIG)
_open: set[object] = set()
_replaced: dict[int, Callable[[int, FrameType | None], Any]] = {}
_waiting: list[tuple[int, float]] = []


class _Interrupted(BaseException):
    """What a handler raised, on its way out through code that may have its own ideas about
    errors.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Within, signals wait for `obey` or the end; can be nested."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    token = object()
    try:
        with restored(lambda: _leave(token)):
            _enter(token)
            yield
    except _Interrupted as interrupted:
        if _open:
            raise
        raise interrupted.error from None


def obey() -> None:
    """Hand over a signal that waits: everything touched up to here is put back if its handler
    raises.
    """
    if _waiting and threading.current_thread() is threading.main_thread():
        number, _ = _waiting.pop(0)
        try:
            _replaced[number](number, sys._getframe())
        except BaseException as error:
            raise _Interrupted(error) from None


@contextmanager
def restored(restore: Callable[[], None]) -> Iterator[None]:
    """Run `restore` on the way out, and again in case something cut it short; it must not matter
    how often it runs.
    """
    try:
        try:
            yield
        finally:
            restore()
    finally:
        restore()


@contextmanager
def tensors_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within, `functional_call` may exchange the modules' parameters and buffers; should that be
    cut short, they are put back.
    """
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (tensors, dict(tensors))
        for module in modules
        for tensors in (module._parameters, module._buffers)
        if tensors
    ]

    def restore() -> None:
        for tensors, before in kept:
            if any(tensors.get(name) is not tensor for name, tensor in before.items()):
                tensors.update(before)

    with restored(restore):
        yield


def _enter(token: object) -> None:
    _open.add(token)
    for number in _NUMBERS:
        handler = _signal.getsignal(number)
        if callable(handler) and handler is not _note:
            _replaced[number] = handler
            _signal.signal(number, _note)


def _leave(token: object) -> None:
    _open.discard(token)
    if not _open:
        with restored(_put_back):
            pass
        _hand_over()


def _put_back() -> None:
    for number, handler in list(_replaced.items()):
        if _signal.getsignal(number) is _note:  # or somebody has set another one meanwhile
            _signal.signal(number, handler)


def _hand_over() -> None:
    """Call the handlers of what is still waiting, all of them."""
    if _waiting:
        number, _ = _waiting.pop(0)
        try:
            _replaced[number](number, sys._getframe())
        finally:
            _hand_over()


def _note(number: int, frame: FrameType | None) -> None:
    now = time.monotonic()
    if not _open or any(same == number and now - since > PATIENCE for same, since in _waiting):
        _replaced[number](number, frame)
    else:
        _waiting.append((number, now))
