"""What ends a run before its time, and the exit codes of the command line."""

from __future__ import annotations

EXIT_DONE = 0
EXIT_BUG = 1
EXIT_BAD_INPUT = 2
EXIT_NOT_FINITE = 4
EXIT_OUT_OF_MEMORY = 5
EXIT_CANNOT_WRITE = 6
EXIT_SIGINT = 130
EXIT_SIGTERM = 143

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


class StopTraining(Exception):
    """A run that ends early, in good order.

    Attributes:
        code: the exit code.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code
