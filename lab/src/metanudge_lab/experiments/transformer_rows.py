"""What the rows of the Transformer say: cosines, losses in the end, and losses at equal cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from metanudge_lab.experiments.base import Result, numbers
from metanudge_lab.experiments.spread import Mean, paired
from metanudge_lab.experiments.transformer_runs import DIFFERENCE, Config


def cosines(
    result: Result[Config], method: str, precision: str, **where: float
) -> list[float] | None:
    """Of all points, inner rates and seeds, or some; −1 where the estimate was not finite. None
    where that precision could not be run.
    """
    rows = result.rows(kind="quality", method=method, precision=precision, **where)
    if any(not row["run"] for row in rows):
        return None
    return [-1.0 if math.isnan(value) else value for value in numbers(rows, "cosine")]


def unreached(result: Result[Config]) -> int:
    """How many points of the training that gradients are compared along were not reached."""
    config = result.config
    wanted = len(config.points) * len(config.inner_rates) * config.seeds
    rows = result.rows(kind="quality", precision="fp32", method=DIFFERENCE)
    return wanted - len(rows)


def seeds_of(result: Result[Config], method: str, inner: float) -> list[int]:
    """Seeds that were trained."""
    rows = [
        *result.rows(kind="curve", method=method, inner=inner),
        *result.rows(kind="diverged", method=method, inner=inner),
    ]
    return sorted({int(row["seed"]) for row in rows})


def curve(
    result: Result[Config], method: str, inner: float, seed: int, axis: str
) -> dict[float, float]:
    """Loss on test tasks along a training, against meta-steps ("iteration"), gradients or
    seconds.
    """
    rows = result.rows(kind="curve", method=method, inner=inner, seed=seed)
    return dict(zip(numbers(rows, axis), numbers(rows, "loss"), strict=True))


def final(result: Result[Config], method: str, inner: float, seed: int) -> float:
    """The loss in the end; NaN where training diverged: a gradient was not finite, or the end is
    worse than a uniform guess.
    """
    found = curve(result, method, inner, seed, "iteration").get(result.config.iterations, math.nan)
    broken = result.rows(kind="diverged", method=method, inner=inner, seed=seed)
    return math.nan if broken or not found <= math.log(result.config.symbols) else found


def finals(result: Result[Config], method: str, inner: float) -> dict[int, float]:
    """By seed."""
    return {seed: final(result, method, inner, seed) for seed in seeds_of(result, method, inner)}


def budget(result: Result[Config], inner: float, axis: str) -> float:
    """What the cheapest training to the end has spent at this inner rate; NaN where there is
    none.
    """
    last = result.rows(kind="curve", inner=inner, iteration=result.config.iterations)
    return min(numbers(last, axis), default=math.nan)


def at_equal_cost(result: Result[Config], method: str, inner: float, axis: str) -> dict[int, float]:
    """Loss of every seed after what the cheapest training spends in all; NaN where it diverged."""
    spend = budget(result, inner, axis)
    found = {}
    for seed, end in finals(result, method, inner).items():
        places = curve(result, method, inner, seed, axis)
        found[seed] = math.nan if math.isnan(end) else between(places, spend)
    return found


def between(places: dict[float, float], at: float) -> float:
    """The value of a curve at a place, linear in the logarithm of the place; NaN before its
    beginning, the last value after its end.

    Example:
        >>> between({1.0: 3.0, 100.0: 2.0}, 10.0), between({1.0: 3.0, 100.0: 2.0}, 200.0)
        (2.5, 2.0)
    """
    ordered = sorted(places.items())
    if not ordered or not at >= ordered[0][0]:
        return math.nan
    for (left, before), (right, after) in pairwise(ordered):
        if left <= at <= right:
            return before + (after - before) * math.log(at / left) / math.log(right / left)
    return ordered[-1][1]


def lag(ours: dict[int, float], theirs: dict[int, float]) -> Mean | None:
    """How much higher our loss is, in pairs of the same seed of which neither diverged; None for
    fewer than two.
    """
    both = [s for s in ours if s in theirs and not math.isnan(ours[s] + theirs[s])]
    if len(both) < 2:
        return None
    return paired([ours[seed] for seed in both], [theirs[seed] for seed in both])


def diverged(losses: dict[int, float]) -> list[int]:
    """The seeds that diverged."""
    return [seed for seed, loss in losses.items() if math.isnan(loss)]


def mean_of(losses: Sequence[float]) -> Mean | None:
    """Of those that did not diverge; None where all did."""
    finite = [loss for loss in losses if not math.isnan(loss)]
    return Mean.of(finite) if finite else None
