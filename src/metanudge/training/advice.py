"""What may go wrong with a run, found before it begins or while it goes, and said once: memory that
does not suffice, inner steps that overshoot, meta-gradients that drown in their own error, hours
that nobody expects.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, TypeVar

import torch

from metanudge.engines import StackedEngine
from metanudge.engines.room import free_memory
from metanudge.learner import MetaLearner
from metanudge.solvers import GradientDescent, Solver, stability_advice
from metanudge.tasks import Episodes
from metanudge.training.errors import UserError, is_out_of_memory
from metanudge.training.output import clock

if TYPE_CHECKING:
    from metanudge.training.config import TrainConfig

T = TypeVar("T")

_RECENT = 20
_LOOK = 3
_LONG = 3600.0


# Memory


class OutOfMemory(Exception):
    """One solve at a time is still too much; the message is torch's."""


def halving(
    call: Callable[[], T],
    learner: MetaLearner,
    *,
    rows: int,
    halves: Callable[[], bool],
    note: Callable[[int, int], None],
) -> T:
    """Call, with half of `learner.chunk` after each time the memory runs out; the learner keeps the
    smaller chunk.

    Args:
        call: computes with the learner, and may be called again.
        learner: whose chunk is halved.
        rows: solves that the call makes; what the first chunk is when the learner has none.
        halves: whether the engine in use heeds the chunk.
        note: told the old and the new chunk.
    """
    while True:
        try:
            return call()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            message = str(error).splitlines()[0]
        # Out here the exception, and with it the tensors of its frames, is gone.
        if next(learner.parameters()).device.type == "cuda":
            torch.cuda.empty_cache()
        chunk = min(learner.chunk or rows, rows)
        if chunk <= 1 or not halves():
            raise OutOfMemory(message)
        learner.chunk = chunk // 2
        note(chunk, learner.chunk)


def check_data_fits(config: TrainConfig, source: Episodes, tasks: int) -> None:
    """Refuse a run where the examples of one meta-step's `tasks`, or the results of an evaluation,
    cannot fit, before any are drawn.
    """
    _refuse_if_more(_data(config, source, tasks), source, config)


def check_solves_fit(
    config: TrainConfig, source: Episodes, tasks: int, learner: MetaLearner
) -> None:
    """Refuse a run whose solves cannot fit side by side: three copies of the parameters each (φ,
    displacement, gradient) at the least.
    """
    solves = min(tasks * learner.estimator.width, _at_once(learner, source))
    copies = 3 * sum(p.numel() * p.element_size() for p in learner.problem().parameters.values())
    _refuse_if_more(
        _data(config, source, tasks) | {f"{solves:,} solves side by side": int(solves * copies)},
        source,
        config,
    )


def _data(config: TrainConfig, source: Episodes, tasks: int) -> dict[str, int]:
    """What is held, and its bytes at least."""
    evaluated = max(config.eval_tasks if config.eval_every else 0, config.test_tasks)
    task = (
        source.ways
        * (source.shots + source.queries)
        * (math.prod(source.input_shape) * source.dtype.itemsize + 8)
    )
    return {
        f"the examples of {tasks:,} tasks": tasks * task,
        f"the results of {evaluated:,} evaluated tasks": evaluated * 32,
    }


def _at_once(learner: MetaLearner, source: Episodes) -> float:
    """How many solves are held side by side; 1 where the memory decides, as it does on a GPU and
    for second derivatives.
    """
    engine, _ = learner.choose_engine(source.batch([0]))
    if (
        not isinstance(engine, StackedEngine)
        or source.device.type != "cpu"
        or learner.estimator.graphs(learner.solver)
    ):
        return 1
    return engine.chunk or math.inf


def _refuse_if_more(needs: dict[str, int], source: Episodes, config: TrainConfig) -> None:
    free = free_memory(source.device) if source.device.type == "cuda" else available_memory()
    needed = sum(needs.values())
    if free is None or needed <= free:
        return
    detail = ", ".join(
        f"{_gib(size)} for {what}" for what, size in needs.items() if size > needed // 100
    )
    raise UserError(
        f"--tasks {config.tasks} with --eval-tasks {config.eval_tasks} and --test-tasks"
        f" {config.test_tasks} needs at least {_gib(needed)} of memory ({detail}), and {_gib(free)}"
        " are free. Use fewer of them, fewer --shots or --queries, or a --chunk of solves to be"
        " held at once."
    )


def available_memory() -> int | None:
    """Bytes that this process can still have, as the system and its control group allow; None where
    they do not tell.
    """
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):  # counts the cache that can be given back
            free = int(line.split()[1]) * 1024
    limit, used = (_lines(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
    if limit and used and limit[0].isdigit():
        cached = sum(
            int(line.split()[1])
            for line in _lines("/sys/fs/cgroup/memory.stat")
            if line.startswith("inactive_file ")
        )
        free = min(free, int(limit[0]) - int(used[0]) + cached)
    return free


def _lines(file: str) -> list[str]:
    try:
        return Path(file).read_text(encoding="ascii").splitlines()
    except OSError:
        return []


def _gib(size: int) -> str:
    return f"{size * 10 // 2**30 / 10:,.1f} GiB"


# Inner steps


def check_steps(lam: float, solver: Solver) -> None:
    """Refuse gradient descent that the proximal term alone drives away from θ: each step multiplies
    φ − θ by 1 − lr·λ.

    Example:
        >>> check_steps(30.0, GradientDescent(lr=0.1, steps=5))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        metanudge.training.errors.UserError: --lam 30 with lr=0.1 in --solver: lr·λ is 3, ...
    """
    if isinstance(solver, GradientDescent) and lam * solver.lr >= 2:
        raise UserError(
            f"--lam {lam:g} with lr={solver.lr:g} in --solver: lr·λ is {lam * solver.lr:.3g}, and"
            " from 2 on every inner step ends further from the initialisation than it began,"
            f" whatever the data. Use lr below 2/λ = {2 / lam:.3g}, or --lam below 2/lr ="
            f" {2 / solver.lr:.3g}."
        )


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


# Time


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
