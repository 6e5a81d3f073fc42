"""The ways to make an FO-B-MAML estimate, as values of cells and rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import metanudge as mn
from metanudge.experiments.base import Cell, Row


@dataclass(frozen=True)
class Variant:
    """One way to make the estimate; `nu` as text, "auto" or "" for the tangent, which has none."""

    nudge: str
    start: str
    stencil: str
    nu: str

    @classmethod
    def default(cls) -> Variant:
        """The library's."""
        estimator = mn.FOBMAML()
        return cls(estimator.nudge, estimator.start, estimator.stencil, f"{estimator.nu:g}" if estimator.nu != "auto" else "auto")

    @classmethod
    def of(cls, cell: Cell | Row) -> Variant:
        """That of a cell or row."""
        return cls(*(str(cell[key]) for key in ("nudge", "start", "stencil", "nu")))

    @property
    def keys(self) -> dict[str, str]:
        """As in cells and rows."""
        return {"nudge": self.nudge, "start": self.start, "stencil": self.stencil, "nu": self.nu}

    @property
    def estimator(self) -> mn.FOBMAML:
        """What it stands for."""
        nu: Any = None if not self.nu else "auto" if self.nu == "auto" else float(self.nu)
        options: dict[str, Any] = {"nudge": self.nudge, "start": self.start, "stencil": self.stencil}
        return mn.FOBMAML(nu=nu, **options)

    def changed(self, dimension: str, value: str) -> Variant:
        """With another value in one dimension; the tangent has no ν.

        Example:
            >>> print(Variant("loss", "theta", "symmetric", "0.1").changed("stencil", "tangent"))
            loss, theta, tangent
        """
        other = replace(self, **{dimension: value})
        return replace(other, nu="") if other.stencil == "tangent" else other

    def __str__(self) -> str:
        nu = f", ν = {self.nu}" if self.nu and self.nu != "auto" else ", ν auto" if self.nu else ""
        return f"{self.nudge}, {self.start}, {self.stencil}{nu}"
