"""What is said of a number measured with several seeds."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

CONVENTION = (
    "± is the 95 % confidence interval of a mean over seeds (Student's t). Methods share the tasks"
    " and initial weights of a seed, so they are compared by paired differences, or by ratios of"
    " errors; who leads, leads with the whole interval, and no such verdict holds for more than 5 %"
    " of 200 shuffles of the methods' labels. A single run has no interval. Lines without a word"
    " about them are medians over the seeds, bands their range."
)


class Spread(NamedTuple):
    """Median, lowest and highest of some numbers; a run that diverged (NaN) counts as infinitely
    bad, which is high.
    """

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
    return (
        f"{value:.2g}" if value == 0 or abs(value) >= 0.01 else f"{value:.1e}".replace("e-0", "e-")
    )


def sentence(*parts: str) -> str:
    """Parts of a sentence as one; names in them keep their capitals.

    Example:
        >>> sentence("the error of FO-MAML falls", "that of Reptile does not")
        'The error of FO-MAML falls; that of Reptile does not.'
    """
    text = "; ".join(parts)
    return f"{text[:1].upper()}{text[1:]}."


@functools.cache
def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, by bisection of its distribution function.

    Example:
        >>> round(t_quantile(2), 3), round(t_quantile(120), 3)
        (4.303, 1.98)
    """
    low, high = 1.9, 12.8  # those of infinitely many degrees of freedom and of one lie between
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_within(middle, freedom) < 0.95 else (low, middle)
    return (low + high) / 2


def _t_within(t: float, freedom: int) -> float:
    """P(|T| < t) as a finite sum (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(freedom))
    odd = freedom % 2
    term, total = math.cos(angle) if odd else 1.0, 0.0
    for k in range(2 + odd, freedom + 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (k - 1) / k
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


@dataclass(frozen=True)
class Mean:
    """Mean and the half-width of its 95 % confidence interval (Student's t; NaN for a single
    number).

    Example:
        >>> Mean.of([1.0, 2.0, 3.0]).mean
        2.0
    """

    mean: float
    ci95: float
    note: str = ""  # what is said after it

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        """Of at least one number; NaN if any of them is."""
        n = len(values)
        mean = math.fsum(values) / n
        return cls(
            mean, t_quantile(n - 1) * statistics.stdev(values) / math.sqrt(n) if n > 1 else math.nan
        )

    @property
    def half(self) -> float:
        """The half-width, 0 where there is none."""
        return 0.0 if math.isnan(self.ci95) else self.ci95

    @property
    def spread(self) -> Spread:
        """Its interval as one to draw."""
        return Spread(self.mean, self.mean - self.half, self.mean + self.half)

    def text(self, digits: int) -> str:
        """Such as "97.53 ± 0.12"; without an interval where there is none.

        Example:
            >>> Mean(0.9753, 0.0123).text(2), Mean(0.9753, math.nan).text(2)
            ('0.98 ± 0.01', '0.98')
        """
        return f"{self.mean:.{digits}f}" + (
            ("" if math.isnan(self.ci95) else f" ± {self.ci95:.{digits}f}") + self.note
        )


def paired(ones: Sequence[float], others: Sequence[float]) -> Mean:
    """The mean difference of pairs, such as two methods with the same seeds."""
    return Mean.of([one - other for one, other in zip(ones, others, strict=True)])


def below(ones: Sequence[float], others: Sequence[float], factor: float = 1.0) -> bool:
    """Whether some errors are below others, or a multiple of them, beyond what the seeds leave
    open: the 95 % interval of the mean logarithm of the paired ratios lies below that of the
    factor. What diverged is below nothing.

    Example:
        >>> below([1.0, 1.1, 0.9], [2.0, 2.3, 1.9]), below([1.0, 1.1, 0.9], [1.1, 1.0, 1.0])
        (True, False)
    """
    if not all(math.isfinite(one) for one in (*ones, *others)):
        return False
    logs = [[math.log(max(value, 1e-300)) for value in values] for values in (ones, others)]
    apart = paired(*logs)
    return apart.mean + apart.half < math.log(factor)
