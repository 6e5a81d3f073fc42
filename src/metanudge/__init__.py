"""First-order meta-learning with meta-gradients you can trust.

Nudge the inner problem with a little of the outer loss, watch how its solution moves, and you have
the meta-gradient. Importing this package is instant; its names load torch and numpy when first
used, and nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from metanudge.version import __version__

if TYPE_CHECKING:
    import os

    from metanudge import baselines, models, optim, tasks, tuning
    from metanudge.bilevel import Hypergradient, Unrolled, hypergradient, solve_bilevel
    from metanudge.engines import StackingError
    from metanudge.estimators import (
        ESMAML,
        FOBMAML,
        FOMAML,
        IMAML,
        MAML,
        DivergenceWarning,
        Exact,
        NonFiniteError,
        Reptile,
        Stats,
        ZeroGradientWarning,
    )
    from metanudge.evaluation import Evaluation
    from metanudge.gradcheck import check_gradient
    from metanudge.gradient_report import GradientReport
    from metanudge.learner import MetaLearner
    from metanudge.rates import InnerRates
    from metanudge.solvers import LBFGS, GradientDescent, Nesterov, NewtonCG, TorchOptimizer
    from metanudge.task import Task, TaskBatch
    from metanudge.training.config import Device
    from metanudge.training.loaded_run import LoadedRun

# Where each public name lives. Loading on first use keeps the command line's --help fast: importing
# torch takes seconds.
_HOMES = {
    "bilevel": ("Hypergradient", "Unrolled", "hypergradient", "solve_bilevel"),
    "engines": ("StackingError",),
    "estimators": (
        "DivergenceWarning",
        "ESMAML",
        "Exact",
        "FOBMAML",
        "FOMAML",
        "IMAML",
        "MAML",
        "NonFiniteError",
        "Reptile",
        "Stats",
        "ZeroGradientWarning",
    ),
    "gradcheck": ("check_gradient",),
    "gradient_report": ("GradientReport",),
    "evaluation": ("Evaluation",),
    "learner": ("MetaLearner",),
    "rates": ("InnerRates",),
    "solvers": ("GradientDescent", "LBFGS", "Nesterov", "NewtonCG", "TorchOptimizer"),
    "task": ("Task", "TaskBatch"),
}
_MODULES = ("baselines", "models", "optim", "tasks", "tuning")
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [  # noqa: RUF022 — grouped by what they are for
    "MetaLearner", "Evaluation", "Stats", "Task", "TaskBatch",
    "FOBMAML", "MAML", "FOMAML", "Reptile", "IMAML", "ESMAML", "Exact",
    "GradientDescent", "Nesterov", "TorchOptimizer", "LBFGS", "NewtonCG", "InnerRates",
    "hypergradient", "solve_bilevel", "Hypergradient", "Unrolled",
    "check_gradient", "GradientReport", "DivergenceWarning", "ZeroGradientWarning",
    "NonFiniteError", "StackingError",
    "load_run", "baselines", "models", "optim", "tasks", "tuning", "__version__",
]  # fmt: skip


def load_run(
    run: str | os.PathLike[str],
    *,
    checkpoint: str = "best",
    device: Device | None = None,
    trust: bool = False,
) -> LoadedRun:
    """A run that `metanudge train` wrote: its `learner` with the weights of a checkpoint, its
    `source` of tasks and its `config`; `run.adapt(support)` and `run.evaluate(tasks=600)` do what
    the commands of these names do.

    Args:
        run: the folder.
        checkpoint: `"best"` (the last where there is none), `"last"`, or a step that was saved.
        device: "cpu", "cuda" or "auto"; the run's own when None.
        trust: import the code that the run's configuration names (`module:attribute`). Look at it
            first: it runs as you. Without, such a run is refused.

    Raises `metanudge.training.errors.UserError` where there is no such run, or one that is damaged.

    Example:
        >>> import tempfile
        >>> from metanudge.training.config import TrainConfig
        >>> from metanudge.training.progress import Quiet
        >>> from metanudge.training.trainer import train
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     config = TrainConfig("sinusoid", iterations=2, tasks=2, device="cpu", out=folder)
        ...     done = train(config, reporter=Quiet())   # metanudge train sinusoid ...
        ...     run = load_run(folder)
        >>> run.config.tasks, run.source.kind, run.state.step, run.evaluate(tasks=4).tasks
        (2, 'regression', 2, 4)
    """
    from metanudge.training import loaded_run

    return loaded_run.load_run(run, checkpoint=checkpoint, device=device, trust=trust)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"metanudge.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'metanudge' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"metanudge.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
