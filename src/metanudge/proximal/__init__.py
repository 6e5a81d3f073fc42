"""The proximal term R(φ; θ) that ties a task to the meta-parameters: ½‖φ − θ‖²_λ, λ fixed or
learned, or what the user gives instead.

Whoever solves or differentiates the inner problem asks a `Proximal` for forces and derivatives and
does not look inside.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from metanudge.proximal.base import Absent, Diagonal, Proximal
from metanudge.proximal.learned import Learned, LogStiffness, Per
from metanudge.proximal.operator import Matrix
from metanudge.proximal.regulariser import Custom
from metanudge.proximal.stiffness import Regulariser, Stiffness, stiffness_per_parameter
from metanudge.spread import is_spread, part_of


def proximal_term(
    lam: Stiffness | LogStiffness,
    parameters: Mapping[str, Tensor],
    regulariser: Regulariser | None = None,
    *,
    zero: bool = False,
) -> Proximal:
    """The proximal term that a stiffness describes, or a regulariser in its place, for the
    parameters that adapt; with `zero` λ may be 0.
    """
    fixed = isinstance(lam, Tensor | Mapping) or not callable(lam)
    elementwise = regulariser is None and (isinstance(lam, LogStiffness) or fixed)
    if not elementwise and any(map(is_spread, parameters.values())):
        what = "lam as an operator" if regulariser is None else "a regulariser"
        raise TypeError(
            f"The parameters are sharded over several ranks, and {what} is a function of whole"
            " tensors. Give lam as a number, as one per parameter name, or as tensors."
        )
    if regulariser is not None:
        return Custom(regulariser, parameters)
    if isinstance(lam, LogStiffness):
        return Learned(lam, parameters)
    if isinstance(lam, Tensor | Mapping) or not callable(lam):
        term = Diagonal(stiffness_per_parameter(lam, parameters, zero=zero))
        term.lam = {n: part_of(value, parameters[n]) for n, value in term.lam.items()}
        return term
    return Matrix(lam, parameters)


__all__ = [
    "Absent",
    "Custom",
    "Diagonal",
    "LogStiffness",
    "Matrix",
    "Per",
    "Proximal",
    "Regulariser",
    "Stiffness",
    "proximal_term",
]
