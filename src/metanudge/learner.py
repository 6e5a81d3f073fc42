"""`MetaLearner`: a model, a loss, a way to solve and a way to differentiate; from here on the
user's own training loop takes over.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from metanudge.adapting import Adapting, Tasks
from metanudge.engine_choice import ENGINES, EngineChoice, EngineName, Wish
from metanudge.engines import Engine, StackedEngine
from metanudge.engines.randomness import mix
from metanudge.engines.undisturbed import obey
from metanudge.estimators import ESTIMATORS, FOBMAML, Estimator, Stats, meta_gradient
from metanudge.estimators.run import Watch
from metanudge.names import check_known
from metanudge.objective import Loss, Metrics
from metanudge.params import Params
from metanudge.problem import Problem
from metanudge.proximal import Per, Regulariser, Stiffness
from metanudge.rates import InnerRates, RatePer
from metanudge.setting import add_to_grad, at_work, meta_loss
from metanudge.solvers import EXAMPLES, GradientDescent, Solver
from metanudge.solvers.base import check_kind
from metanudge.split import mean_over
from metanudge.task import TaskBatch
from metanudge.tuning import NuEstimate, NuTuner, Where, is_automatic


class MetaLearner(Adapting):
    """Learns an initialisation θ from which a model adapts to a new task in a few steps.

    Args:
        model: any `nn.Module`, neither patched nor copied; its parameters that require grad are θ.
            Also one that is sharded by `fully_shard` or tensor-parallel: each rank works on its
            shards, all of them on the same tasks.
        loss: `loss(output, target)` for batches `(inputs, targets)`, or `loss(model, batch)` for
            anything else (its first parameter must then be named `model`, `module`, `net` or
            `network`, or be annotated as an `nn.Module`). Must return a scalar, or a scalar and a
            dict of numbers, whose means come with the statistics. Left out, it is the model's own:
            `model(**batch).loss`, as models of Hugging Face compute it from `labels`. Of an output
            with `logits` they are the output; accuracy is measured where they meet integer labels.
        lam: stiffness λ of the proximal term ½λ‖φ − θ‖², 2.0 by default: a number, a mapping from
            parameter name to a number, or to a tensor of the parameter's shape, where names may be
            patterns (`{"*lora_*": 5.0, "*": 1.0}`: an exact name counts first, then the first
            pattern that fits); or an operator, a function that multiplies one task's dict of
            displacements with a symmetric positive-definite matrix (checked on random directions).
            `MAML`, `FOMAML` and `Reptile` take 0, too: no proximal term.
        learn_lam: meta-learn λ as well, starting at `lam`: `"scalar"`, one for all parameters,
            `"tensor"`, one each, or `"parameter"`, one per entry. Kept as log λ in
            `learner.log_lam`, among `learner.parameters()`; `learner.parameter_groups` gives it a
            learning rate of its own. Its gradient is the implicit one, exact for converged inner
            solves (with `MAML` that of the K steps).
        learn_lr: meta-learn the inner learning rates as well, starting at the solver's: `"scalar"`,
            `"tensor"`, `"parameter"` (Meta-SGD) or `"step"`, one per tensor and step (LSLR of
            MAML++); `InnerRates` says more. Kept as log r in `learner.log_lr`; needs `MAML`.
        adapt: which parameters adapt to a task, as a pattern of their names (`"head.*"`) or
            several; all by default. The others are shared by all tasks: meta-learned, not adapted.
        regulariser: a function R(φ, θ) of two dicts of one task's tensors, in place of ½λ‖φ − θ‖²;
            returns a scalar.
        query_loss: the loss f of the query set, in either of `loss`'s forms, where it is to be
            another one than f̂, which the model adapts with (label smoothing, a margin, a cost); the
            same by default.
        metrics: functions of (output, target) by name that return a number, measured where
            accuracy is: on the query set, in `Stats.extra` and `Evaluation.extra`. Never
            differentiated; they see one task at a time.
        solver: how the inner problem is solved; 5 steps of gradient descent at 0.1 by default.
        estimator: how the meta-gradient is made; `FOBMAML()` by default.
        engine: `"stacked"`, `"inplace"` or `"auto"`: the statistics say which one it took.
        chunk: stacked engine only: how many solves (tasks × nudges) are held in memory at once.
            None for all; on a CUDA device for as many as its free memory holds, with second
            derivatives on a CPU for as many as are fast.
        seed: of dropout masks and inner minibatches. They change with every call of `backward` and
            are the same for all solves of one.
        compile: on a CUDA device, build kernels for convolution blocks and record meta-steps that
            repeat themselves (CUDA graphs; they hold their memory). The first step takes up to half
            a minute longer, seconds when kernels are cached.

    Example:
        >>> import torch
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
        loss: Loss | None = None,
        *,
        lam: Stiffness | None = None,
        learn_lam: Per | None = None,
        learn_lr: RatePer | InnerRates | None = None,
        adapt: str | Sequence[str] | None = None,
        regulariser: Regulariser | None = None,
        query_loss: Loss | None = None,
        metrics: Metrics | None = None,
        solver: Solver | None = None,
        estimator: Estimator | None = None,
        engine: EngineName = "auto",
        chunk: int | None = None,
        seed: int = 0,
        compile: bool = True,
    ) -> None:
        super().__init__(
            model, loss, lam, learn_lam, learn_lr, adapt, regulariser, query_loss, metrics
        )
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seed must be a whole number, got {seed!r}. Write e.g. seed=0.")
        self.solver: Solver = solver if solver is not None else GradientDescent(lr=0.1, steps=5)
        self.estimator: Estimator = estimator if estimator is not None else FOBMAML()
        self.engine = engine
        self.chunk = chunk
        self.seed = seed
        self.compiled = compile
        self.calls = 0
        self.tuner = NuTuner()
        self._choice = EngineChoice()
        self._watch = Watch()
        self._settle(self.solver)

    def backward(
        self,
        tasks: Tasks,
        *,
        metrics: bool = True,
        seed: int | None = None,
        first: int = 0,
        over: Any = None,
    ) -> Stats:
        """Add the mean meta-gradient of the tasks to the parameters' `.grad`, like
        `loss.backward()`.

        Nothing is written when anything goes wrong on the way, an interrupt (Ctrl-C) included: it
        waits for the end of a loss evaluation. Hooks on the parameters see the meta-gradient as
        they would see an ordinary gradient; what hangs on autograd itself, such as
        `DistributedDataParallel`, needs `learner(tasks).backward()`.

        Args:
            tasks: a `TaskBatch`, a `Task`, or tasks.
            metrics: also measure query loss and accuracy before and after adaptation.
            seed: of dropout masks and minibatches; by default from the learner's and the calls.
            first: place of the first task in a meta-batch shared among machines.
            over: one dimension of a device mesh (or a process group) over whose ranks the tasks are
                split. All ranks give all tasks, and get the mean over all of them.
        """
        with at_work(self, compile=self.compiled) as problem:
            gradient, stats = self._meta_gradient(problem, tasks, metrics, seed, first, over)
            obey()
            add_to_grad(gradient, problem.meta_parameters)
            self._count()
        self._watch.see(stats, problem, self.solver)
        return stats

    def forward(self, tasks: Tasks, *, seed: int | None = None) -> Tensor:
        """The tasks' mean query loss after adaptation, as a tensor whose `backward()` yields the
        meta-gradient.

        For what wants a loss rather than a `.grad`: `GradScaler.scale(learner(tasks)).backward()`,
        or `DistributedDataParallel(learner)`.
        """

        def compute() -> tuple[Params, float]:
            gradient, stats = self.meta_gradient(tasks, seed=seed)
            self._watch.see(stats, self.problem(), self.solver)
            return gradient, stats.query_loss

        return meta_loss(compute, self.problem().meta_parameters)

    def meta_gradient(
        self,
        tasks: Tasks,
        *,
        metrics: bool = True,
        seed: int | None = None,
        first: int = 0,
        over: Any = None,
    ) -> tuple[Params, Stats]:
        """The mean meta-gradient, keyed like `model.named_parameters()`, then `log_lam.…` where λ
        is learned and `log_lr.…` (`lr.…`) where inner rates are; writes no `.grad`.
        """
        with at_work(self, compile=self.compiled) as problem:
            result = self._meta_gradient(problem, tasks, metrics, seed, first, over)
            self._count()
        return result

    def _meta_gradient(
        self, problem: Problem, tasks: Tasks, metrics: bool, seed: int | None, first: int, over: Any
    ) -> tuple[Params, Stats]:
        batch, draw = TaskBatch.of(tasks), mix(self.seed, self.calls) if seed is None else seed
        solver = self.solver = self._choice.settled(problem, batch, self._wish())
        make = partial(meta_gradient, problem, solver=solver, seed=draw, metrics=metrics)
        make = partial(make, recorder=self._choice.recorder(problem))

        def run(engine: Engine) -> tuple[Params, Stats]:
            estimator = self.estimator.on(problem)
            if automatic := estimator.automatic:
                where = Where(solver=solver, engine=engine, seed=draw, first=first)
                estimator = self.tuner.settled(estimator, problem, batch, **where)

            def of(part: TaskBatch, begin: int) -> tuple[Params, Stats]:
                return make(part, estimator=estimator, engine=engine, first=first + begin)

            gradient, stats = of(batch, 0) if over is None else mean_over(over, batch, of)
            return gradient, self.tuner.report(problem, stats) if automatic else stats

        return self._choice.run(problem, batch, self._wish(), run)

    def _count(self) -> None:
        """A meta-gradient was made, and has reached whom it was for."""
        if self.tuner.nu is not None:
            self.tuner.count()
        self.calls += 1

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse what is no solver, estimator, engine or chunk where it is given."""
        if name == "solver":
            check_kind(value, name, "solve", EXAMPLES)
        elif name == "engine":
            check_known(name, value, ENGINES)
        elif name == "chunk":
            StackedEngine(value)
        elif name == "estimator":
            examples = {kind.__name__: f"mn.{kind.__name__}()" for kind in ESTIMATORS}
            check_kind(value, name, "accumulate", examples)
        super().__setattr__(name, value)

    def choose_nu(
        self, tasks: Tasks, *, seed: int | None = None, first: int = 0, rungs_at_once: int = 1
    ) -> NuEstimate:
        """Choose ν on these tasks now, for an estimator with `nu="auto"`; otherwise `meta_gradient`
        does it when it is time. For several processes, which should all use one ν: choose on one,
        give `learner.tuner.state_dict()` to all.

        Args:
            tasks, seed, first: as in `backward`.
            rungs_at_once: how many ν the stacked engine tries side by side.
        """
        estimator = self.estimator.on(self.problem())
        if not is_automatic(estimator):
            raise ValueError(f'{estimator!r} leaves no ν to be chosen. Use FOBMAML(nu="auto").')
        batch, draw = TaskBatch.of(tasks), mix(self.seed, self.calls) if seed is None else seed
        with at_work(self, compile=self.compiled) as problem:
            self.solver = self._choice.settled(problem, batch, self._wish())
            look = partial(self.tuner.look, estimator, problem, batch, solver=self.solver)
            look = partial(look, seed=draw, first=first, rungs_at_once=rungs_at_once)
            return self._choice.run(problem, batch, self._wish(), lambda e: look(engine=e))

    def rows_for(self, tasks: Tasks, estimator: Estimator) -> int | None:
        """How many solves of these tasks the stacked engine would hold at once with another
        estimator; None for all.
        """
        wish = Wish(self.engine, self.chunk, estimator, self.solver)
        with at_work(self, compile=self.compiled) as problem:
            return self._choice.rows_for(problem, TaskBatch.of(tasks), wish)

    def extra_repr(self) -> str:
        """Solver, estimator and engine, for `repr`."""
        how = f"solver={self.solver!r}, estimator={self.estimator!r}, engine={self.engine!r}"
        return f"{self._describe()}, {how}"

    def _takes_zero_lam(self) -> bool:
        return not self.estimator.needs_stiffness

    def _wish(self) -> Wish:
        return Wish(self.engine, self.chunk, self.estimator, self.solver)
