"""What ends a run before its time, and the exit codes of the command line."""

from __future__ import annotations

EXIT_DONE = 0
EXIT_BUG = 1  # anything unforeseen; with a traceback
EXIT_BAD_INPUT = 2
EXIT_NOT_FINITE = 4
EXIT_OUT_OF_MEMORY = 5
EXIT_SIGINT = 130
EXIT_SIGTERM = 143


class UserError(Exception):
    """Something the user can put right: what happened, why, and what to do. Exit code 2, no traceback."""


class StopTraining(Exception):
    """A run that ends early, in good order.

    Attributes:
        code: the exit code.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code
