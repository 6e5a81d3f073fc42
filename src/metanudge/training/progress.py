"""What a run shows: the facts at its start, a live line on a terminal or a plain line every few
seconds elsewhere while it goes, the result at its end.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table

from metanudge.learner import MetaLearner
from metanudge.tasks import Episodes
from metanudge.tasks.images import is_picture
from metanudge.training.config import TrainConfig
from metanudge.training.distributed import Group
from metanudge.training.metrics import describe_stiffness, stiffness
from metanudge.training.output import clock, printable
from metanudge.training.runs import CURVE, SUMMARY
from metanudge.training.summary import Outcome, trainable

_SECONDS_BETWEEN_LINES = 5.0


class Reporter(Protocol):
    """Where a run's news go."""

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


class Quiet:
    """Says nothing: the other ranks, and tests."""

    def begin(self, facts: Sequence[tuple[str, str]], *, total: int, done: int) -> None:
        """Nothing."""

    def step(self, done: int, values: dict[str, Any]) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def end(self) -> None:
        """Nothing."""

    def table(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Nothing."""


class ConsoleReporter:
    """Live progress with rich on a terminal, plain lines where there is none."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console if console is not None else Console(highlight=False, soft_wrap=True)
        self._live: Progress | None = None
        self._bar: TaskID | None = None
        self._pace = Pace()
        self._total = 0
        self._last_line = 0.0
        self._measured: dict[str, Any] = {}

    def begin(self, facts: Sequence[tuple[str, str]], *, total: int, done: int) -> None:
        """The facts as a small table, then the bar."""
        width = max(len(name) for name, _ in facts)
        for name, text in facts:
            self.console.print(f"[bold]{name:<{width}}[/]  {_escape(text)}")
        self.console.print()
        self._total, self._pace = total, Pace()
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
            name: value for name, value in values.items() if name.startswith(("query_", "lam"))
        }
        values = self._measured | values  # not every meta-step measures them
        text = f"{self._pace.describe(self._total - done)} · {describe(values)}"
        if self._live is not None and self._bar is not None:
            self._live.update(self._bar, completed=done, news=_escape(text))
            if "val_loss" in values:
                self._live.console.print(f"step {done}/{self._total} · {_escape(describe(values))}")
            return
        now = time.monotonic()
        if (
            now - self._last_line >= _SECONDS_BETWEEN_LINES
            or "val_loss" in values
            or done == self._total
        ):
            self._last_line = now
            self.console.print(f"step {done}/{self._total} · {_escape(text)}")

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
    parts.append(f"residual {values['residual']:.2g}")
    if _given(values, "nu"):
        parts.append(f"ν {values['nu']:.3g}")
    learned = describe_stiffness(values)
    if learned is not None:
        parts.append(learned)
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


# What is told at the start and at the end


def facts(
    config: TrainConfig, source: Episodes, learner: MetaLearner, group: Group
) -> list[tuple[str, str]]:
    """What is being trained, how and on what."""
    shape = f"regression, {source.shots} support and {source.queries} query points"
    if source.kind == "classification":
        shape = f"{source.ways}-way {source.shots}-shot, {source.queries} queries"
    device, own = learner.problem().device, group.slice(config.tasks)
    engine, why = learner.choose_engine(source.batch(range(max(1, len(own)))))
    threads = torch.get_num_threads()
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"CPU, {threads} thread{'s' * (threads > 1)}"
    )
    plain = config.precision == "fp32" or (config.precision == "tf32" and device.type == "cpu")
    where = f"{name}, {config.dtype}" + ("" if plain else f", {config.precision}")
    return [
        ("data", f"{config.data}: {shape}; {config.tasks} tasks per meta-step"),
        ("inputs", describe_inputs(source)),
        ("model", f"{config.model}, {trainable(learner):,} parameters, {_term(config, learner)}"),
        ("estimator", f"{config.estimator} with {config.solver}"),
        ("optimizer", f"{config.optimizer}, {config.schedule}, {config.iterations} meta-steps"),
        ("engine", f"{engine.name} ({why})"),
        ("device", where + (f"; {group.world} processes" if group.world > 1 else "")),
    ]


def describe_inputs(source: Episodes) -> str:
    """The shape of one example, and what was decided about it."""
    shape = source.input_shape
    size = "×".join(map(str, shape))
    what = f"images {size}" if is_picture(shape) else f"{size} number{'s' * (shape != (1,))}"
    return what + (f" ({source.note})" if source.note else "")


def result_table(
    folder: Path, config: TrainConfig, outcome: Outcome, learner: MetaLearner
) -> list[tuple[str, str]]:
    """The result for the screen."""
    best, test = outcome.best, outcome.test
    lines = [
        (
            "meta-steps",
            f"{outcome.step} in {clock(outcome.seconds)}"
            + (" (this part of the run)" if outcome.resumed else ""),
        )
    ]
    if best is not None:
        good = (
            f"{best['accuracy']:.2%}"
            if best["accuracy"] is not None
            else f"loss {best['loss']:.4g}"
        )
        lines.append(
            ("best validation", f"{good} at step {best['step']} ({config.eval_tasks} tasks)")
        )
    if test is not None:
        if test["accuracy"] is not None:
            accuracy = f"{test['accuracy']:.2%} ± {test['accuracy_ci95'] or math.nan:.2%}"
            lines.append(("test accuracy", f"{accuracy} (95 % CI, {test['tasks']} tasks)"))
            lines.append(("before adaptation", f"{test['accuracy_before']:.2%}"))
        loss = f"{_number(test['loss'])} ± {_number(test['loss_ci95'])}"
        lines.append(("test loss", f"{loss} (before adaptation {_number(test['loss_before'])})"))
    learned = describe_stiffness(stiffness(learner))
    if learned is not None:
        lines.append(("learned stiffness", learned))
    return [*lines, ("curve", str(folder / CURVE)), ("summary", str(folder / SUMMARY))]


def _term(config: TrainConfig, learner: MetaLearner) -> str:
    """λ, whether it is learned, and what adapts."""
    problem = learner.problem()
    text = f"λ = {config.lam:g}"
    if learner.log_lam is not None:
        text += " to begin with, learned" + (
            "" if config.learn_lam == "scalar" else f" per {config.learn_lam}"
        )
    if problem.shared:
        text += (
            f"; {sum(p.numel() for p in problem.parameters.values()):,} adapt ({config.adapt}), the"
            " others are shared"
        )
    return text


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
