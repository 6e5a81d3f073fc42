"""How to solve the inner problem: one algorithm a file."""

from metanudge.solvers.base import LinearSolver, Oracle, Solution, Solver
from metanudge.solvers.gradient_descent import GradientDescent
from metanudge.solvers.lbfgs import LBFGS
from metanudge.solvers.nesterov import Nesterov
from metanudge.solvers.newton_cg import NewtonCG
from metanudge.solvers.torch_optimizer import TorchOptimizer

__all__ = [
    "LBFGS",
    "GradientDescent",
    "LinearSolver",
    "Nesterov",
    "NewtonCG",
    "Oracle",
    "Solution",
    "Solver",
    "TorchOptimizer",
]
