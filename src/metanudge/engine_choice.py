"""Which engine a learner's tasks run on, and how many solves side by side."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

from metanudge.curvature import resolved
from metanudge.engines import Engine, InplaceEngine, StackedEngine, StackingError
from metanudge.engines.room import bytes_per_row, free_memory, rows_that_fit
from metanudge.engines.stacked import Recorder, new_recorder, offers_for
from metanudge.estimators import Estimator
from metanudge.problem import Problem
from metanudge.solvers import LinearSolver, Solver
from metanudge.task import TaskBatch

if importlib.util.find_spec("metanudge.accel") is not None:  # it may have been taken out
    import metanudge.accel  # noqa: F401 (registers itself with the stacked engine)

EngineName = Literal["auto", "stacked", "inplace"]
ENGINES: tuple[EngineName, ...] = ("auto", "stacked", "inplace")
T = TypeVar("T")
logger = logging.getLogger("metanudge")

# Measured on 2 cores: an MLP of 77,000 parameters is 2.6 times faster stacked; from a Conv4 of
# 112,000 on times are alike, and in place needs a fraction of the memory.
LARGEST_STACKED_ON_CPU = 100_000
# Convolution blocks at the beginning of a model (see `accel.trunk`) are 1.4 to 2.6 times faster
# stacked: measured on 2 cores with Conv4 of 8 to 128 channels on 28×28 and 84×84 images, 1 to 16
# tasks, 5 to 75 examples. More rows than a few bring nothing then; they are as many as have this
# many parameters together, 8 MB a copy in float32.
NUMBERS_AT_ONCE_ON_CPU = 2_000_000
# By the estimate of `engines.room`, two to three times what a chain of layers needs. Measured on 2
# cores, Conv4-64 and 28×28 images: 4 of MAML's 5-shot tasks side by side are twice as fast as 12
# (of iMAML's 6, by a fifth); of 1-shot tasks 4 to 12 are alike.
BYTES_AT_ONCE_ON_CPU = 3 * 2**30
LARGEST_STACKED_ELSEWHERE = 500_000_000


@dataclass(frozen=True)
class Wish:
    """What is to run.

    Attributes:
        engine: asked for by the user, who may leave it to us.
        chunk: how many solves the user wants side by side, or None.
    """

    engine: EngineName
    chunk: int | None
    estimator: Estimator
    solver: Solver


class EngineChoice:
    """Chooses, and remembers what was found out on the way.

    Attributes:
        cannot_stack: why the model cannot be stacked, once that is known.
    """

    def __init__(self) -> None:
        self.cannot_stack: str | None = None
        self._recorder = new_recorder()
        self._room: dict[Hashable, int | None] = {}
        self._about: Problem | None = None  # what `cannot_stack` is said of

    def recorder(self, problem: Problem) -> Recorder | None:
        """Of meta-steps, where one is of use."""
        return None if problem.device.type == "cpu" else self._recorder

    def run(
        self,
        problem: Problem,
        batch: TaskBatch,
        wish: Wish,
        work: Callable[[Engine], T],
        *,
        estimates: bool = True,
    ) -> T:
        """Do the work on the engine for a batch, and in place where the model turns out not to
        stack and the choice is ours; the estimator counts where the work `estimates`.
        """
        engine, _ = self.choose(problem, batch, wish)
        try:
            return work(engine)
        except StackingError as error:
            if wish.engine != "auto" or (estimates and "inplace" not in wish.estimator.engines):
                raise
            self.cannot_stack, self._about = str(error), problem
            logger.warning("engine: in place from now on. %s", error)
            return work(InplaceEngine())

    def settled(self, problem: Problem, batch: TaskBatch, wish: Wish) -> Solver:
        """The solver; one that leaves its learning rate open gets one from these tasks."""
        if getattr(wish.solver, "lr", None) != "auto":
            return wish.solver
        problem.check_tasks(batch)
        find = partial(resolved, wish.solver, problem, batch)
        return self.run(problem, batch, wish, find, estimates=False)

    def choose(self, problem: Problem, batch: TaskBatch, wish: Wish) -> tuple[Engine, str]:
        """The engine for a batch, and why."""
        if wish.engine == "inplace":
            return InplaceEngine(), "as asked"
        if problem.spread is not None:
            what = f"the parameters are spread over {problem.spread.ranks} ranks"
            _refuse_stacking(wish, f"stacks whole parameters, but {what} (DTensor)")
            return InplaceEngine(), what
        if problem.quantised:
            what = "the weights are quantised"
            _refuse_stacking(wish, f"runs them through torch.func, but {what}")
            return InplaceEngine(), what
        rows = wish.chunk if wish.chunk is not None else self.rows_for(problem, batch, wish)
        stacked = StackedEngine(rows)
        if wish.engine == "stacked":
            return stacked, "as asked"
        if "inplace" not in wish.estimator.engines:
            return stacked, f"{type(wish.estimator).__name__} needs it"
        if self.cannot_stack is not None and self._about is problem:
            return InplaceEngine(), "the model cannot be stacked"
        if _is_moved_about(problem):
            return InplaceEngine(), "hooks move the model's weights between devices"
        if not isinstance(wish.solver, LinearSolver):
            return InplaceEngine(), f"{type(wish.solver).__name__} works on one task at a time"
        if problem.device.type == "cpu":
            return _choose_on_cpu(problem, batch, wish, stacked)
        size, width = _size(problem), wish.estimator.width
        if size * len(batch) * width <= LARGEST_STACKED_ELSEWHERE:
            return stacked, "many solves side by side fill the device"
        why = f"{len(batch)} tasks of {size} parameters would not fit side by side"
        return InplaceEngine(), why

    def rows_for(self, problem: Problem, batch: TaskBatch, wish: Wish) -> int | None:
        """What the free memory holds, for second derivatives on a CPU what is fastest; None for
        all.

        Looked at once for each shape of tasks.
        """
        kind, graphs = problem.device.type, wish.estimator.graphs(wish.solver)
        if not (kind == "cuda" or (kind == "cpu" and graphs)):
            return None
        width = wish.estimator.width
        shapes = [(len(stack), stack.signature) for stack in batch.stacks]
        key = (problem, graphs, width, *shapes)
        if key not in self._room:
            try:
                per_row = max(
                    bytes_per_row(problem, stack.task(0), graphs=graphs) for stack in batch.stacks
                )
            # model and data do not go together: the solves say what is wrong, and this could not
            except Exception:
                return None
            free = free_memory(problem.device) if kind == "cuda" else BYTES_AT_ONCE_ON_CPU
            fit = rows_that_fit(per_row, free)
            self._room = {key: None if fit >= len(batch) * width else fit}
        return self._room[key]


def _refuse_stacking(wish: Wish, why: str) -> None:
    if wish.engine == "stacked" or "inplace" not in wish.estimator.engines:
        what = (
            'engine="stacked"' if wish.engine == "stacked" else f"{type(wish.estimator).__name__}"
        )
        raise StackingError(
            f"{what} needs the stacked engine, which {why}. Use an estimator that runs in place"
            ' (FOBMAML, FOMAML, Reptile, MAML(products="difference")) and leave engine out.'
        )


def _choose_on_cpu(
    problem: Problem, batch: TaskBatch, wish: Wish, stacked: StackedEngine
) -> tuple[Engine, str]:
    size = _size(problem)
    if size <= LARGEST_STACKED_ON_CPU:
        return stacked, f"{size} parameters: on a CPU many small solves are faster side by side"
    offers, second_order = offers_for(problem, batch), wish.estimator.second_order(wish.solver)
    if second_order and offers:
        return stacked, "second derivatives of a chain of layers are faster side by side"
    # gradients by shared parameters run layer by layer
    fused = bool(offers) and not problem.shared and all(offer.fused for offer in offers)
    if fused and not second_order:
        few = max(wish.estimator.width, NUMBERS_AT_ONCE_ON_CPU // size)
        rows = wish.chunk if wish.chunk is not None else few
        why = f"convolution blocks run as one operation, {rows} solves side by side"
        return StackedEngine(rows), why
    why = f"{size} parameters: on a CPU large solves are faster one after the other"
    return InplaceEngine(), why


def _size(problem: Problem) -> int:
    """Numbers that every solve needs a copy of: parameters, and what modules in training mode may
    write.
    """
    learned = sum(p.numel() for p in (*problem.parameters.values(), *problem.shared.values()))
    return learned + sum(
        buffer.numel() for m in problem.modules if m.training for buffer in m.buffers(recurse=False)
    )


def _is_moved_about(problem: Problem) -> bool:
    """Whether Accelerate's hooks fetch weights when a layer runs, or a `device_map` spreads
    them.
    """
    return any("_hf_hook" in m.__dict__ or "hf_device_map" in m.__dict__ for m in problem.modules)
