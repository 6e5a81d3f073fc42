"""The program `metanudge`: it finds the command, and speaks and fails decently on any terminal,
file or pipe.

A failure is one clean message on stderr and an exit code that means something; warnings are told as
notes. Signs that the encoding lacks are spelled out, and a lost reader ends nothing.
"""

from __future__ import annotations

import codecs
import ctypes
import errno
import importlib
import io
import os
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any

from metanudge.cli.commands import GROUP, OWN, Command, whence
from metanudge.names import near, printable
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
    exit_codes,
    is_out_of_memory,
)
from metanudge.version import __version__

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # of malloc.h

_USAGE = """usage: metanudge COMMAND [OPTIONS]

First-order meta-learning with meta-gradients you can trust.

commands:
{commands}

examples:
  metanudge train mnist1d                                  the paper's experiment, in two minutes
  metanudge train omniglot --ways 20 --estimator fomaml    another data set, another estimator
  metanudge train photos/ --shots 5                        your own: one sub-folder per class
  metanudge train --resume runs/mnist1d-20260101-120000    go on where a run stopped
  torchrun --nproc-per-node=4 -m metanudge train omniglot  many processes

exit codes: {codes}

metanudge COMMAND --help says more about a command; metanudge --version prints the version."""
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


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit code. Without `argv` it is the process's own, whose output is
    made to bear anything.
    """
    if argv is None:
        prepare()
        try:
            code = guarded(lambda: _main(sys.argv[1:]))
        except SystemExit as left:  # how the flag parser ends
            code = left.code if isinstance(left.code, int) else EXIT_BAD_INPUT
        # from here on there is nothing to save, and nothing to say
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        return finish(code)
    return guarded(lambda: _main(argv))


def _main(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        commands = "\n".join(f"  {name:<9} {command.help}" for name, command in available().items())
        print(_USAGE.format(commands=commands, codes=exit_codes()))
        return 0 if arguments else EXIT_BAD_INPUT
    name, rest = arguments[0], arguments[1:]
    if name in ("--version", "-V"):
        print(f"metanudge {__version__}")
        return 0
    command = OWN.get(name) or available().get(name)
    if command is None:
        names = available()
        report(
            f"error: there is no command {name!r}.{whence(name) or near(name, names)} The commands"
            f" are {', '.join(names)}."
        )
        return EXIT_BAD_INPUT
    _wait_politely_on_a_busy_machine()
    _keep_freed_memory()
    with plain_warnings():
        code: int = importlib.import_module(command.module).run(rest)
    return code


def available() -> dict[str, Command]:
    """All commands; a distribution takes none of ours."""
    added: dict[str, Command] = {}
    for entry in entry_points(group=GROUP):
        try:
            added |= entry.load()
        except ImportError as error:  # a folder installed with -e may be gone
            report(
                f"note: the commands of {entry.value} cannot be loaded ({error}). Install it anew,"
                " or uninstall it."
            )
    return OWN | {name: command for name, command in added.items() if name not in OWN}


# What this machine is told before anything is computed


def _keep_freed_memory() -> None:
    """Every meta-step needs the same large blocks again: glibc shall keep them, not hand them back
    and fault their pages in anew.

    A meta-step on MNIST-1D takes 7 % less time, and the peak of memory is the same.
    """
    # glibc's alone
    if (
        sys.platform == "linux"
        and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None
    ):
        mallopt(_M_MMAP_THRESHOLD, 1 << 25)
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)
        mallopt(_M_TOP_PAD, 1 << 26)


def _wait_politely_on_a_busy_machine() -> None:
    """OpenMP's threads spin while they wait: right on idle cores (a step takes half as long),
    ruinous where other work wants them.

    The setting is read when torch is loaded, which no command has done yet.
    """
    if _busy_share() > 0.4:
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def _busy_share(seconds: float = 0.1) -> float:
    """The share of the cores' time that others are using right now; 0 where the system does not
    tell.

    The load average would not do: it remembers the minute before, such as this package's own
    installation.
    """
    try:
        first = _cpu_ticks()
        time.sleep(seconds)
        idle, total = (after - before for after, before in zip(_cpu_ticks(), first, strict=True))
    except (OSError, ValueError, IndexError):
        return 0.0
    return 1 - idle / total if total > 0 else 0.0


def _cpu_ticks() -> tuple[int, int]:
    """Idle and all ticks of all cores since the start of the system (Linux)."""
    with open("/proc/stat", encoding="ascii") as stat:
        ticks = [int(field) for field in stat.readline().split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


# How it ends


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
