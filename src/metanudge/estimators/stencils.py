"""Finite-difference stencils: dφ/dν at 0 ≈ Σ_j c_j φ(ν_j) / ν."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

StencilName = Literal["symmetric", "forward", "five-point", "tangent"]
StartName = Literal["theta", "shifted", "solution"]


@dataclass(frozen=True)
class Stencil:
    """Offsets in units of ν and their coefficients.

    Attributes:
        offsets: multiples of ν at which the nudged problem is solved (without 0).
        coefficients: their weights.
        base: weight of the un-nudged solution.
        order: the truncation error is O(ν^order).
    """

    offsets: tuple[float, ...]
    coefficients: tuple[float, ...]
    base: float
    order: int


STENCILS: dict[str, Stencil] = {
    "forward": Stencil((1.0,), (1.0,), -1.0, 1),  # paper, eq. 12
    "symmetric": Stencil((1.0, -1.0), (0.5, -0.5), 0.0, 2),  # paper, eq. 13
    "five-point": Stencil((1.0, -1.0, 2.0, -2.0), (8 / 12, -8 / 12, -1 / 12, 1 / 12), 0.0, 4),
}
