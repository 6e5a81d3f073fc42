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


# The 97.5 % quantile of Student's t with 1, 2, 3 … degrees of freedom.
_T = (12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157, 2.228139,
      2.200985, 2.178813, 2.160369, 2.144787, 2.131450, 2.119905, 2.109816, 2.100922, 2.093024, 2.085963,
      2.079614, 2.073873, 2.068658, 2.063899, 2.059539, 2.055529, 2.051831, 2.048407, 2.045230, 2.042272)  # fmt: skip


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t; beyond 30 degrees of freedom by Cornish and Fisher's expansion (to 1e-5).

    Example:
        >>> round(t_quantile(2), 3), round(t_quantile(120), 3)
        (4.303, 1.98)
    """
    if freedom <= len(_T):
        return _T[freedom - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


@dataclass(frozen=True)
class Mean:
    """Mean and the half-width of its 95 % confidence interval (Student's t; NaN for a single number).

    Example:
        >>> Mean.of([1.0, 2.0, 3.0]).mean
        2.0
    """

    mean: float
    ci95: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """Of at least one number; NaN if any of them is."""
        n = len(values)
        mean = math.fsum(values) / n
        return cls(mean, t_quantile(n - 1) * statistics.stdev(values) / math.sqrt(n) if n > 1 else math.nan)


def paired(ones: Sequence[float], others: Sequence[float]) -> Mean:
    """The mean difference of pairs, such as two methods with the same seeds."""
    return Mean.of([one - other for one, other in zip(ones, others, strict=True)])
