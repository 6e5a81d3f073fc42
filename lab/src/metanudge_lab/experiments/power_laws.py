"""Power laws that errors follow: fitted exponents beside those of the theory."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

from metanudge.estimators.stencils import STENCILS
from metanudge.testing.problems import log_slope
from metanudge_lab.experiments.base import Result

TANGENT = "tangent"
ORDERS = {name: stencil.order for name, stencil in STENCILS.items()}
# Where a power law can be seen: below, rounding; above, the next order.
WINDOWS = {"forward": (1e-4, 1e-2), "symmetric": (1e-3, 3e-2), "five-point": (0.01, 0.05)}
TOLERANCE = 0.1


@dataclass(frozen=True)
class Law:
    """A fitted power law: the points it was fitted to, its exponent, and the theory's.

    Attributes:
        x, error: of all points.
        fitted: places of those that the line goes through.
        inside: whether every best ν lies inside the scan (always, where nothing was scanned).
    """

    x: tuple[float, ...]
    error: tuple[float, ...]
    fitted: tuple[int, ...]
    theory: float
    best_nu: tuple[float, ...] = ()
    inside: bool = True

    @property
    def slope(self) -> float:
        """The exponent; NaN with fewer than two points."""
        if len(self.fitted) < 2:
            return math.nan
        return log_slope([self.x[i] for i in self.fitted], [self.error[i] for i in self.fitted])

    @property
    def nu_slope(self) -> float:
        """That of the best ν in δ."""
        return log_slope(self.x, self.best_nu) if len(self.best_nu) > 1 else math.nan

    @property
    def holds(self) -> bool:
        """Whether the exponent is the theory's, within the tolerance."""
        return self.inside and abs(self.slope - self.theory) <= TOLERANCE


NOTHING = Law((), (), (), math.nan)


def law(result: Result[Any], problem: str, nudge: str, stencil: str, varied: str) -> Law | None:
    """What the rows of a cell say; None where there are none."""
    rows = result.rows(problem=problem, nudge=nudge, stencil=stencil, varied=varied)
    if not rows:
        return None
    if varied == "nu":
        x, low, high = tuple(row["nu"] for row in rows), *WINDOWS[stencil]
        fitted = tuple(i for i, nu in enumerate(x) if low <= nu <= high)
        return Law(x, tuple(row["error"] for row in rows), fitted, ORDERS[stencil])
    deltas = sorted({row["delta"] for row in rows})
    groups = [[row for row in rows if row["delta"] == delta] for delta in deltas]
    best = [min(group, key=lambda row: float(row["error"])) for group in groups]
    x, errors = tuple(deltas), tuple(row["error"] for row in best)
    fitted = tuple(range(len(x)))
    if stencil == TANGENT:
        return Law(x, errors, fitted, 1.0)
    scan = result.config.multiples
    inside = all(scan[0] < row["multiple"] < scan[-1] for row in best)
    power = ORDERS[stencil] / (ORDERS[stencil] + 1)
    return Law(x, errors, fitted, power, tuple(row["nu"] for row in best), inside)


def laws(result: Result[Any], varied: str) -> dict[tuple[str, str, str], Law]:
    """All that could be fitted, by problem, nudge and stencil."""
    keys = itertools.product(*(result.distinct(key) for key in ("problem", "nudge", "stencil")))
    found = {(p, n, s): law(result, p, n, s, varied) for p, n, s in keys}
    return {key: one for key, one in found.items() if one is not None}


def fraction(value: float) -> str:
    """An order as the paper writes it.

    Example:
        >>> fraction(2 / 3), fraction(4.0)
        ('2/3', '4')
    """
    known = {1 / 2: "1/2", 1 / 3: "1/3", 1 / 5: "1/5", 2 / 3: "2/3", 4 / 5: "4/5"}
    return known.get(value, f"{value:g}")
