"""`MetaLearner`: a model, a loss, a way to solve and a way to differentiate; from here on the
user's own training loop takes over.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from metanudge.engine_choice import EngineChoice, EngineName
from metanudge.engines import Cost, Engine, InplaceEngine, StackedEngine, StackingError
from metanudge.engines.capture import Captures
from metanudge.engines.compiled import compilation, compiles
from metanudge.engines.inplace import InplaceInner
from metanudge.engines.ownership import claimed
from metanudge.engines.randomness import mix
from metanudge.engines.uninterrupted import obey, restored, uninterrupted
from metanudge.estimators import (
    ESTIMATORS,
    FOBMAML,
    DivergenceWarning,
    Estimator,
    NonFiniteError,
    Stats,
    meta_gradient,
)
from metanudge.estimators.run import advice_on
from metanudge.evaluation import Evaluation, evaluate
from metanudge.params import Params
from metanudge.problem import Loss, Objective, Problem
from metanudge.proximal import LogStiffness, Per, Regulariser, Stiffness
from metanudge.solvers import EXAMPLES, GradientDescent, Solver
from metanudge.solvers.base import check_kind
from metanudge.task import Batch, Task, TaskBatch
from metanudge.tuning import NuEstimate, NuTuner, is_automatic

Tasks = TaskBatch | Task | Iterable[Task]
logger = logging.getLogger("metanudge")
_MANY = 10  # meta-steps
T = TypeVar("T")


class MetaLearner(nn.Module):
    """Learns an initialisation θ from which a model adapts to a new task in a few steps.

    Args:
        model: any `nn.Module`; its parameters that require grad are θ. It is neither patched nor
            copied.
        loss: `loss(output, target)` for batches `(inputs, targets)`, or `loss(model, batch)` for
            anything else (its first parameter must then be named `model`, `module`, `net` or
            `network`, or be annotated as an `nn.Module`). Must return a scalar.
        lam: stiffness λ of the proximal term ½λ‖φ − θ‖², 2.0 by default: a number, a mapping from
            parameter name to a number, or to a tensor of the parameter's shape; or an operator, a
            function that multiplies one task's dict of displacements with a symmetric
            positive-definite matrix (checked on random directions). `MAML`, `FOMAML` and `Reptile`
            take 0, too: no proximal term.
        learn_lam: meta-learn λ as well, starting at `lam`: `"scalar"`, one for all parameters,
            `"tensor"`, one each, or `"parameter"`, one per entry. Kept as log λ in
            `learner.log_lam`, among `learner.parameters()`; `learner.parameter_groups` gives it a
            learning rate of its own. Its gradient is the implicit one, exact for converged inner
            solves (with `MAML` that of the K steps).
        adapt: which parameters adapt to a task, as a pattern of their names (`"head.*"`) or
            several; all by default. The others are shared by all tasks: meta-learned, not adapted.
        regulariser: a function R(φ, θ) of two dicts of one task's tensors, in place of ½λ‖φ − θ‖²;
            returns a scalar.
        solver: how the inner problem is solved; 5 steps of gradient descent at 0.1 by default.
        estimator: how the meta-gradient is made; `FOBMAML()` by default.
        engine: `"stacked"`, `"inplace"` or `"auto"`, which picks one and says which in the
            statistics.
        chunk: stacked engine only: how many solves (tasks × nudges) are held in memory at once.
            None for all; on a CUDA device for as many as its free memory holds, with second
            derivatives on a CPU for as many as are fast.
        seed: of dropout masks and inner minibatches. They change with every call of `backward` and
            are the same for all solves of one.
        compile: on a CUDA device, build kernels for convolution blocks and record meta-steps that
            repeat themselves (CUDA graphs; they hold their memory). The first step takes up to half
            a minute longer, seconds when kernels are cached.

    Example:
        >>> learner = MetaLearner(nn.Linear(2, 1), nn.functional.mse_loss, lam=2.0)
        >>> optimizer = torch.optim.Adam(learner.parameters(), lr=1e-3)
        >>> x = torch.randn(4, 5, 2, generator=torch.Generator().manual_seed(0))
        >>> stats = learner.backward(TaskBatch(support=(x, x[..., :1]), query=(x, x[..., :1])))
        >>> optimizer.step()
        >>> stats.tasks, stats.support_gradients, stats.query_gradients
        (4, 10.0, 10.0)
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        *,
        lam: Stiffness | None = None,
        learn_lam: Per | None = None,
        adapt: str | Sequence[str] | None = None,
        regulariser: Regulariser | None = None,
        solver: Solver | None = None,
        estimator: Estimator | None = None,
        engine: EngineName = "auto",
        chunk: int | None = None,
        seed: int = 0,
        compile: bool = True,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, got {type(model).__name__}.")
        if not callable(loss):
            raise TypeError(
                f"loss must be callable, got {type(loss).__name__}. Pass e.g."
                " torch.nn.functional.cross_entropy."
            )
        if engine not in ("auto", "stacked", "inplace"):
            raise ValueError(f"Unknown engine {engine!r}. Choose one of: auto, stacked, inplace.")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seed must be a whole number, got {seed!r}. Write e.g. seed=0.")
        self.model = model
        self.loss = loss
        if regulariser is not None and (lam is not None or learn_lam is not None):
            raise ValueError(
                "regulariser stands in place of ½λ‖φ − θ‖², so"
                f" {'lam' if lam is not None else 'learn_lam'} would have no effect. Give one of"
                " them."
            )
        if regulariser is not None and not callable(regulariser):
            raise TypeError(
                f"regulariser must be a function of (phi, theta), got {type(regulariser).__name__}."
            )
        self.lam: Stiffness = lam if lam is not None else 2.0
        self.learn_lam = learn_lam
        self.regulariser = regulariser
        self.adapting = adapt
        self.log_lam: LogStiffness | None = None
        self.solver: Solver = solver if solver is not None else GradientDescent(lr=0.1, steps=5)
        self.estimator: Estimator = estimator if estimator is not None else FOBMAML()
        self.engine = engine
        self.chunk = chunk
        self.seed = seed
        self.compiled = compile
        self.calls = 0
        self._cached: tuple[Any, Problem, Any] | None = None
        self._choice = EngineChoice()
        self._captures = Captures()
        self.tuner = NuTuner()
        self._grew = 0
        self._warned = False
        StackedEngine(chunk)
        fixed = self.problem()
        if learn_lam is not None:
            self.log_lam = LogStiffness(self.lam, learn_lam, fixed.parameters)
            self.problem()

    def problem(self) -> Problem:
        """The two-level problem as it stands: made anew when parameters were frozen, moved, cast or
        exchanged.
        """
        state = tuple((id(p), p.requires_grad, p.device, p.dtype) for p in self.parameters())
        patterns = tuple(self.adapting) if isinstance(self.adapting, list) else self.adapting
        key = (
            state,
            id(self.model),
            id(self.loss),
            _fingerprint(self.lam),
            patterns,
            id(self.regulariser),
            id(self.log_lam),
            self.estimator.needs_stiffness,
        )
        if self._cached is None or self._cached[0] != key:
            # What the key knows by its id is kept alive with it: a freed object's id may be given
            # to another.
            kept = (
                self.model,
                self.loss,
                dict(self.lam) if isinstance(self.lam, Mapping) else self.lam,
                self.regulariser,
                self.log_lam,
            )
            term = self.log_lam if self.log_lam is not None else self.lam
            problem = Problem(
                Objective(self.model, self.loss),
                term,
                adapt=patterns,
                regulariser=self.regulariser,
                zero_lam=not self.estimator.needs_stiffness,
            )
            self._choice.cannot_stack = None
            self._cached = (key, problem, kept)
        return self._cached[1]

    def stiffness(self) -> Params:
        """λ of each parameter that adapts as it is now, 0-d or of the parameter's shape
        (copies).
        """
        problem = self.problem()
        problem.proximal.refresh()
        return {n: leaf.clone() for n, leaf in problem.lam.items()}

    def lam_parameters(self) -> Iterator[nn.Parameter]:
        """log λ, where it is learned."""
        if self.log_lam is not None:
            yield from self.log_lam.parameters()

    def parameter_groups(self, lr: float, lam_lr: float | None = None) -> list[dict[str, Any]]:
        """Parameter groups for an optimizer: the model's with `lr`, log λ with `lam_lr` (default:
        `lr`) and without weight decay.

        Example:
            >>> learner = MetaLearner(nn.Linear(2, 1), nn.functional.mse_loss, learn_lam="tensor")
            >>> optimizer = torch.optim.AdamW(learner.parameter_groups(lr=1e-3, lam_lr=1e-2))
            >>> [(len(group["params"]), group["lr"], group["weight_decay"])
            ...     for group in optimizer.param_groups]
            [(2, 0.001, 0.01), (2, 0.01, 0.0)]
        """
        groups: list[dict[str, Any]] = [{"params": list(self.model.parameters()), "lr": lr}]
        if self.log_lam is not None:
            groups.append(
                {
                    "params": list(self.lam_parameters()),
                    "lr": lr if lam_lr is None else lam_lr,
                    "weight_decay": 0.0,
                }
            )
        elif lam_lr is not None:
            raise ValueError(
                f"lam_lr={lam_lr!r} was given, but λ is not learned. Make the learner with"
                " learn_lam, or leave lam_lr out."
            )
        return groups

    def backward(
        self, tasks: Tasks, *, metrics: bool = True, seed: int | None = None, first: int = 0
    ) -> Stats:
        """Add the mean meta-gradient of the tasks to the parameters' `.grad`, like
        `loss.backward()`.

        Nothing is written when anything goes wrong on the way, an interrupt (Ctrl-C) included: it
        waits for the end of a loss evaluation. Hooks on the parameters see the meta-gradient as
        they would see an ordinary gradient; what hangs on autograd itself, such as
        `DistributedDataParallel`, needs `learner(tasks).backward()`.

        Args:
            tasks: a `TaskBatch`, a `Task`, or tasks.
            metrics: also measure query loss and accuracy before and after adaptation (a few forward
                passes).
            seed: of this call's dropout masks and minibatches. Default: from the learner's seed and
                the number of calls so far.
            first: place of the first task in a meta-batch shared among machines, so that each
                task's draws are the same wherever it runs.
        """
        with self._at_work() as problem:
            gradient, stats = self._meta_gradient(
                problem, tasks, metrics=metrics, seed=seed, first=first
            )
            parameters = problem.meta_parameters
            leaves = [
                leaf if leaf.dtype == p.dtype else leaf.to(p)
                for leaf, p in ((gradient.pop(n), p) for n, p in parameters.items())
            ]
            obey()
            if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters.values()):
                _Gradients.apply(leaves, *parameters.values()).backward()
            else:
                _add_to_grad(leaves, list(parameters.values()))
            self._count()
        self._watch(stats)
        return stats

    def forward(self, tasks: Tasks, *, seed: int | None = None) -> Tensor:
        """The tasks' mean query loss after adaptation, as a tensor whose `backward()` yields the
        meta-gradient.

        For what wants a loss rather than a `.grad`: `GradScaler.scale(learner(tasks)).backward()`,
        or `DistributedDataParallel(learner)`.
        """
        parameters = self.problem().meta_parameters
        return _MetaLoss.apply(self, tasks, seed, *parameters.values())

    def meta_gradient(
        self, tasks: Tasks, *, metrics: bool = True, seed: int | None = None, first: int = 0
    ) -> tuple[Params, Stats]:
        """The mean meta-gradient, keyed like `model.named_parameters()`, then `log_lam.…` where λ
        is learned; writes no `.grad`.
        """
        with self._at_work() as problem:
            result = self._meta_gradient(problem, tasks, metrics=metrics, seed=seed, first=first)
            self._count()
        return result

    def _meta_gradient(
        self, problem: Problem, tasks: Tasks, *, metrics: bool, seed: int | None, first: int
    ) -> tuple[Params, Stats]:
        batch = TaskBatch.of(tasks)
        if seed is None:
            seed = mix(self.seed, self.calls)
        solver, captures = self.solver, self._captures if self.compiled and compiles() else None

        def run(engine: Engine) -> tuple[Params, Stats]:
            estimator = self.tuner.settled(
                self.estimator, problem, batch, solver=solver, engine=engine, seed=seed, first=first
            )
            options: dict[str, Any] = {
                "seed": seed,
                "metrics": metrics,
                "first": first,
                "captures": captures,
            }
            gradient, stats = meta_gradient(
                problem, batch, solver=solver, estimator=estimator, engine=engine, **options
            )
            if is_automatic(self.estimator) and stats.nu is None:
                stats = dataclasses.replace(stats, error=self.tuner.error_of_products(problem))
            return gradient, stats

        return self._on_engine(batch, problem, run)

    def _count(self) -> None:
        """A meta-gradient was made, and has reached whom it was for."""
        self.tuner.count()
        self.calls += 1

    def _watch(self, stats: Stats) -> None:
        """Say once that the inner steps diverge: tenfold in one meta-step, or twofold in many in a
        row; less may be dropout's noise.
        """
        self._grew = self._grew + 1 if stats.residual > 2 * stats.residual_start else 0
        if self._warned or not (self._grew >= _MANY or stats.residual > 10 * stats.residual_start):
            return
        self._warned = True
        warnings.warn(
            f"The inner steps diverge: the residual grew from {stats.residual_start:.3g} to"
            f" {stats.residual:.3g}, so that adaptation makes the model worse and the meta-gradient"
            f" may mean nothing. To mend it, {advice_on(self.problem(), self.solver)}. If the"
            " inputs are large numbers, standardise them.",
            DivergenceWarning,
            stacklevel=3,
        )

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse what is no solver or estimator where it is given."""
        if name == "solver":
            check_kind(value, name, "solve", EXAMPLES)
        elif name == "estimator":
            check_kind(
                value,
                name,
                "accumulate",
                {kind.__name__: f"mn.{kind.__name__}()" for kind in ESTIMATORS},
            )
        super().__setattr__(name, value)

    def choose_nu(
        self, tasks: Tasks, *, seed: int | None = None, first: int = 0, rungs_at_once: int = 1
    ) -> NuEstimate:
        """Choose ν on these tasks now, for an estimator with `nu="auto"`; otherwise `meta_gradient`
        does it when it is time.

        For training loops of several processes, which should all use one ν: choose on one, give
        `learner.tuner.state_dict()` to all.

        Args:
            tasks, seed, first: as in `backward`.
            rungs_at_once: how many ν the stacked engine tries side by side.
        """
        estimator = self.estimator
        if not is_automatic(estimator):
            raise ValueError(f'{estimator!r} leaves no ν to be chosen. Use FOBMAML(nu="auto").')
        batch = TaskBatch.of(tasks)
        options: dict[str, Any] = {
            "solver": self.solver,
            "first": first,
            "rungs_at_once": rungs_at_once,
        }
        options["seed"] = mix(self.seed, self.calls) if seed is None else seed
        with self._at_work() as problem:
            return self._on_engine(
                batch,
                problem,
                lambda engine: self.tuner.look(estimator, problem, batch, engine=engine, **options),
            )

    def adapt(self, support: Batch, *, steps: int | None = None, seed: int = 0) -> nn.Module:
        """A copy of the model adapted to a support set; the learner and its model stay as they are.

        Args:
            support: a batch as in `Task.support`, usually `(inputs, targets)`.
            steps: number of steps, if not the solver's own.
            seed: of dropout masks and minibatches.
        """
        with self._at_work(alone=False) as own:
            adapted = copy.deepcopy(self.model)
            problem = Problem(Objective(adapted, self.loss), own.proximal, adapt=self.adapting)
            batch = TaskBatch.of(Task(support, support))
            problem.check_tasks(batch)
            with InplaceEngine().session(problem, batch, width=1, seed=seed, cost=Cost()) as groups:
                inner = next(iter(groups))
                assert isinstance(inner, InplaceInner)
                solution = inner.solve(self._solver(steps))
                if not bool(torch.isfinite(solution.residuals).all()):
                    raise NonFiniteError(
                        "Adaptation produced NaN or Inf: the inner steps diverge on this support"
                        f" set. Take fewer steps, or {advice_on(problem, self.solver)}."
                    )
                inner.adopt(solution.displacement)
        return adapted

    def evaluate(self, tasks: Tasks, *, steps: int | None = None, seed: int = 0) -> Evaluation:
        """Adapt to every task's support set and measure on its query set. Changes nothing."""
        batch = TaskBatch.of(tasks)
        solver = self._solver(steps)
        with self._at_work() as problem:
            problem.check_tasks(batch)
            engine, _ = self._choose(batch, problem)
            try:
                return evaluate(problem, batch, solver, engine, seed)
            except StackingError as error:
                if self.engine != "auto":
                    raise
                self._fall_back(error)
                return evaluate(problem, batch, solver, InplaceEngine(), seed)

    def choose_engine(self, batch: TaskBatch) -> tuple[Engine, str]:
        """The engine for a batch, and why."""
        return self._choose(batch, self.problem())

    def _choose(self, batch: TaskBatch, problem: Problem) -> tuple[Engine, str]:
        options: dict[str, Any] = {
            "asked": self.engine,
            "chunk": self.chunk,
            "estimator": self.estimator,
            "solver": self.solver,
        }
        return self._choice(batch, problem, **options)

    def extra_repr(self) -> str:
        """Solver, estimator and engine, for `repr`."""
        term = (
            f"lam={self.lam!r}" if self.regulariser is None else f"regulariser={self.regulariser!r}"
        )
        more = {"learn_lam": self.learn_lam, "adapt": self.adapting}
        shown = "".join(f", {name}={value!r}" for name, value in more.items() if value is not None)
        return (
            f"{term}{shown}, solver={self.solver!r}, estimator={self.estimator!r},"
            f" engine={self.engine!r}"
        )

    def _on_engine(self, batch: TaskBatch, problem: Problem, run: Callable[[Engine], T]) -> T:
        """Run on the engine for a batch, and in place where the model turns out not to stack and
        the choice is ours.
        """
        engine, _ = self._choose(batch, problem)
        try:
            return run(engine)
        except StackingError as error:
            if self.engine != "auto" or "inplace" not in self.estimator.engines:
                raise
            self._fall_back(error)
            return run(InplaceEngine())

    def _fall_back(self, error: StackingError) -> None:
        self._choice.cannot_stack = str(error)
        logger.warning("engine: in place from now on. %s", error)

    @contextmanager
    def _at_work(self, *, alone: bool = True) -> Iterator[Problem]:
        """Within, signals wait, the model is ours (or at least nobody else's), and gradients are
        on, as inner solves need them.
        """
        enabled = torch.is_grad_enabled()
        assert self._cached is not None
        with (
            uninterrupted(),
            claimed(self._cached[1], alone=alone),
            restored(lambda: torch._C._set_grad_enabled(enabled)),
        ):
            # only now: another thread's work would look like exchanged parameters
            problem = self.problem()
            with torch.inference_mode(False), torch.enable_grad(), compilation(self.compiled):
                yield problem

    def _solver(self, steps: int | None) -> Solver:
        return self.solver if steps is None else dataclasses.replace(self.solver, steps=steps)  # type: ignore[type-var]


def _fingerprint(lam: Stiffness) -> Any:
    """What changes when λ does, without waiting for the device."""
    if isinstance(lam, Mapping):
        return tuple((name, _fingerprint(value)) for name, value in lam.items())
    return (id(lam), lam._version) if isinstance(lam, Tensor) else lam


@torch.no_grad()
def _add_to_grad(gradients: list[Tensor], parameters: list[nn.Parameter]) -> None:
    """What autograd does where no hook is registered, in a fraction of its time: a thread of its
    own and a node for each parameter.

    All are written or none: the first ones can be taken back, the others are written at once.
    """
    pairs = list(zip(parameters, gradients, strict=True))
    known = [(p.grad, g) for p, g in pairs if p.grad is not None]
    new = [
        (p, g if g.stride() == p.stride() else torch.empty_like(p).copy_(g))
        for p, g in pairs
        if p.grad is None
    ]
    try:
        for p, g in new:
            p.grad = g
        if known:
            torch._foreach_add_([grad for grad, _ in known], [g for _, g in known])
    except BaseException:
        for p, _ in new:
            p.grad = None
        raise


class _Gradients(torch.autograd.Function):
    """A zero whose derivative in each tensor is a given one."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        gradients = tuple(ctx.gradients)
        # autograd takes a gradient over that nobody else holds, and copies it otherwise
        ctx.gradients.clear()
        return (None, *gradients)


class _MetaLoss(torch.autograd.Function):
    """A query loss whose derivative is the estimator's meta-gradient."""

    @staticmethod
    def forward(
        ctx: Any, learner: MetaLearner, tasks: Tasks, seed: int | None, *parameters: Tensor
    ) -> Tensor:
        gradient, stats = learner.meta_gradient(tasks, seed=seed)
        learner._watch(stats)
        ctx.save_for_backward(
            *(g.to(p) for g, p in zip(gradient.values(), parameters, strict=True))
        )
        return parameters[0].new_tensor(stats.query_loss)

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> Any:
        return (None, None, None, *(g * outputs[0] for g in ctx.saved_tensors))
