"""Which ν on a ladder: what the disagreement of estimates at neighbouring ν says (see
`metanudge.tuning`, which makes them).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from metanudge.params import Params, joined, wide
from metanudge.problem import TwoLevels
from metanudge.spread import local

LADDER = tuple(0.5 * 10 ** (-rung / 2) for rung in range(7))
"""The ν that are tried: 0.5, 0.16, 0.05, …, 0.0005. With the loss nudge, f̂ − νf is no longer
bounded below for ν much larger.
"""

_HOPELESS = 10.0
_STEADY = 2
_WORTHWHILE = 0.5
# Measured errors are 0.4 to 2 times r: linear models, perceptrons, convolutions and Transformers,
# float32 and float64.
_ROUNDINGS = 4.0


def within(nu: float, longest: float, nus: Sequence[float]) -> float:
    """ν, or where it is larger than `longest` the next smaller one that lies between two of the
    ladder; its last one at least.

    A shifted start further from θ than the solution is where the model is no longer the one that
    was trained.

    Example:
        >>> (within(0.3, 0.5, [1.0, 0.25, 0.0625]), within(0.3, 0.2, [1.0, 0.25, 0.0625]),
        ...     within(0.3, 0.01, [1.0, 0.25, 0.0625]))
        (0.3, 0.125, 0.0625)
    """
    if nu <= longest or math.isnan(longest):
        return nu
    between = [math.sqrt(larger * smaller) for larger, smaller in pairwise(nus)]
    return max((mean for mean in between if mean <= min(nu, longest)), default=nus[-1])


def best_nu(
    nus: Sequence[float],
    disagreement: Sequence[float],
    *,
    order: int,
    rounding: Sequence[float] | None = None,
) -> tuple[float | None, float]:
    """ν from the disagreements of neighbours on a ladder, and the error there; None where nothing
    agrees.

    It lies between two neighbours that agree; where these are the last two, the disagreement still
    falls, and it is the last. Smaller ν are taken only where they at least halve the disagreement:
    where all is noise, its size grows with 1/ν and its disagreement stays.

    Example:
        >>> # smooth: the smaller the better
        >>> best_nu([1.0, 0.1, 0.01, 0.001], [0.5, 0.005, 0.00005], order=2)
        (0.001, 5e-05)
        >>> best_nu([1.0, 0.25, 0.0625, 0.015625], [3.0, 0.2, 0.6], order=2)  # kinks
        (0.125, 0.2)
        >>> best_nu([1.0, 0.25, 0.0625, 0.015625], [2.1, 2.5, 1.9], order=2)  # nothing but noise
        (0.5, 2.1)
        >>> # 4e-15 is chance
        >>> best_nu([1.0, 0.25, 0.0625, 0.015625], [1e-9, 9e-15, 4e-15], order=4,
        ...     rounding=[3e-16, 1e-15, 5e-15])
        (0.125, 9e-15)
    """
    rounding = [0.0] * len(disagreement) if rounding is None else rounding
    seen = [
        expected if found < _ROUNDINGS * expected else found
        for found, expected in zip(disagreement, rounding, strict=True)
    ]
    errors = credible(nus, seen, order=order)
    place = 0
    for candidate, error in enumerate(errors):
        if error < _WORTHWHILE * errors[place]:
            place = candidate
    if not errors[place] < _HOPELESS:
        return None, math.inf
    nu = nus[-1] if place == len(errors) - 1 else math.sqrt(nus[place] * nus[place + 1])
    return nu, max(errors[place], disagreement[place])


def credible(nus: Sequence[float], disagreement: Sequence[float], *, order: int) -> list[float]:
    """The disagreements as errors: a disagreement that has risen towards smaller ν is noise, and
    does not go away with smaller ν still.

    On a few tasks it may seem to, where none of them happens to meet a kink. Believable is a steady
    fall, at two neighbours in a row and not much faster than the stencil's order allows; then what
    had risen before was not noise, but ν too large for the stencil.

    Example:
        >>> credible([1.0, 0.1, 0.01, 0.001, 0.0001], [0.2, 0.4, 0.9, 1e-6], order=2)
        [0.2, 0.4, 0.9, 0.9]
        >>> credible([1.0, 0.1, 0.01, 0.001, 0.0001], [0.2, 0.4, 0.02, 0.0002], order=2)
        [0.2, 0.4, 0.4, 0.0002]
    """
    errors = [disagreement[0]]
    noise, falls = 0.0, 0
    for place, (before, now) in enumerate(pairwise(disagreement), start=1):
        if before < min(now, 1.0):
            noise = max(noise, now)
        fastest = (nus[place + 1] / nus[place]) ** order / 5
        falls = falls + 1 if fastest * before <= now <= 0.7 * before else 0
        errors.append(now if falls >= _STEADY else max(now, noise))
    return errors


def average(a: float, b: float) -> float:
    """Root mean square: errors average as their squares. What is hopeless is not made worse by
    being infinite.
    """
    return math.hypot(min(a, _HOPELESS), min(b, _HOPELESS)) / math.sqrt(2)


class Motion:
    """dφ/dν at one ν, as it is summed up (or the meta-gradient at one ε, whole), and the rounding
    error to expect in it, where that is known.
    """

    def __init__(self, problem: TwoLevels, whole: Params | None = None) -> None:
        own = problem.parameters
        self.sum = (
            {n: torch.zeros_like(local(p), dtype=wide(p.dtype)) for n, p in own.items()}
            if whole is None
            else whole
        )
        zero = torch.zeros((), dtype=torch.float64, device=problem.device)
        self._roundings = dict.fromkeys(self.sum, zero)

    @torch.no_grad()
    def add(self, d: Params, weights: Sequence[float]) -> None:
        """Displacements nudge by nudge, with a weight each."""
        for name, leaf in self.sum.items():
            nudged = d[name].unflatten(0, (len(weights), -1))
            for rows, weight in zip(nudged, weights, strict=True):
                if weight:
                    leaf.add_(rows[0] if len(rows) == 1 else rows.sum(0), alpha=weight)
                    size = torch.linalg.vector_norm(rows, dtype=torch.float64)
                    lost = size * (abs(weight) * torch.finfo(rows.dtype).eps)
                    self._roundings[name] = torch.hypot(self._roundings[name], lost)

    @property
    def rounding(self) -> Tensor:
        """Independent errors add as their squares."""
        return joined(self._roundings)


class Disagreement:
    """Compares each motion with the one before; keeps one of them.

    Args:
        limit: what the motions tend to as ν grows, where that is not zero: it is what they differ
            by from there that must agree.
    """

    def __init__(self, limit: Params | None = None) -> None:
        self._limit = limit
        self._before: tuple[Params, Tensor, Tensor, Tensor] | None = None
        self._found: list[Tensor] = []

    def see(self, motion: Motion) -> None:
        """Hear of the motion at the next ν."""
        size, rounding = _size(motion.sum.items()), motion.rounding
        own = size if self._limit is None else self._beyond(self._limit, motion.sum, size)
        if self._before is not None:
            before, size_before, own_before, rounding_before = self._before
            apart = _size((n, leaf - before[n]) for n, leaf in motion.sum.items())
            errors = torch.stack([apart, torch.hypot(rounding, rounding_before)])
            least = torch.minimum(own, own_before)
            share = least / torch.minimum(size, size_before)
            self._found.append(torch.cat([errors / least, share[None]]))
        self._before = motion.sum, size, own, rounding

    def read(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The disagreements, and those to be expected from rounding alone; relative to the whole
        motion where they are least.
        """
        found = torch.stack(self._found).nan_to_num(nan=math.inf, posinf=math.inf)
        apart, rounding, shares = found.T.tolist()
        share = min(shares[apart.index(min(apart))], 1.0)
        return tuple(a * share for a in apart), tuple(r * share for r in rounding)

    @staticmethod
    def _beyond(limit: Params, motion: Params, size: Tensor) -> Tensor:
        """How far the motion is from the limit, at least its own rounding: less is none."""
        least = max(torch.finfo(leaf.dtype).eps for leaf in motion.values())
        apart = _size((n, leaf - limit[n]) for n, leaf in motion.items())
        return torch.maximum(apart, size * least)


def _size(leaves: Iterable[tuple[str, Tensor]]) -> Tensor:
    return joined({n: torch.linalg.vector_norm(leaf, dtype=torch.float64) for n, leaf in leaves})
