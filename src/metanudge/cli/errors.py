"""How the command line fails: one clean message on stderr and an exit code that means something."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable

from metanudge.training.errors import (
    EXIT_BAD_INPUT,
    EXIT_CANNOT_WRITE,
    EXIT_OUT_OF_MEMORY,
    EXIT_SIGINT,
    CheckpointError,
    StopTraining,
    UserError,
    is_out_of_memory,
)
from metanudge.training.output import printable
from metanudge.training.signals import Interrupted, StopRequest

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
