"""What the rows of adapting longer than trained say."""

from __future__ import annotations

import math
from collections.abc import Sequence

from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.base import Result
from metanudge_lab.experiments.equal_cost import passes
from metanudge_lab.experiments.longer_runs import (
    CORE,
    LENGTHS,
    METHODS,
    MOST,
    Config,
    name_of,
    seeds_of,
)
from metanudge_lab.experiments.spread import Mean

CHANCE = {"mnist1d": 1 / 3, "omniglot": 1 / 5}
SHORT, RANDOM = "K = 5", "random K"


def parts_of(result: Result[Config]) -> list[str]:
    """The parts of which all is measured that the verdict needs."""
    needed = {name_of(method, length) for method in CORE for length in LENGTHS}
    found = []
    for part, seeds in seeds_of(result.config).items():
        left = [
            cell for cell in result.missing if cell["part"] == part and cell["trained"] in needed
        ]
        if seeds and not left:
            found.append(part)
    return found


def enough(result: Result[Config]) -> bool:
    """Whether one part suffices for a verdict."""
    return bool(parts_of(result))


def seen(
    result: Result[Config], part: str, trained: str, key: str, steps: int, kind: str = "test"
) -> dict[int, float]:
    """A value by seed; NaN where training diverged or the value is not finite."""
    where = {"part": part, "trained": trained}
    found = {int(row["seed"]): math.nan for row in result.rows(kind="diverged", **where)}
    for row in result.rows(kind=kind, steps=steps, **where):
        value = row.get(key)
        found[int(row["seed"])] = math.nan if value is None else float(value)
    return dict(sorted(found.items()))


def percent(
    result: Result[Config], part: str, trained: str, steps: int, kind: str = "test"
) -> list[float]:
    """Accuracy of every seed; chance where training diverged."""
    found = seen(result, part, trained, "accuracy", steps, kind).values()
    return [100 * (CHANCE[part] if math.isnan(value) else value) for value in found]


def sharpness(result: Result[Config], part: str, trained: str, steps: int) -> list[float]:
    """α(L̂ + λ) after some steps, seed by seed: above 2 a step of gradient descent overshoots in the
    stiffest direction.
    """
    curved = seen(result, part, trained, "curvature", steps)
    rates = seen(result, part, trained, "inner", steps)
    return [rates[seed] * (value + m.LAM) for seed, value in curved.items()]


def ratio(
    result: Result[Config], part: str, trained: str, key: str, steps: tuple[int, int]
) -> list[float]:
    """A value after some steps over that after others, seed by seed."""
    ones, others = (seen(result, part, trained, key, count) for count in steps)
    return [ones[seed] / others[seed] if others[seed] else math.nan for seed in ones]


def gradients(config: Config, trained: str) -> float:
    """That a meta-step takes for each task; with random K on average."""
    method, length = config.trained[trained]
    counts = range(1, MOST + 1) if length == RANDOM else [LENGTHS[length]]
    return sum(passes(METHODS[method], count) for count in counts) / len(counts)


def mean(values: Sequence[float]) -> Mean | None:
    """With its interval; None where there is nothing."""
    return Mean.of(values) if values else None


def ranks_agree(ones: Sequence[float], others: Sequence[float]) -> float:
    """Spearman's rank correlation; what is not finite ranks last.

    Example:
        >>> round(ranks_agree([1.0, 2.0, 3.0], [10.0, 30.0, 20.0]), 9)
        0.5
    """
    places = []
    for values in (ones, others):
        finite = [math.inf if math.isnan(value) else value for value in values]
        below = [sum(x < value for x in finite) for value in finite]
        equal = [sum(x == value for x in finite) for value in finite]
        places.append([a + (b - 1) / 2 for a, b in zip(below, equal, strict=True)])
    middle = (len(ones) - 1) / 2
    centred = [[value - middle for value in place] for place in places]
    product = sum(a * b for a, b in zip(*centred, strict=True))
    sizes = [math.sqrt(sum(value * value for value in place)) for place in centred]
    return product / (sizes[0] * sizes[1]) if all(sizes) else math.nan
