"""Memory: a run that cannot fit is refused, and when it runs out, the same call goes again with
half as many solves at once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from metanudge.engines import StackedEngine
from metanudge.engines.room import free_memory
from metanudge.learner import MetaLearner
from metanudge.tasks import Episodes
from metanudge.training.errors import UserError

if TYPE_CHECKING:
    from metanudge.training.config import TrainConfig

T = TypeVar("T")


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
        except torch.OutOfMemoryError as error:
            message = str(error).splitlines()[0]
        except RuntimeError as error:
            if "can't allocate memory" not in str(error) and "not enough memory" not in str(error):
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
