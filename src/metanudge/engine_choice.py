"""Which engine a learner's tasks run on, and how many solves side by side."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal

from metanudge.engines import Engine, InplaceEngine, StackedEngine
from metanudge.engines.room import bytes_per_row, free_memory, rows_that_fit
from metanudge.engines.stacked import runs_chain, runs_trunk
from metanudge.estimators import Estimator
from metanudge.problem import Problem
from metanudge.solvers import LinearSolver, Solver
from metanudge.task import TaskBatch

EngineName = Literal["auto", "stacked", "inplace"]

# Measured on 2 cores: an MLP of 77,000 parameters is 2.6 times faster stacked; from a Conv4 of
# 112,000 on times are alike, and in place needs a fraction of the memory.
LARGEST_STACKED_ON_CPU = 100_000
# Convolution blocks at the beginning of a model (see `engines.trunk`) are 1.4 to 2.6 times faster
# stacked: measured on 2 cores with Conv4 of 8 to 128 channels on 28×28 and 84×84 images, 1 to 16
# tasks, 5 to 75 examples. More rows than a few bring nothing then; they are as many as have this
# many parameters together, 8 MB a copy in float32.
NUMBERS_AT_ONCE_ON_CPU = 2_000_000
# By the estimate of `engines.room`, two to three times what a chain of layers needs. Measured on 2
# cores, Conv4-64 and 28×28 images: 4 of MAML's 5-shot tasks side by side are twice as fast as 12
# (of iMAML's 6, by a fifth); of 1-shot tasks 4 to 12 are alike.
BYTES_AT_ONCE_ON_CPU = 3 * 2**30
LARGEST_STACKED_ELSEWHERE = 500_000_000


class EngineChoice:
    """Chooses, and remembers what was found out on the way.

    Attributes:
        cannot_stack: why the model cannot be stacked, once that is known.
    """

    def __init__(self) -> None:
        self.cannot_stack: str | None = None
        self._room: dict[Hashable, int | None] = {}

    def __call__(
        self,
        batch: TaskBatch,
        problem: Problem,
        *,
        asked: EngineName,
        chunk: int | None,
        estimator: Estimator,
        solver: Solver,
    ) -> tuple[Engine, str]:
        """The engine for a batch, and why.

        Args:
            asked: by the user, who may leave it to us.
            chunk: how many solves the user wants side by side, or None.
            estimator, solver: what will run.
        """
        inplace = InplaceEngine()
        if asked == "inplace":
            return inplace, "as asked"
        stacked = StackedEngine(
            chunk if chunk is not None else self._rows_for(batch, problem, estimator, solver)
        )
        if asked == "stacked":
            return stacked, "as asked"
        if "inplace" not in estimator.engines:
            return stacked, f"{type(estimator).__name__} needs it"
        if self.cannot_stack is not None:
            return inplace, "the model cannot be stacked"
        if not isinstance(solver, LinearSolver):
            return inplace, f"{type(solver).__name__} works on one task at a time"
        size = sum(p.numel() for p in (*problem.parameters.values(), *problem.shared.values()))
        if problem.device.type == "cpu":
            if size <= LARGEST_STACKED_ON_CPU:
                return (
                    stacked,
                    f"{size} parameters: on a CPU many small solves are faster side by side",
                )
            if estimator.graphs(solver):
                if runs_chain(problem, batch):
                    return (
                        stacked,
                        "second derivatives of a chain of layers are faster side by side",
                    )
            # gradients by shared parameters run layer by layer
            elif not problem.shared and runs_trunk(problem, batch):
                rows = (
                    chunk
                    if chunk is not None
                    else max(estimator.width, NUMBERS_AT_ONCE_ON_CPU // size)
                )
                return (
                    StackedEngine(rows),
                    f"convolution blocks run as one operation, {rows} solves side by side",
                )
            return (
                inplace,
                f"{size} parameters: on a CPU large solves are faster one after the other",
            )
        if size * len(batch) * estimator.width <= LARGEST_STACKED_ELSEWHERE:
            return stacked, "many solves side by side fill the device"
        return inplace, f"{len(batch)} tasks of {size} parameters would not fit side by side"

    def _rows_for(
        self, batch: TaskBatch, problem: Problem, estimator: Estimator, solver: Solver
    ) -> int | None:
        """What the free memory holds, for second derivatives on a CPU what is fastest; None for
        all.

        Looked at once for each shape of tasks.
        """
        kind, graphs = problem.device.type, estimator.graphs(solver)
        if not (kind == "cuda" or (kind == "cpu" and graphs)):
            return None
        key = (
            problem,
            graphs,
            estimator.width,
            *((len(stack), stack.signature) for stack in batch.stacks),
        )
        if key not in self._room:
            try:
                per_row = max(
                    bytes_per_row(problem, stack.task(0), graphs=graphs) for stack in batch.stacks
                )
            # model and data do not go together: the solves say what is wrong, and this could not
            except Exception:
                return None
            fit = rows_that_fit(
                per_row, free_memory(problem.device) if kind == "cuda" else BYTES_AT_ONCE_ON_CPU
            )
            self._room = {key: None if fit >= len(batch) * estimator.width else fit}
        return self._room[key]
