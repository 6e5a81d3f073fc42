"""What is learned, in use: adapting to support sets and measuring on query sets."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from metanudge.engine_choice import EngineChoice, Wish
from metanudge.engines import Engine
from metanudge.evaluation import (
    Evaluation,
    adapted_copy,
    adapted_in_place,
    displacement,
    evaluate,
    with_steps,
)
from metanudge.problem import Problem
from metanudge.setting import Setting, at_work
from metanudge.solvers import GradientDescent, Solver
from metanudge.task import Batch, Task, TaskBatch
from metanudge.tuning import NuTuner

Tasks = TaskBatch | Task | Iterable[Task]


class Adapting(Setting):
    """A setting with a way to solve it, and an engine to run it on; see `MetaLearner`."""

    solver: Solver
    compiled: bool
    calls: int
    tuner: NuTuner
    _choice: EngineChoice

    @abstractmethod
    def _wish(self) -> Wish:
        """What is wanted of the engine."""

    def _settled(self, problem: Problem, tasks: TaskBatch) -> Solver:
        self.solver = self._choice.settled(problem, tasks, self._wish())
        return self.solver

    def _ready_for(self, problem: Problem, support: Batch, steps: int | None) -> Solver:
        return with_steps(self._settled(problem, TaskBatch.of(Task(support, support))), steps)

    def adapt(self, support: Batch, *, steps: int | None = None, seed: int = 0) -> nn.Module:
        """A copy of the model adapted to a support set; the learner and its model stay as they are.

        What does not adapt and is not learned either is not copied: the copy shares the model's
        frozen parameters, and large buffers that no forward pass writes.

        Args:
            support: a batch as in `Task.support`, usually `(inputs, targets)`.
            steps: number of steps, if not the solver's own.
            seed: of dropout masks and minibatches.
        """
        with at_work(self, compile=self.compiled, alone=False) as own:
            solver = self._ready_for(own, support, steps)
            return adapted_copy(own, self.adapting, support, solver, seed)

    @contextmanager
    def adapted(
        self, support: Batch, *, steps: int | None = None, seed: int = 0
    ) -> Iterator[nn.Module]:
        """Within, the learner's own model is adapted to a support set, in the memory of one copy of
        what adapts and one of how far it has moved; then it is as it was, also after an error.

        Args:
            support, steps, seed: as in `adapt`.

        Example:
            >>> import metanudge as mn, torch
            >>> learner = mn.MetaLearner(nn.Linear(1, 1), nn.functional.mse_loss)
            >>> x = torch.linspace(-1.0, 1.0, 5)[:, None]
            >>> with learner.adapted((x, 3 * x)) as model:
            ...     same, inside = model is learner.model, model(x)
            >>> same, torch.equal(inside, learner.model(x))
            (True, False)
        """
        with at_work(self, compile=self.compiled) as problem:
            solver = self._ready_for(problem, support, steps)
            moved = displacement(problem, support, solver, seed)
        self._away = True
        try:
            with adapted_in_place(problem, moved) as model:
                yield model
        finally:
            self._away = False

    def adapted_state(
        self, support: Batch, *, steps: int | None = None, seed: int = 0
    ) -> dict[str, Tensor]:
        """What adapts, after adaptation to a support set: a part of a `state_dict` of the model,
        for `load_state_dict(state, strict=False)`.

        Many users' adapters are kept in this way beside one model; of a PEFT model,
        `model.save_pretrained(folder, state_dict=state)` saves one.

        Args:
            support, steps, seed: as in `adapt`.

        Example:
            >>> import metanudge as mn, torch
            >>> learner = mn.MetaLearner(nn.Linear(2, 1), nn.functional.mse_loss, adapt="bias")
            >>> x = torch.ones(3, 2)
            >>> list(learner.adapted_state((x, x[:, :1])))
            ['bias']
        """
        with at_work(self, compile=self.compiled) as problem:
            solver = self._ready_for(problem, support, steps)
            moved = displacement(problem, support, solver, seed)
            return {n: (p.detach() + moved[n]).to(p) for n, p in problem.parameters.items()}

    def evaluate(self, tasks: Tasks, *, steps: int | None = None, seed: int = 0) -> Evaluation:
        """Adapt to every task's support set and measure on its query set. Changes nothing."""
        batch = TaskBatch.of(tasks)
        with at_work(self, compile=self.compiled) as problem:
            problem.check_tasks(batch)
            solver = with_steps(self._settled(problem, batch), steps)
            run = partial(evaluate, problem, batch, solver, seed=seed)
            return self._choice.run(problem, batch, self._wish(), run, estimates=False)

    def choose_engine(self, batch: TaskBatch) -> tuple[Engine, str]:
        """The engine for a batch, and why."""
        return self._choice.choose(self.problem(), batch, self._wish())

    def get_extra_state(self) -> Tensor:
        """What `state_dict` holds besides tensors: how many meta-gradients were made, which seeds
        follow, what was found about ν, and a measured inner rate (-1: none). One tensor, as files
        of tensors want it.
        """
        solver, rate = self.solver, -1.0
        if isinstance(solver, GradientDescent) and solver.lr != "auto":
            rate = solver.rate
        values = [self.calls, *self.tuner.numbers(), rate]
        return torch.tensor(values, dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        """Go on from `get_extra_state`'s result."""
        calls, *numbers = state.tolist()
        own = len(self.tuner.numbers())
        self.calls = int(calls)
        self.tuner.load_numbers(numbers[:own])
        rates = [rate for rate in numbers[own:] if rate > 0]  # none in earlier state dicts
        if rates and isinstance(self.solver, GradientDescent) and self.solver.lr == "auto":
            self.solver = replace(self.solver, lr=rates[0])

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *more: Any, **named: Any
    ) -> None:
        """State dicts of version 0.1 have no such state: they begin with what there is."""
        state_dict.setdefault(f"{prefix}_extra_state", self.get_extra_state())
        super()._load_from_state_dict(state_dict, prefix, *more, **named)
