"""How the command line fails: one clean message on stderr and an exit code that means something."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from metanudge.training.errors import EXIT_BAD_INPUT, EXIT_SIGINT, StopTraining, UserError
from metanudge.training.trust import printable


def guarded(command: Callable[[], int]) -> int:
    """Run a command. What the user can put right ends with exit code 2 and a message; bugs keep their traceback."""
    try:
        return command()
    except StopTraining as error:
        report(str(error))
        return error.code
    except UserError as error:
        report(f"error: {error}")
        return EXIT_BAD_INPUT
    except BrokenPipeError:  # the reader of a pipe has gone, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BAD_INPUT
    except OSError as error:
        report(f"error: {error}")
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        report("Interrupted; nothing was lost.")
        return EXIT_SIGINT
    except RuntimeError as error:
        if type(error).__name__ != "CheckpointError":
            raise
        report(f"error: {error}")
        return EXIT_BAD_INPUT


def report(message: str) -> None:
    """A message on stderr, from one process only."""
    if os.environ.get("RANK", "0") == "0":
        print(f"metanudge: {printable(message)}", file=sys.stderr, flush=True)
