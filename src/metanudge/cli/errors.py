"""How the command line speaks and fails, on any terminal, file or pipe.

A failure is one clean message on stderr and an exit code that means something; warnings are told as
notes. Signs that the encoding lacks are spelled out, and a lost reader ends nothing.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from metanudge.names import printable
from metanudge.training.errors import (
    EXIT_BAD_INPUT,
    EXIT_CANNOT_WRITE,
    EXIT_OUT_OF_MEMORY,
    EXIT_SIGINT,
    CheckpointError,
    Interrupted,
    StopRequest,
    StopTraining,
    UserError,
    is_out_of_memory,
)

_SPELLED = {
    "λ": "lambda", "ν": "nu", "θ": "theta", "φ": "phi", "δ": "delta", "α": "alpha", "ε": "eps",
    "∇": "grad ", "σ": "sigma",
    "→": "->", "←": "<-", "±": "+/-", "×": "x", "·": "-", "…": "...", "–": "-", "—": "-", "−": "-",
    "≤": "<=", "≥": ">=", "≈": "~",
    "‖": "||", "²": "^2", "√": "sqrt", "‘": "'", "’": "'", "“": '"', "”": '"', "•": "*", "█": "#",
}  # fmt: skip
_NARROWEST = 40  # columns; with less, the flag parser's help does not come to an end
_lost: dict[int, str] = {}  # descriptor → why nothing more is written to it
_FULL = (errno.ENOSPC, errno.EDQUOT)


def guarded(command: Callable[[], int]) -> int:
    """Run a command. What the user can put right ends with exit code 2 and a message; bugs keep
    their traceback.
    """
    with StopRequest() as stop:
        try:
            with stop.interruptible():
                return command()
        except StopTraining as error:
            report(str(error))
            return error.code
        except (UserError, CheckpointError, OSError) as error:
            report(f"error: {error}")
            return _code(error)
        except KeyboardInterrupt as error:
            report(
                f"{error if isinstance(error, Interrupted) else 'Interrupted'}; nothing was lost."
            )
            return error.code if isinstance(error, Interrupted) else EXIT_SIGINT
        except (RuntimeError, MemoryError) as error:
            if is_out_of_memory(error):
                report(
                    f"Out of memory ({str(error).splitlines()[0]}). Use a smaller model, fewer"
                    " examples, or a device with more memory."
                )
                return EXIT_OUT_OF_MEMORY
            raise


def _code(error: BaseException | None) -> int:
    """Bad input, unless a disk that takes no more is behind it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return EXIT_CANNOT_WRITE
        error = error.__cause__
    return EXIT_BAD_INPUT


def report(message: str) -> None:
    """A message on stderr, from one process only."""
    if os.environ.get("RANK", "0") == "0":
        print(f"metanudge: {printable(message)}", file=sys.stderr, flush=True)


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Tell warnings that are meant for users as notes on stderr; leave those for programmers as
    they are.
    """
    with warnings.catch_warnings():
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if issubclass(category, UserWarning):
                report(f"note: {message}")
            else:
                usual(message, category, *where, **more)

        warnings.showwarning = show
        yield


# Standard output and error


def prepare() -> None:
    """Make standard output and error fit for everything that a command may print; called once,
    before anything is.
    """
    for number in range(3):
        _occupy(number)
    codecs.register_error("metanudge", _spell)
    if shutil.get_terminal_size().columns < _NARROWEST:
        os.environ["COLUMNS"] = str(_NARROWEST)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 (as long as the process)
    sys.stdout = _stream(sys.stdout, 1)
    sys.stderr = _stream(sys.stderr, 2)


def finish(code: int) -> int:
    """Write what is left; the exit code, which says so where a file or disk did not take the
    output.
    """
    _Descriptor.goes_on = False
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return EXIT_CANNOT_WRITE if code == 0 and _lost.get(1) else code


def going_on() -> None:
    """From now on the command says so when nobody reads its output any more, because it works
    on.
    """
    _Descriptor.goes_on = True


def _occupy(number: int) -> None:
    """A closed standard descriptor would be given to the next file that is opened, and a stray
    print would end up in it.
    """
    try:
        os.fstat(number)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_RDWR), number)


def _stream(old: Any, number: int) -> Any:
    if os.name == "nt" and old is not None:  # a console of its own kind, not a descriptor
        old.reconfigure(errors="metanudge")
        return old
    kept = {
        name: getattr(old, name, None) for name in ("encoding", "line_buffering", "write_through")
    }
    return io.TextIOWrapper(
        io.BufferedWriter(_Descriptor(number)),
        **({"encoding": "utf-8"} if old is None else kept),
        errors="metanudge",
    )


class _Descriptor(io.FileIO):
    """Standard output or error; whatever cannot be written to it any more is dropped, and said
    once.
    """

    goes_on = False

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)

    def write(self, data: Any, /) -> int:
        number, size = self.fileno(), memoryview(data).nbytes
        try:
            return size if number in _lost else super().write(data) or 0
        except OSError as error:
            # the reader has seen enough, as in `| head`
            by_choice = isinstance(error, BrokenPipeError)
            _lost[number] = "" if by_choice else str(error)
            if number == 1 and (self.goes_on or not by_choice):
                why = (
                    "nobody reads the output any more"
                    if by_choice
                    else f"the output cannot be written ({error.strerror})"
                )
                print(f"metanudge: {why}; going on without it.", file=sys.stderr, flush=True)
            return size


def _spell(error: UnicodeError) -> tuple[str, int]:
    """An error handler of codecs: what an encoding lacks, in ASCII; bytes of a file name that are
    no text as \\xNN.
    """
    assert isinstance(error, UnicodeEncodeError)
    return "".join(map(_ascii, error.object[error.start : error.end])), error.end


def _ascii(sign: str) -> str:
    if sign in _SPELLED:
        return _SPELLED[sign]
    if "─" <= sign <= "╿":  # lines of tables and boxes
        return "-" if sign in "─━═╌╍┄┅┈┉╴╶╸╺╼╾" else "|" if sign in "│┃║╎╏┆┇┊┋╵╷╹╻╽╿" else "+"
    if "\udc80" <= sign <= "\udcff":
        return f"\\x{ord(sign) - 0xDC00:02x}"
    return "?"
