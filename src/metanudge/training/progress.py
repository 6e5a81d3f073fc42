"""What a run says while it goes: a live line on a terminal and in a notebook, a plain line every
few seconds elsewhere, and what it notices: inner steps that overshoot, a meta-gradient that drowns
in its error, hours that nobody expects.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

from metanudge.names import clock, printable
from metanudge.solvers import stability_advice
from metanudge.training.config import TrainConfig
from metanudge.training.metrics import LEARNED, describe_learned

_SECONDS_BETWEEN_LINES = 5.0
_SECONDS_BETWEEN_CHANGES = 0.5  # in a notebook
_RECENT = 20  # meta-steps that a watch looks at
_LOOK = 3
_LONG = 3600.0


class Reporter:
    """Where a run's news go; this one tells nobody, for the other ranks and for tests."""

    def begin(self, facts: Sequence[tuple[str, str]], *, total: int, done: int) -> None:
        """Say what is being trained, then start counting."""

    def step(self, done: int, values: dict[str, Any]) -> None:
        """A meta-step is done."""

    def note(self, text: str) -> None:
        """Something the user should know."""

    def end(self) -> None:
        """No more steps."""

    def table(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """The result."""


Quiet = Reporter


class ConsoleReporter(Reporter):
    """Live progress with rich on a terminal, one output that changes in a notebook, plain lines
    where there is neither.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console if console is not None else Console(highlight=False, soft_wrap=True)
        self._live: Progress | None = None
        self._bar: TaskID | None = None
        self._pace = Pace()
        self._total = 0
        self._last_line = 0.0
        self._measured: dict[str, Any] = {}
        self._notebook: NotebookOutput | None = None

    def begin(self, facts: Sequence[tuple[str, str]], *, total: int, done: int) -> None:
        """The facts as a small table, then the bar."""
        width = max(len(name) for name, _ in facts)
        lines = [f"[bold]{name:<{width}}[/]  {_escape(text)}" for name, text in facts]
        self.console.print("\n".join([*lines, ""]))  # at once: a notebook frames what is printed
        self._total, self._pace = total, Pace()
        if self.console.is_jupyter:
            self._notebook = NotebookOutput()
            return
        if self.console.is_terminal:
            self._live = Progress(
                TextColumn("[bold]{task.description}"), BarColumn(bar_width=24),
                MofNCompleteColumn(), TextColumn("{task.fields[news]}"),
                console=self.console, refresh_per_second=8,
            )  # fmt: skip
            self._bar = self._live.add_task("meta-steps", total=total, completed=done, news="")
            self._live.start()

    def step(self, done: int, values: dict[str, Any]) -> None:
        """Move the bar; without a terminal, print a line every few seconds and at every
        validation.
        """
        self._pace.tick()
        self._measured |= {
            name: value for name, value in values.items() if name.startswith(("query_", *LEARNED))
        }
        values = self._measured | values  # not every meta-step measures them
        text = f"{self._pace.describe(self._total - done)} · {describe(values)}"
        if self._live is not None and self._bar is not None:
            self._live.update(self._bar, completed=done, news=_escape(text))
            if "val_loss" in values:
                self._live.console.print(f"step {done}/{self._total} · {_escape(describe(values))}")
            return
        now, seconds = time.monotonic(), _SECONDS_BETWEEN_LINES
        if self._notebook is not None:
            seconds = _SECONDS_BETWEEN_CHANGES
        validated = "val_loss" in values
        if now - self._last_line >= seconds or validated or done == self._total:
            self._last_line = now
            line = f"step {done}/{self._total} · {text}"
            if self._notebook is not None:
                self._notebook.show(line, keep=validated)
            else:
                self.console.print(_escape(line))

    def note(self, text: str) -> None:
        """A line of its own, above the bar."""
        (self._live.console if self._live is not None else self.console).print(
            f"[yellow]note[/] {_escape(text)}"
        )

    def end(self) -> None:
        """Leave the bar as it stands."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def table(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """A two-column table."""
        table = Table(title=title, title_justify="left", title_style="bold", show_header=False)
        table.add_column(style="bold")
        table.add_column()
        for name, text in rows:
            table.add_row(name, _escape(text))
        self.console.print()
        self.console.print(table)


class NotebookOutput:
    """An output of a notebook's cell that changes while a run goes. It is plain text, which every
    notebook shows and keeps; rich's own would need ipywidgets.
    """

    def __init__(self) -> None:
        from IPython.display import display

        self._kept: list[str] = []
        self._handle = display({"text/plain": ""}, raw=True, display_id=True)

    def show(self, line: str, *, keep: bool = False) -> None:
        """Put a line in the place of the last one, unless that was to be kept."""
        shown = "\n".join([*self._kept, printable(line)])
        self._handle.update({"text/plain": shown}, raw=True)
        if keep:
            self._kept.append(printable(line))


class Pace:
    """Steps per second over the last steps, and how long the rest will take."""

    def __init__(self) -> None:
        self._times: deque[float] = deque([time.monotonic()], maxlen=51)

    def tick(self) -> None:
        """A step is done."""
        self._times.append(time.monotonic())

    def describe(self, left: int) -> str:
        """`3.2 steps/s · ETA 1:05`."""
        rate = (len(self._times) - 1) / max(self._times[-1] - self._times[0], 1e-9)
        pace = f"{rate:.3g} steps/s" if rate >= 1 else f"{1 / rate:.3g} s/step"
        return f"{pace} · ETA {clock(left / rate)}"


def describe(values: dict[str, Any]) -> str:
    """The values of a meta-step in one line."""
    parts = [f"loss {values['query_loss']:.3g}"] if _given(values, "query_loss") else []
    if _given(values, "query_accuracy"):
        parts.append(f"accuracy {values['query_accuracy']:.1%}")
    if parts and values.get("nudged"):
        parts[-1] += " (nudged)"
    parts.append(f"residual {values['residual']:.2g}")
    if _given(values, "nu"):
        parts.append(f"ν {values['nu']:.3g}")
    elif _given(values, "error"):  # of `MAML` by differences
        parts.append(f"error {values['error']:.1g}")
    parts += filter(None, [describe_learned(values, key) for key in LEARNED])
    if _given(values, "val_accuracy"):
        parts.append(f"validation {values['val_accuracy']:.1%}")
    elif _given(values, "val_loss"):
        parts.append(f"validation loss {values['val_loss']:.3g}")
    if _given(values, "memory"):
        parts.append(f"{values['memory'] / 2**20:.0f} MiB")
    return " · ".join(parts)


def memory_used(device: torch.device) -> int | None:
    """Bytes: the peak on a GPU, the resident set of the process on a CPU; None where the system
    does not tell.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        with open("/proc/self/statm", "rb") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        try:
            import resource
        except ImportError:
            return None
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def _given(values: dict[str, Any], key: str) -> bool:
    value = values.get(key)
    return value is not None and not (isinstance(value, float) and math.isnan(value))


def _escape(text: str) -> str:
    return escape(printable(text))


# What is noticed


class DivergenceWatch:
    """Looks at whether the inner residual grew, meta-step by meta-step.

    Args:
        lr: the solver's, where it has one.
        lam: λ.

    Example:
        >>> watch = DivergenceWatch()
        >>> [step for step in range(200) if watch.see(1.0, 2.0)]
        [19]
    """

    def __init__(self, lr: float | None = None, lam: float | None = None) -> None:
        self._lr, self._lam = lr, lam
        self._grew: deque[bool] = deque(maxlen=_RECENT)
        self._warned = False
        self._doubted = False

    def see(self, start: float, end: float) -> str | None:
        """A warning, the first time that more than half of the recent meta-steps ended with a
        larger residual than they began with.
        """
        self._grew.append(end > start)
        if self._warned or len(self._grew) < _RECENT or sum(self._grew) <= _RECENT / 2:
            return None
        self._warned = True
        return (
            f"The inner residual grew in {sum(self._grew)} of {_RECENT} meta-steps: the inner steps"
            " overshoot. Training may work all the same, and fomaml often does; fobmaml and imaml"
            f" rely on inner steps that settle and may stop learning. {self._remedy()}"
        )

    def _remedy(self) -> str:
        text = stability_advice(self._lr, self._lam, where="lr in --solver", stiffness="--lam")
        return f"{text[0].upper()}{text[1:]}."

    def see_error(self, error: float) -> str | None:
        """A warning, the first time that no ν was found at which the meta-gradient is larger than
        its error.

        Example:
            >>> watch = DivergenceWatch()
            >>> [bool(watch.see_error(error)) for error in (0.2, 1.5, 1.5)]
            [False, True, False]
        """
        if self._doubted or error < 1:
            return None
        self._doubted = True
        return (
            "No ν was found at which the meta-gradient of a few tasks is larger than its error:"
            " the inner steps overshoot, or cross the kinks of ReLU and max-pooling too often."
            " Noise averages out over tasks and meta-steps, so training may work all the same."
            f" {self._remedy()} More --tasks help too, and so does --estimator"
            " fobmaml:stencil=tangent, which has no ν."
        )


class DurationWatch:
    """Looks at the first meta-steps; the very first is left out, which warms up.

    Args:
        config: of the run.
        width: solves a task and meta-step; an evaluated task takes one.
        done: meta-steps that were done before.

    Example:
        >>> from metanudge.training.config import TrainConfig
        >>> watch = DurationWatch(TrainConfig("photos", tasks=4, iterations=1000, eval_every=0),
        ...     width=2, done=0)
        >>> [watch.see(seconds) is not None for seconds in (60.0, 20.0, 20.0, 20.0)]
        [False, False, True, False]
    """

    def __init__(self, config: TrainConfig, *, width: int, done: int) -> None:
        self._config, self._width, self._done = config, width, done
        self._seconds: list[float] = []

    def see(self, seconds: float) -> str | None:
        """A note, where the run will take more than an hour after the last of the first few
        meta-steps.
        """
        if len(self._seconds) == _LOOK:
            return None
        self._seconds.append(seconds)
        if len(self._seconds) < _LOOK:
            return None
        config, step = self._config, median(self._seconds[1:])
        left = config.iterations - self._done - _LOOK
        evaluated = config.test_tasks + (
            left // config.eval_every * config.eval_tasks if config.eval_every else 0
        )
        evaluation = evaluated * step / config.tasks / max(1, self._width)
        if left * step + evaluation < _LONG:
            return None
        return (
            f"This will take about {clock(left * step + evaluation)} on this CPU: {left} meta-steps"
            f" of {step:.2g} s, and {evaluated} tasks to evaluate. To cut it: fewer --iterations or"
            f" --tasks ({config.tasks}), --eval-tasks, --test-tasks, --queries; a smaller --model"
            " (conv4:channels=32); smaller images (--data-options image_size=28); a GPU (--device"
            " cuda). Ctrl-C saves; --resume goes on."
        )
