"""The ways to make an FO-B-MAML estimate, as values of cells and rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import metanudge as mn
from metanudge.experiments.base import Cell, Result, Row
from metanudge.experiments.spread import Mean, Spread

POINTS = ("untrained", "trained")
DATA = {"mnist1d": "MNIST-1D", "omniglot": "Omniglot"}
Options = Mapping[str, Sequence[str]]  # for each of nudge, start, stencil, nu


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


def all_variants(options: Options) -> list[Variant]:
    """Every nudge, start, stencil and ν."""
    made = (Variant(*chosen) for chosen in itertools.product(*options.values()))
    return list(dict.fromkeys(variant.changed("stencil", variant.stencil) for variant in made))


def trained_variants(options: Options) -> list[Variant]:
    """The default of either nudge, each with one choice changed, and the gradient nudge from the shifted start with every ν.

    That start and ν act together: the start is ν∇f/λ away from θ.
    """
    found = []
    for nudge in options["nudge"]:
        base = Variant.default().changed("nudge", nudge)
        found += [base, *(base.changed(key, value) for key in ("start", "stencil", "nu") for value in options[key])]
    if "gradient" in options["nudge"] and "shifted" in options["start"]:
        shifted = Variant.default().changed("nudge", "gradient").changed("start", "shifted")
        found += [shifted.changed("nu", nu) for nu in options["nu"]]
    return list(dict.fromkeys(found))


def accuracy(result: Result[Any], part: str, variant: Variant) -> Mean | None:
    """Mean over the seeds with its interval, that over the tasks where there is one seed."""
    found = result.values("accuracy", part=part, **variant.keys)
    if len(found) == 1:
        return Mean(found[0], result.values("ci95", part=part, **variant.keys)[0])
    return Mean.of(found) if found else None


def cosine(result: Result[Any], key: str, point: str, steps: int, variant: Variant) -> float:
    """Median over the seeds of the cosine with a target."""
    found = result.values(f"cosine_{key}", part="error", point=point, steps=steps, **variant.keys)
    return Spread.of(found).median if found else math.nan
