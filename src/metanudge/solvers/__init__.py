"""How to solve the inner problem: one algorithm a file."""

from metanudge.solvers.base import LinearSolver, Oracle, Solution, Solver
from metanudge.solvers.gradient_descent import GradientDescent, stability_advice
from metanudge.solvers.lbfgs import LBFGS
from metanudge.solvers.nesterov import Nesterov
from metanudge.solvers.newton_cg import NewtonCG
from metanudge.solvers.torch_optimizer import TorchOptimizer

SOLVERS: list[type[Solver]] = [LBFGS, GradientDescent, Nesterov, NewtonCG, TorchOptimizer]
"""What the command line and the tests know; one of your own is added with `SOLVERS.append`."""

EXAMPLES = {
    "GradientDescent": "mn.GradientDescent(lr=0.1, steps=5)",
    "Nesterov": "mn.Nesterov(lr=0.1, steps=5)",
    "LBFGS": "mn.LBFGS(steps=20)",
    "NewtonCG": "mn.NewtonCG(steps=5)",
    "TorchOptimizer": "mn.TorchOptimizer(torch.optim.Adam, steps=5, options={'lr': 0.01})",
    "Adam": "mn.TorchOptimizer(torch.optim.Adam, steps=5, options={'lr': 0.01})",
    "SGD": "mn.TorchOptimizer(torch.optim.SGD, steps=5, options={'lr': 0.1})",
}
"""How users write each solver, also those of torch that they may mean."""

__all__ = [
    "EXAMPLES",
    "LBFGS",
    "SOLVERS",
    "GradientDescent",
    "LinearSolver",
    "Nesterov",
    "NewtonCG",
    "Oracle",
    "Solution",
    "Solver",
    "TorchOptimizer",
    "stability_advice",
]
