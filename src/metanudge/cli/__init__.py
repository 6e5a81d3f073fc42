"""The command line: `metanudge COMMAND …`, or `python -m metanudge COMMAND …`.

A command is a module with `run(argv: list[str]) -> int`; it is listed in `metanudge.cli.commands`
and imported when it is called, so that `--help` is instant.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import time

from metanudge.cli import errors
from metanudge.cli.commands import OWN, available, whence
from metanudge.cli.errors import finish, guarded, plain_warnings, prepare
from metanudge.names import near
from metanudge.training.errors import EXIT_BAD_INPUT, exit_codes
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
        errors.report(
            f"error: there is no command {name!r}.{whence(name) or near(name, names)} The commands"
            f" are {', '.join(names)}."
        )
        return EXIT_BAD_INPUT
    _wait_politely_on_a_busy_machine()
    _keep_freed_memory()
    with plain_warnings():
        code: int = importlib.import_module(command.module).run(rest)
    return code


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
