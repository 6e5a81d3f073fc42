"""First-order meta-learning with meta-gradients you can trust.

Nudge the inner problem with a little of the outer loss, watch how its solution moves, and you have the meta-gradient.
Importing this package needs torch and numpy only.
"""

from metanudge import optim
from metanudge.engines import StackingError
from metanudge.estimators import ESMAML, FOBMAML, FOMAML, IMAML, MAML, Exact, NonFiniteError, Reptile, Stats
from metanudge.learner import Evaluation, MetaLearner
from metanudge.solvers import LBFGS, GradientDescent, Nesterov, NewtonCG, TorchOptimizer
from metanudge.task import Task, TaskBatch
from metanudge.version import __version__

__all__ = [
    "ESMAML",
    "FOBMAML",
    "FOMAML",
    "IMAML",
    "LBFGS",
    "MAML",
    "Evaluation",
    "Exact",
    "GradientDescent",
    "MetaLearner",
    "Nesterov",
    "NewtonCG",
    "NonFiniteError",
    "Reptile",
    "StackingError",
    "Stats",
    "Task",
    "TaskBatch",
    "TorchOptimizer",
    "__version__",
    "optim",
]
