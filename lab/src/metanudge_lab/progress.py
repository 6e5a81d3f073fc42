"""What a measurement shows while it goes: a live line on a terminal where rich is installed, plain
lines elsewhere.
"""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol

from metanudge.names import clock


class Progress(Protocol):
    """Where the news of a measurement go."""

    def begin(self, name: str, *, total: int, done: int) -> None:
        """An experiment starts; `done` of its cells are there already."""

    def start(self, cell: str) -> None:
        """A cell is being measured."""

    def finish(self, cell: str, seconds: float) -> None:
        """A cell is done and saved."""

    def end(self) -> None:
        """No more cells for now."""

    def note(self, text: str) -> None:
        """Something the user should know."""


class Lines:
    """A plain line for every cell, but not more than one every `every` seconds."""

    def __init__(self, every: float = 2.0) -> None:
        self.every = every
        self._name, self._total, self._done = "", 0, 0
        self._begun = self._said = 0.0
        self._fresh = 0

    def begin(self, name: str, *, total: int, done: int) -> None:
        """Say how much there is to do."""
        self._name, self._total, self._done, self._fresh = name, total, done, 0
        self._begun, self._said = time.monotonic(), 0.0
        self.note(f"{name}: {total} cells" + (f", {done} of them done before" if done else ""))

    def start(self, cell: str) -> None:
        """Nothing: the line comes when the cell is done."""

    def finish(self, cell: str, seconds: float) -> None:
        """A line, if the last one is a while ago or this is the last cell."""
        self._done += 1
        self._fresh += 1
        now = time.monotonic()
        if now - self._said >= self.every or self._done == self._total:
            self._said = now
            left = (now - self._begun) / self._fresh * (self._total - self._done)
            self.note(
                f"{self._name}: {self._done}/{self._total} · {cell} · {seconds:.1f} s"
                + (f" · about {clock(left)} left" if left else "")
            )

    def end(self) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """A line."""
        print(text, flush=True)


class Live:
    """A bar on the terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as Bar

        self._console = Console(highlight=False, soft_wrap=True)
        columns = (
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
        )
        news = TextColumn("{task.fields[news]}", markup=False)
        self._make: Any = lambda: Bar(
            *columns,
            TimeElapsedColumn(),
            TextColumn("· left"),
            TimeRemainingColumn(),
            news,
            console=self._console,
            refresh_per_second=4,
        )
        self._bar: Any = None
        self._task: Any = None

    def begin(self, name: str, *, total: int, done: int) -> None:
        """Start the bar."""
        self._bar = self._make()
        self._task = self._bar.add_task(name, total=total, completed=done, news="")
        self._bar.start()

    def start(self, cell: str) -> None:
        """Show the cell."""
        self._bar.update(self._task, news=cell)

    def finish(self, cell: str, seconds: float) -> None:
        """Move the bar."""
        self._bar.advance(self._task)

    def end(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.update(self._task, news="")
            self._bar.stop()

    def note(self, text: str) -> None:
        """A line above the bar."""
        self._console.print(text, markup=False)


def progress() -> Progress:
    """Live where standard output is a terminal and rich is there, else lines."""
    if not sys.stdout.isatty():
        return Lines()
    try:
        return Live()
    except ImportError:
        return Lines()
