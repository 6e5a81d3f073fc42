"""The proximal term R(φ; θ) that ties a task to the meta-parameters: ½‖φ − θ‖²_λ, λ fixed or
learned, or what the user gives instead.

Whoever solves or differentiates the inner problem asks a `Proximal` for forces and derivatives and
does not look inside.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from metanudge.proximal.base import Absent, Proximal
from metanudge.proximal.diagonal import Diagonal
from metanudge.proximal.learned import Learned, LogStiffness, Per
from metanudge.proximal.operator import Matrix
from metanudge.proximal.regulariser import Custom
from metanudge.proximal.stiffness import Regulariser, Stiffness, stiffness_per_parameter


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
    if regulariser is not None:
        return Custom(regulariser, parameters)
    if isinstance(lam, LogStiffness):
        return Learned(lam, parameters)
    if isinstance(lam, Tensor | Mapping) or not callable(lam):
        return Diagonal(stiffness_per_parameter(lam, parameters, zero=zero))
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
