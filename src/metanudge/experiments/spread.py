"""What is said of a number measured with several seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Median, lowest and highest of some numbers; a run that diverged (NaN) counts as infinitely bad, which is high."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one number.

        Example:
            >>> Spread.of([3.0, 1.0, math.nan])
            Spread(median=3.0, low=1.0, high=inf)
        """
        finite = [math.inf if math.isnan(value) else value for value in values]
        return cls(statistics.median(finite), min(finite), max(finite))


def short(value: float) -> str:
    """An error or a loss in two significant digits.

    Example:
        >>> short(1.234), short(0.0456), short(0.00123), short(1234.5), short(math.inf)
        ('1.2', '0.046', '1.2e-3', '1200', 'diverged')
    """
    if not math.isfinite(value):
        return "diverged"
    if 100 <= abs(value) < 1_000_000:
        return f"{float(f'{value:.2g}'):.0f}"
    return f"{value:.2g}" if value == 0 or abs(value) >= 0.01 else f"{value:.1e}".replace("e-0", "e-")


def sentence(*parts: str) -> str:
    """Parts of a sentence as one; names in them keep their capitals.

    Example:
        >>> sentence("the error of FO-MAML falls", "that of Reptile does not")
        'The error of FO-MAML falls; that of Reptile does not.'
    """
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}."


@dataclass(frozen=True)
class Mean:
    """Mean and the half-width of its 95 % confidence interval (normal approximation; NaN for a single number).

    Example:
        >>> Mean.of([1.0, 2.0, 3.0]).mean
        2.0
    """

    mean: float
    ci95: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """Of at least one number; NaN if any of them is."""
        mean = math.fsum(values) / len(values)
        return cls(mean, 1.96 * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan)
