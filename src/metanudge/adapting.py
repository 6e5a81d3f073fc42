"""What is learned, in use: adapting to support sets and measuring on query sets."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from metanudge.engine_choice import EngineChoice, Wish
from metanudge.engines import Cost, Engine, InplaceEngine
from metanudge.engines.undisturbed import Guard, claimed, restored, stands_still
from metanudge.estimators import NonFiniteError
from metanudge.estimators.run import advice_on
from metanudge.evaluation import Evaluation
from metanudge.objective import Objective
from metanudge.params import Params
from metanudge.problem import Problem, is_constant
from metanudge.setting import Setting, at_work
from metanudge.solvers import GradientDescent, Solver
from metanudge.spread import local, whole
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

    def _ready_for(self, problem: Problem, tasks: TaskBatch, steps: int | None) -> Solver:
        """The learner's solver for these tasks, with another number of steps if one is given."""
        solver = self.solver = self._choice.settled(problem, tasks, self._wish())
        return solver if steps is None else replace(solver, steps=steps)  # type: ignore[type-var]

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
            solver = self._ready_for(own, _alone(support), steps)
            return _adapted_copy(own, self.adapting, support, solver, seed)

    @contextmanager
    def adapted(
        self, support: Batch, *, steps: int | None = None, seed: int = 0
    ) -> Iterator[nn.Module]:
        """Within, the learner's own model is adapted to a support set, in the memory of one copy of
        what adapts and one of how far it has moved; then all that was changed within is put back,
        also after an error: what adapts, buffers, `.grad`, training or evaluation mode.

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
            solver = self._ready_for(problem, _alone(support), steps)
            moved = _displacement(problem, support, solver, seed)
        with claimed(problem):
            guard, modes = Guard(problem), [(module, module.training) for module in problem.modules]

            def restore() -> None:
                guard.restore()
                for module, training in modes:
                    module.training = training
                self._away = False

            with restored(restore):
                self._away = True
                _move(problem, moved)
                guard.wrote()
                del moved
                yield problem.objective.model

    def adapted_state(
        self, support: Batch, *, steps: int | None = None, seed: int = 0
    ) -> dict[str, Tensor]:
        """What adapts, after adaptation to a support set: a part of a `state_dict` of the model,
        for `load_state_dict(state, strict=False)`.

        Many users' adapters are kept in this way beside one model; of a PEFT model,
        `model.save_pretrained(folder, state_dict=state)` saves one. Of parameters that are sharded
        over ranks each rank has its part, as in the model's own `state_dict`.

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
            solver = self._ready_for(problem, _alone(support), steps)
            moved = _displacement(problem, support, solver, seed)
            return {
                n: whole((local(p.detach()) + moved[n]).to(p.dtype), p)
                for n, p in problem.parameters.items()
            }

    def evaluate(self, tasks: Tasks, *, steps: int | None = None, seed: int = 0) -> Evaluation:
        """Adapt to every task's support set and measure on its query set. Changes nothing."""
        batch = TaskBatch.of(tasks)
        with at_work(self, compile=self.compiled) as problem:
            problem.check_tasks(batch)
            solver = self._ready_for(problem, batch, steps)
            run = partial(_evaluated, problem, batch, solver, seed=seed)
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


def _evaluated(
    problem: Problem, batch: TaskBatch, solver: Solver, engine: Engine, seed: int
) -> Evaluation:
    columns = [torch.zeros(len(batch), dtype=torch.float64) for _ in range(4)]
    extras: tuple[Params, Params] = ({}, {})
    with engine.session(problem, batch, width=1, seed=seed, cost=Cost()) as groups:
        for inner in groups:
            before = inner.measure_query(None)
            after = inner.measure_query(inner.solve(solver).displacement)
            values = (before.loss, before.accuracy, after.loss, after.accuracy)
            for column, value in zip(columns, values, strict=True):
                column[list(inner.places)] = value.double().cpu()
            for extra, found in zip(extras, (before.extra, after.extra), strict=True):
                for name, value in found.items():
                    unknown = torch.full((len(batch),), math.nan, dtype=torch.float64)
                    column = extra.setdefault(name, unknown)
                    column[list(inner.places)] = value.double().cpu()
    one, two, three, four = columns
    return Evaluation(one, two, three, four, extra_before=extras[0], extra=extras[1])


def _adapted_copy(
    own: Problem, patterns: Any, support: Batch, solver: Solver, seed: int
) -> nn.Module:
    """A copy of a problem's model after a solve on a support set; `patterns` say what adapts.

    Frozen parameters and buffers that are constants are the model's own.
    """
    if own.spread is not None:
        raise TypeError(
            f"adapt copies the model, whose parameters are spread over {own.spread.ranks} ranks."
            " `with learner.adapted(support) as model:` adapts it in place, and"
            " learner.evaluate(tasks) measures."
        )
    own_model = own.objective.model
    kept: list[Tensor] = [p for p in own_model.parameters() if not p.requires_grad]
    kept += [buffer for *_, buffer in _constants(own_model)]
    model = copy.deepcopy(own_model, {id(tensor): tensor for tensor in kept})
    problem = Problem(
        Objective(model, own.objective.loss), own.proximal, adapt=patterns, rates=own.rates
    )
    _move(problem, _displacement(problem, support, solver, seed))
    for module, name, buffer in _constants(model):
        if not stands_still(module, name):
            module._buffers[name] = buffer.clone()
    return model


def _displacement(problem: Problem, support: Batch, solver: Solver, seed: int) -> Params:
    """How far what adapts moves in a solve on a support set; the model stays as it is."""
    batch = _alone(support)
    problem.check_tasks(batch)
    with InplaceEngine().session(problem, batch, width=1, seed=seed, cost=Cost()) as groups:
        solution = next(iter(groups)).solve(solver)
    if not bool(torch.isfinite(solution.residuals).all()):
        raise NonFiniteError(
            "Adaptation produced NaN or Inf: the inner steps diverge on this support"
            f" set. Take fewer steps, or {advice_on(problem, solver)}."
        )
    return {name: leaf[0] for name, leaf in solution.displacement.items()}


def _alone(support: Batch) -> TaskBatch:
    """A task without a query set of its own."""
    return TaskBatch.of(Task(support, support))


def _move(problem: Problem, moved: Params) -> None:
    with torch.no_grad():
        for name, parameter in problem.parameters.items():
            phi = local(parameter.data)
            phi.copy_(phi + moved[name])


def _constants(model: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    return [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and is_constant(module, name)
    ]
