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
    from metanudge.planning import MemoryPlan, plan
    from metanudge.rates import InnerRates
    from metanudge.solvers import LBFGS, GradientDescent, Nesterov, NewtonCG, TorchOptimizer
    from metanudge.task import Task, TaskBatch

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
    "planning": ("MemoryPlan", "plan"),
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
    "NonFiniteError", "StackingError", "plan", "MemoryPlan",
    "baselines", "models", "optim", "tasks", "tuning", "__version__",
]  # fmt: skip


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
