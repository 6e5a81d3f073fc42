"""What ends a run before its time, and the exit codes of the command line."""

from __future__ import annotations

from pathlib import Path

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
