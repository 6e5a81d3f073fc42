"""What ends a run before its time: errors, SIGINT and SIGTERM; the exit codes of the command line;
and checks of settings that need no torch.

After a signal, what can be done again is broken off, a run is saved, and the exit code is 130 or
143. Ctrl-C twice leaves at once.
"""

from __future__ import annotations

import os
import re
import reprlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from metanudge.names import printable

EXIT_DONE = 0
EXIT_BUG = 1
EXIT_BAD_INPUT = 2
EXIT_NOT_FINITE = 4
EXIT_OUT_OF_MEMORY = 5
EXIT_CANNOT_WRITE = 6
EXIT_SIGINT = 130
EXIT_SIGTERM = 143

CODES = {int(signal.SIGINT): EXIT_SIGINT, int(signal.SIGTERM): EXIT_SIGTERM}
# seconds in which a meta-step or a batch of tasks may end by itself before it is broken off
PATIENCE = 2.0
_AGAIN = 0.5  # seconds between two tries to break off: callbacks from C may lose an exception

EXIT_CODES = {
    EXIT_DONE: "done",
    EXIT_BUG: "failed check or bug",
    EXIT_BAD_INPUT: "bad input",
    EXIT_NOT_FINITE: "NaN or Inf",
    EXIT_OUT_OF_MEMORY: "out of memory",
    EXIT_CANNOT_WRITE: "cannot write",
    EXIT_SIGINT: "Ctrl-C",
    EXIT_SIGTERM: "SIGTERM",
}
"""What each code means, as `--help` says it."""


def exit_codes() -> str:
    """All codes in one line."""
    return (
        " · ".join(f"{code} {meaning}" for code, meaning in EXIT_CODES.items())
        + " (both after saving)"
    )


class UserError(Exception):
    """Something the user can put right: what happened, why, and what to do. Exit code 2, no
    traceback.
    """


class ChangedError(UserError):
    """A configuration that is not what was sealed.

    Attributes:
        config: as it is now.
    """

    def __init__(self, message: str, config: Any) -> None:
        super().__init__(message)
        self.config = config


@contextmanager
def refused(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """What is refused within (`TypeError` and `ValueError` where no kinds are given) becomes a
    `UserError` that begins with `what`.

    Example:
        >>> with refused("--tasks: "):
        ...     int("many")
        Traceback (most recent call last):
        metanudge.training.errors.UserError: --tasks: invalid literal for int() with base 10: 'many'
    """
    kinds = kinds or (TypeError, ValueError)
    try:
        yield
    except kinds as error:
        raise UserError(f"{what}{error}") from error


@contextmanager
def readable(file: Path, remedy: str = "") -> Iterator[None]:
    """Within, what the system says against reading a file becomes a `UserError`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}).{remedy}") from error


class StopTraining(Exception):
    """A run that ends early, in good order.

    Attributes:
        code: the exit code.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message, code)  # both: it is sent to other ranks
        self.code = code

    def __str__(self) -> str:
        return str(self.args[0])


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; says which file, what is wrong with it and what to
    do.

    Attributes:
        file: the file or folder in question.
        alternative: the newest earlier intact checkpoint, as a name for `CheckpointStore.load`;
            None if there is none.
    """

    def __init__(self, file: Path, problem: str, fix: str, alternative: str | None = None) -> None:
        super().__init__(file, problem, fix, alternative)
        self.file, self.problem, self.fix, self.alternative = file, problem, fix, alternative

    def __str__(self) -> str:
        offer = (
            f" Checkpoint {self.alternative!r} is intact: load that one."
            if self.alternative
            else ""
        )
        return f"{self.file} {self.problem}. {self.fix}{offer}"


_OUT_OF_MEMORY = ("out of memory", "allocate memory", "not enough memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the memory is used up.

    torch has a class for that on GPUs only. On a CPU it raises a plain `RuntimeError`, of which its
    words are all there is to go by.
    """
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)
    )


# Signals


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
    def interruptible(self, patience: float | None = 0.0) -> Iterator[None]:
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

    def __exit__(self, *_: object) -> None:
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


def check_text(what: str, value: Any) -> None:
    """Settings are written to files and shown on terminals: all must be text, and none may give a
    terminal orders.
    """
    if not isinstance(value, str):
        return
    if printable(value) != value:
        raise UserError(f"{what} is {value!r}, which has control characters in it. Remove them.")
    if value != value.encode(errors="ignore").decode():
        name = value.encode(errors="surrogateescape")
        raise UserError(
            f"{what} {name!r} is not valid UTF-8, so no configuration can hold it. Rename the file"
            " or folder."
        )


def count(flag: str, value: int | str | None) -> int | tuple[int, int] | None:
    """How many: a number as it is, a range such as 3-10 as (least, most).

    Example:
        >>> count("--ways", 5), count("--ways", "3-10")
        (5, (3, 10))
    """
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"([0-9]{1,18})(?:-([0-9]{1,18}))?", value.strip())
    if found is None:
        text = reprlib.repr(value)
        raise UserError(f"{flag} {text} is neither a number nor a range such as 3-10.")
    least, most = (int(found[1]), int(found[2] or found[1]))
    if least > most:
        raise UserError(
            f"{flag} {value} runs backwards. Write the smaller number first: {most}-{least}."
        )
    return least if least == most else (least, most)


def check_count(flag: str, value: int | str | None, least: int) -> None:
    """Refuse a number, or one end of a range, that makes no sense."""
    found = count(flag, value)
    for number in found if isinstance(found, tuple) else (found,):
        if number is not None and number < least:
            raise UserError(f"{flag} {value} is too small. Use {least} or more.")
        if number is not None and number >= 1 << 63:
            raise UserError(f"{flag} {value} is too large. Use a number below 2**63.")


def check_ways(ways: int | str | None, head: str) -> None:
    """Refuse a range of ways for a head that has one number of outputs."""
    if head == "fixed" and isinstance(count("--ways", ways), tuple):
        raise UserError(
            f"--ways {ways}: the last layer of a model has one number of outputs. For tasks of"
            " different numbers of classes it is made from the support set: add --head prototypes."
        )


def spelled(least: int, most: int) -> int | str:
    """As a configuration writes it.

    Example:
        >>> spelled(5, 5), spelled(3, 10)
        (5, '3-10')
    """
    return least if least == most else f"{least}-{most}"
