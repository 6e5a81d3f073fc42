"""What the in-place engine refuses where a model is spread over ranks, before it goes wrong
silently.
"""

from __future__ import annotations

import torch

from metanudge.problem import Problem
from metanudge.solvers import LBFGS, TorchOptimizer
from metanudge.solvers.base import Solver

ENTRY_BY_ENTRY = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
)


def check_solver(solver: Solver) -> None:
    """Raise for solvers that look at whole tensors, of which each rank has a part only."""
    name = type(solver).__name__
    if isinstance(solver, TorchOptimizer):
        optimizer = type(solver.build([torch.zeros(1, 1)]))
        if optimizer in ENTRY_BY_ENTRY:
            return
        name = f"TorchOptimizer with {optimizer.__name__}"
    elif not isinstance(solver, LBFGS):
        return
    known = ", ".join(kind.__name__ for kind in ENTRY_BY_ENTRY)
    raise TypeError(
        f"The parameters are spread over several ranks, and {name} looks at whole tensors, of which"
        f" each rank has a part. Use GradientDescent or Nesterov, or TorchOptimizer with one of"
        f" {known}."
    )


def refuse_products(problem: Problem) -> None:
    """Raise where autograd would take parameters for constants: FSDP computes with copies."""
    if problem.spread is not None:
        raise TypeError(
            "The parameters are spread over several ranks, and passes gather copies of them, so"
            " there are no Hessian products by autograd. Use"
            ' MAML(products="difference") or FOBMAML(), and GradientDescent as solver.'
        )
