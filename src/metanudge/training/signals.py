"""SIGINT and SIGTERM: what can be done again is broken off, a run is saved, the exit code is 130 or
143. Ctrl-C twice leaves at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from metanudge.training.errors import EXIT_SIGINT, EXIT_SIGTERM

CODES = {int(signal.SIGINT): EXIT_SIGINT, int(signal.SIGTERM): EXIT_SIGTERM}
# seconds in which a meta-step or a batch of tasks may end by itself before it is broken off
PATIENCE = 2.0
_AGAIN = 0.5  # seconds between two tries to break off: callbacks from C may lose an exception


class Interrupted(KeyboardInterrupt):
    """A signal broke off an interruptible block.

    Attributes:
        code: the exit code that tells which signal it was.
    """

    def __init__(self, number: int) -> None:
        self.code = CODES[number]
        super().__init__("Interrupted" if self.code == EXIT_SIGINT else "Asked to stop")


class StopRequest:
    """Remembers that somebody asked the program to stop; handlers are in place inside the `with`
    block.

    Attributes:
        signal: its number; None where nobody asked.
        patience: so many seconds after a signal `Interrupted` is raised; None: never, it is only
            remembered.

    Example:
        >>> with StopRequest() as stop:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     stop.signal == signal.SIGTERM, stop.code
        (True, 143)
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._since = 0.0
        self.patience: float | None = None
        self._before: dict[int, Any] = {}
        self._timer: tuple[float, float] | None = None

    @property
    def code(self) -> int:
        """The exit code that tells which signal it was."""
        assert self.signal is not None
        return CODES[self.signal]

    @contextmanager
    def interruptible(self, patience: float = 0.0) -> Iterator[None]:
        """A block with a patience of its own: a signal raises `Interrupted`, unless the block ends
        by itself before.

        Example:
            >>> try:
            ...     with StopRequest() as stop, stop.interruptible():
            ...         signal.raise_signal(signal.SIGTERM)
            ... except Interrupted as error:
            ...     print(error, error.code)
            Asked to stop 143
        """
        before, self.patience = self.patience, patience
        try:
            self._break_off(None)
            yield
        finally:
            self.patience = before

    def __enter__(self) -> StopRequest:
        # Python allows handlers nowhere else
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in CODES}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            signal.setitimer(signal.ITIMER_REAL, *self._timer)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            _leave(number)
        if self.signal is None:
            self._since = time.monotonic()
            self._come_back()
        self.signal = number
        self._break_off(frame)

    def _come_back(self) -> None:
        """Have the system call again and again until the block has ended."""
        if hasattr(signal, "setitimer"):
            self._before[signal.SIGALRM] = signal.signal(
                signal.SIGALRM, lambda _, frame: self._break_off(frame)
            )
            self._timer = signal.setitimer(signal.ITIMER_REAL, _AGAIN, _AGAIN)

    def _break_off(self, frame: FrameType | None) -> None:
        if (
            self.signal is None
            or self.patience is None
            or time.monotonic() - self._since < self.patience
        ):
            return
        if isinstance(sys.exception(), Interrupted):  # on its way out: what cleans up shall end
            return
        if _importing(frame):
            _leave(self.signal, "Interrupted; nothing was lost.")
        raise Interrupted(self.signal)


def _importing(frame: FrameType | None) -> bool:
    """Whether a module is being loaded, where an exception may leave torch in pieces that abort the
    process.
    """
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def _leave(number: int, message: str = "") -> None:
    """End the process here and now."""
    if sys.stdout is not None and sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h\n")  # the live progress hides the cursor
        sys.stdout.flush()
    if message and os.environ.get("RANK", "0") == "0":
        os.write(2, f"metanudge: {message}\n".encode())
    os._exit(CODES[number])
