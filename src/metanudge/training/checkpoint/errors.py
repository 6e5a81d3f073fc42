"""What goes wrong with a checkpoint: each error names the file, what is wrong with it and what to
do.
"""

from __future__ import annotations

from pathlib import Path


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


def damaged(file: Path, problem: str) -> CheckpointError:
    """The error to raise for a file that is not what was written."""
    return CheckpointError(file, problem, "The checkpoint is damaged; nothing of it was loaded.")
