"""SIGINT and SIGTERM: finish the meta-step, save, leave with 130 or 143. A second Ctrl-C leaves at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any

from metanudge.training.errors import EXIT_SIGINT, EXIT_SIGTERM

CODES = {int(signal.SIGINT): EXIT_SIGINT, int(signal.SIGTERM): EXIT_SIGTERM}


class StopRequest:
    """Remembers that somebody asked the run to stop; handlers are in place inside the `with` block.

    Example:
        >>> with StopRequest() as stop:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     stop.signal == signal.SIGTERM, stop.code
        (True, 143)
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    @property
    def code(self) -> int:
        """The exit code that tells which signal it was."""
        assert self.signal is not None
        return CODES[self.signal]

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
            self._before = {number: signal.signal(number, self._handle) for number in CODES}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            if sys.stdout.isatty():
                sys.stdout.write("\x1b[?25h\n")  # the live progress hides the cursor
                sys.stdout.flush()
            os._exit(EXIT_SIGINT)
        self.signal = number
