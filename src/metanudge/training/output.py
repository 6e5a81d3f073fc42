"""What the process says, on any terminal, file or pipe: signs that the encoding lacks are spelled
out, a terminal is given no orders, and a lost reader ends nothing.
"""

from __future__ import annotations

import codecs
import io
import os
import re
import shutil
import sys
from typing import Any

from metanudge.training.errors import EXIT_CANNOT_WRITE

_SPELLED = {
    "λ": "lambda", "ν": "nu", "θ": "theta", "φ": "phi", "δ": "delta", "α": "alpha", "ε": "eps",
    "∇": "grad ", "σ": "sigma",
    "→": "->", "←": "<-", "±": "+/-", "×": "x", "·": "-", "…": "...", "–": "-", "—": "-", "−": "-",
    "≤": "<=", "≥": ">=", "≈": "~",
    "‖": "||", "²": "^2", "√": "sqrt", "‘": "'", "’": "'", "“": '"', "”": '"', "•": "*", "█": "#",
}  # fmt: skip
# All control characters but newline and tab, and those that reverse the direction of text.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_NARROWEST = 40  # columns; with less, the flag parser's help does not come to an end
_lost: dict[int, str] = {}  # descriptor → why nothing more is written to it


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


def printable(text: str) -> str:
    r"""Text with control characters, which could move a terminal's cursor or rename its window,
    spelled out.

    Example:
        >>> printable("cat\x1b[2J")
        'cat\\x1b[2J'
    """
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def clock(seconds: float) -> str:
    """Seconds as m:ss or h:mm:ss.

    Example:
        >>> clock(65), clock(3665)
        ('1:05', '1:01:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


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
