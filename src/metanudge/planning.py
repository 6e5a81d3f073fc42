"""What a meta-step needs before it is run: memory from the engines themselves, on tensors that
have shapes and no numbers; time from gradients that are measured.

    print(mn.plan(learner, tasks))

The engines run as they do, with `FakeTensorMode` in the place of the arithmetic; every storage that
comes to life is counted until it is freed (`metanudge.testing.memory`). No weights are needed and
no GPU: a function that makes the learner makes it without numbers, too.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeCopyMode,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode

from metanudge.adapting import Tasks
from metanudge.engine_choice import EngineName
from metanudge.engines import Cost, InplaceEngine, StackedEngine, StackingError
from metanudge.engines.room import free_memory
from metanudge.estimators import FOBMAML, FOMAML, MAML, Estimator
from metanudge.estimators.products import ProductsWarning
from metanudge.html_table import html_table
from metanudge.learner import MetaLearner
from metanudge.solvers import GradientDescent
from metanudge.task import TaskBatch, tensors
from metanudge.testing.memory import Allocations, Workspaces

USUAL: tuple[Estimator, ...] = (
    FOBMAML(nu=0.1),
    FOBMAML(nu=0.1, nudge="gradient"),
    FOMAML(),
    MAML(),
    MAML(products="difference", epsilon=1e-3),
)
_PLAIN = GradientDescent(lr=0.1, steps=5)
_PRODUCT = 3.0  # gradients that a Hessian-vector product takes the time of
_BLOCK = 512  # bytes, which a CUDA device's allocator gives out
_GIB = 2**30


@dataclass(frozen=True)
class PlannedStep:
    """A meta-step with one estimator on one engine.

    Attributes:
        estimator, engine: which.
        peak: the most bytes that it holds at a time, beyond what was there before it; None where
            it does not run.
        why: the reason why not.
        gradients: support and query gradients of all tasks; a Hessian-vector product counts
            three.
        seconds: estimated from gradients that were measured; None where none was.
        chosen: whether it is what the learner would do.
    """

    estimator: Estimator
    engine: str
    peak: int | None
    why: str = ""
    gradients: float = 0.0
    seconds: float | None = None
    chosen: bool = False


@dataclass(frozen=True)
class MemoryPlan:
    """What meta-steps need, and what there is.

    Attributes:
        steps: one for each estimator and engine.
        held: bytes of parameters and buffers, which are there before.
        free: bytes that the device still has; None where nobody knows (on a CPU).
    """

    steps: tuple[PlannedStep, ...]
    held: int
    free: int | None = None

    @property
    def chosen(self) -> PlannedStep:
        """What the learner would do."""
        return next(step for step in self.steps if step.chosen)

    def fits(self, step: PlannedStep) -> bool:
        """Whether there is room for it, as far as anybody knows."""
        return step.peak is not None and (self.free is None or step.peak <= self.free)

    @property
    def advice(self) -> str:
        """What to change where the learner's own meta-step does not fit; empty where it does."""
        own = self.chosen
        if self.fits(own):
            return ""
        assert self.free is not None or own.peak is None
        fitting = sorted(
            (step for step in self.steps if self.fits(step)),
            key=lambda step: (step.estimator != own.estimator, step.gradients),
        )
        need = f"needs {_gib(own.peak)}" if own.peak is not None else f"does not run: {own.why}"
        there = "" if self.free is None else f" {_gib(self.free)} are free."
        begin = f"{_short(own.estimator)} with engine={own.engine!r} {need}.{there}"
        if fitting:
            best = fitting[0]
            return (
                f"{begin} What fits: {_short(best.estimator)} with engine={best.engine!r},"
                f" {_gib(best.peak)}."
            )
        return (
            f"{begin} Nothing planned here fits: use gradient checkpointing, parameters in"
            " bfloat16, adapters (LoRA) or adapt=[...], fewer or shorter examples, chunk=1 where"
            " the engine is stacked, or shard the model over several devices (fully_shard)."
        )

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                _short(step.estimator),
                step.engine,
                _gib(step.peak) if step.peak is not None else step.why,
                f"{step.gradients:g}" if step.peak is not None else "",
                "" if step.seconds is None else f"{step.seconds:.3g} s",
                ("chosen" if step.chosen else "")
                + ("" if step.peak is None or self.fits(step) else " does not fit"),
            )
            for step in self.steps
        ]

    @property
    def _notes(self) -> list[str]:
        free = "" if self.free is None else f"; free on the device: {_gib(self.free)}"
        return [f"Parameters and buffers: {_gib(self.held)}{free}.", *filter(None, [self.advice])]

    def __str__(self) -> str:
        rows = [_HEAD, *self._rows()]
        widths = [min(60, max(len(row[place]) for row in rows)) for place in range(len(_HEAD))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, *self._notes])

    def _repr_html_(self) -> str:
        return html_table(self._rows(), head=_HEAD, notes=self._notes)


_HEAD = ("estimator", "engine", "memory", "gradients", "time", "")


def plan(
    learner: MetaLearner | Callable[[], MetaLearner],
    tasks: Tasks,
    *,
    estimators: Sequence[Estimator] | None = None,
    engines: Sequence[EngineName] = ("inplace", "stacked"),
    timed: bool = True,
) -> MemoryPlan:
    """What one `learner.backward(tasks)` needs, with the learner's estimator and others; nothing is
    changed.

    Args:
        learner: a learner, or a function that makes one: it is called where tensors have no
            numbers, so that a model of any size costs nothing (it must be made in its dtype, not
            cast afterwards). Time is not measured then.
        tasks: of the sizes that will come.
        estimators: instead of the learner's own and the usual ones.
        engines: which engines.
        timed: measure a gradient on each engine, where there are weights and it fits: its time
            and, on a CUDA device, what kernels allocate for themselves.

    On the stacked engine memory is that of `torch.func`; recorded meta-steps (CUDA graphs) keep
    theirs. An automatic ν adds its first look, a learning rate that is measured is left out.

    Example:
        >>> import metanudge as mn, torch
        >>> learner = mn.MetaLearner(torch.nn.Linear(2, 1), torch.nn.functional.mse_loss)
        >>> x = torch.zeros(4, 5, 2)
        >>> tasks = mn.TaskBatch(support=(x, x[..., :1]), query=(x, x[..., :1]))
        >>> found = mn.plan(learner, tasks, estimators=[mn.FOMAML()], timed=False)
        >>> [(step.engine, step.gradients) for step in found.steps]
        [('inplace', 24.0), ('stacked', 24.0)]
    """
    batch = TaskBatch.of(tasks)
    real = learner if isinstance(learner, MetaLearner) else None
    with _without_numbers() as faked:
        fake, given = _faked(learner, batch, faked)
    own = fake.estimator
    wanted = list(dict.fromkeys([own, *USUAL] if estimators is None else estimators))
    auto = _engine_of(fake if real is None else real, batch)
    held = sum(t.nbytes for t in (*fake.model.parameters(), *fake.model.buffers()))
    free = _free(real)
    steps = []
    measured: dict[str, tuple[float, Mapping[Any, int]] | None] = {}
    for estimator in wanted:
        for engine in engines:
            chunk = fake.chunk if real is None else _rows(real, batch, estimator, engine)
            step = _planned(fake, given, estimator, engine, chunk, faked)
            fits = step.peak is not None and (free is None or step.peak < free)
            if timed and real is not None and fits:
                if engine not in measured:
                    measured[engine] = _gradient_measured(real, batch, engine, chunk)
                if (found := measured[engine]) is not None:
                    seconds, workspaces = found
                    if workspaces:
                        step = _planned(fake, given, estimator, engine, chunk, faked, workspaces)
                    step = replace(step, seconds=seconds * step.gradients)
            step = replace(step, chosen=(estimator, engine) == (own, auto))
            steps.append(step)
    return MemoryPlan(tuple(steps), held, free)


def _planned(
    learner: MetaLearner,
    batch: list[Any],
    estimator: Estimator,
    engine: EngineName,
    chunk: int | None,
    faked: Any,
    workspaces: Mapping[Any, int] | None = None,
) -> PlannedStep:
    if engine not in estimator.engines:
        return PlannedStep(estimator, engine, None, f"runs {' and '.join(estimator.engines)} only")
    if estimator.needs_stiffness and isinstance(learner.lam, int | float) and not learner.lam:
        return PlannedStep(estimator, engine, None, "needs a λ above 0")
    # in place one task of each kind tells: others come where it was
    tasks = list(TaskBatch.of(batch))
    kinds = {_sizes(task): task for task in tasks}
    few = list(kinds.values()) if engine == "inplace" else tasks
    learner.estimator, learner.engine, learner.chunk = estimator, engine, chunk
    on_cuda = next(learner.parameters()).device.type == "cuda"
    try:
        with _without_numbers(faked):
            together = TaskBatch.of(few)  # who has a batch already does not pay for it
            with Allocations(_BLOCK if on_cuda else 1, workspaces) as seen:
                stats = learner.backward(together)
            learner.zero_grad(set_to_none=True)
    except (StackingError, ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        learner.zero_grad(set_to_none=True)
        return PlannedStep(estimator, engine, None, str(error).splitlines()[0][:200])
    gradients = stats.support_gradients + stats.query_gradients + _PRODUCT * stats.hessian_products
    return PlannedStep(estimator, engine, seen.peak, gradients=gradients * len(tasks))


class _Answers(TorchDispatchMode):
    """Tensors without numbers answer as where all is well; constants know what they are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype != torch.bool:
                return 1
            return True


@contextmanager
def _without_numbers(mode: Any = None) -> Iterator[Any]:
    """Within, tensors that are made have no numbers."""
    mode = FakeTensorMode(allow_non_fake_inputs=True) if mode is None else mode
    with warnings.catch_warnings(), mode, _Answers():
        # fused layers compare addresses, which are all alike here
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        warnings.simplefilter("ignore", ProductsWarning)  # there is nothing to take differences of
        yield mode


def _faked(
    learner: MetaLearner | Callable[[], MetaLearner], batch: TaskBatch, mode: Any
) -> tuple[MetaLearner, list[Any]]:
    """A learner and tasks without numbers."""
    with FakeCopyMode(mode):
        tasks = copy.deepcopy(list(batch))
    if not isinstance(learner, MetaLearner):
        made = learner()
        if not isinstance(made, MetaLearner):
            raise TypeError(
                f"plan needs a MetaLearner or a function that makes one, got {type(made).__name__}."
            )
        made.compiled = False
        return made, tasks
    if learner.problem().spread is not None:
        raise ValueError(
            "plan looks at one process, and the model is spread over several ranks. Plan the model"
            " as it is before fully_shard: each rank holds its share of parameters and copies, and"
            " all of the activations."
        )
    with FakeCopyMode(mode):
        model, loss, query_loss = copy.deepcopy((learner.model, learner.loss, learner.query_loss))
    for parameter in model.parameters():
        parameter.grad = None
    steps = learner.solver
    if getattr(steps, "lr", None) == "auto":
        steps = replace(steps, lr=_PLAIN.lr)  # type: ignore[type-var]
    return MetaLearner(
        model, loss, lam=None if learner.regulariser is not None else learner.lam,
        learn_lam=learner.learn_lam, learn_lr=learner.learn_lr, adapt=learner.adapting,
        regulariser=learner.regulariser, query_loss=query_loss, metrics=learner.metrics or None,
        solver=steps, estimator=learner.estimator, engine=learner.engine, chunk=learner.chunk,
        compile=False,
    ), tasks  # fmt: skip


def _sizes(task: Any) -> tuple[Any, ...]:
    return tuple(
        (tuple(tensor.shape), tensor.dtype)
        for part in (task.support, task.query)
        for tensor in tensors(part)
    )


def _engine_of(learner: MetaLearner, batch: TaskBatch) -> str:
    """Which engine the learner takes."""
    if learner.engine != "auto":
        return learner.engine
    return learner.choose_engine(batch)[0].name


def _rows(learner: MetaLearner, batch: TaskBatch, estimator: Estimator, engine: str) -> int | None:
    """How many solves the stacked engine would hold at once."""
    if engine != "stacked" or learner.chunk is not None:
        return learner.chunk
    return learner.rows_for(batch, estimator)


def _free(learner: MetaLearner | None) -> int | None:
    device = None if learner is None else next(learner.parameters()).device
    return None if device is None or device.type != "cuda" else free_memory(device)


def _gradient_measured(
    learner: MetaLearner, batch: TaskBatch, name: str, chunk: int | None
) -> tuple[float, Mapping[Any, int]] | None:
    """Seconds of one task's gradient, support and query set in the mean, and bytes that operators
    take for themselves on a CUDA device (convolutions); None where it fails.
    """
    problem = learner.problem()
    engine = InplaceEngine() if name == "inplace" else StackedEngine(chunk)
    device, cuda = problem.device, problem.device.type == "cuda"

    def now() -> float:
        if cuda:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    times: list[float] = []
    try:
        with engine.session(problem, batch, width=1, seed=0, cost=Cost()) as groups:
            inner = next(iter(groups))
            d = inner.zeros(inner.tasks)

            def both() -> None:
                begin = now()
                inner.data_gradient(d, None, 0, None)
                inner.query_gradient(d)
                times.append((now() - begin) / (2 * inner.tasks))

            for _ in range(3):
                both()
            workspaces = Workspaces(device)
            with workspaces if cuda else nullcontext():
                both()
    except (StackingError, ValueError, RuntimeError):
        return None
    return min(times[:3]), workspaces.found


def _short(estimator: Estimator) -> str:
    """Without what is as usual."""
    one: Any = estimator
    known = [f for f in fields(one) if f.init] if is_dataclass(one) else []
    given = [
        f"{f.name}={getattr(one, f.name)!r}" for f in known if getattr(one, f.name) != f.default
    ]
    return f"{type(estimator).__name__}({', '.join(given)})"


def _gib(size: int | None) -> str:
    assert size is not None
    return f"{size / _GIB:.3g} GiB" if size >= _GIB / 10 else f"{size / 2**20:.3g} MiB"
