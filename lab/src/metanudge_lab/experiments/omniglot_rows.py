"""What the rows of runs on Omniglot say, beside what is published."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.base import Result
from metanudge_lab.experiments.equal_cost import passes, within
from metanudge_lab.experiments.omniglot_runs import (
    ESTIMATORS,
    FIVE_WAY,
    LONG_METHODS,
    TWENTY_WAY,
    watched,
)
from metanudge_lab.experiments.spread import Mean, paired

# In percent, as in the paper's Table 2; 20-way as in Table 2 of Rajeswaran et al. 2019, from which
# the paper takes most of its rows.
_PUBLISHED = {
    m.LOSS: ((99.24, 0.29), (99.70, 0.17)),
    m.MAML: ((98.7, 0.4), (99.9, 0.1), (95.8, 0.3), (98.9, 0.2)),
    m.FO_MAML: ((98.3, 0.5), (99.2, 0.2), (89.4, 0.5), (97.9, 0.1)),
    m.REPTILE: ((97.68, 0.04), (99.48, 0.06), (89.43, 0.14), (97.12, 0.32)),
    m.IMAML: ((99.16, 0.35), (99.67, 0.12), (94.46, 0.42), (98.69, 0.1)),
}
PUBLISHED: dict[str, dict[str, tuple[float, float]]] = {
    method: dict(zip((*FIVE_WAY, *TWENTY_WAY), numbers, strict=False))
    for method, numbers in _PUBLISHED.items()
}


def at_end(setting: str, method: str, iterations: int, kind: str = "test") -> dict[str, Any]:
    """Which rows were measured at the end of runs."""
    where = {"setting": setting, "method": method, "iterations": iterations}
    return {"kind": kind, "iteration": iterations, **where}


def final(
    result: Result[Any], setting: str, method: str, iterations: int, kind: str = "test"
) -> Mean | None:
    """Accuracy at the end in percent: mean over the seeds with its interval. A single run has
    none, and says so; so do runs that ended at chance.
    """
    rows = result.rows(**at_end(setting, method, iterations, kind))
    if not rows:
        return None
    chance = 100 / int(setting.partition("-")[0])
    values = [chance if row["accuracy"] is None else 100 * row["accuracy"] for row in rows]
    lost = sum(value < 1.5 * chance for value in values)
    notes = ["one run"] if len(values) == 1 else []
    notes += [f"{'it' if notes else lost} ended at chance"] if lost else []
    found = Mean.of(values)
    return Mean(found.mean, found.ci95, f" ({', '.join(notes)})" if notes else "")


def spent(result: Result[Any], setting: str, method: str) -> tuple[int, float] | None:
    """Where a method of the comparison is with the gradients that FO-MAML spends in all its
    meta-steps: the meta-step, and the accuracy there in percent.
    """
    length = result.config.iterations
    where = {"kind": "test", "setting": setting, "method": method, "iterations": length}
    found = result.along("accuracy", "iteration", watched(length), **where)
    curve = {k: (k, 100 * sum(values) / len(values)) for k, values in found.items()}
    budget = passes(ESTIMATORS[m.FO_MAML], m.STEPS) * length
    return within(curve, passes(ESTIMATORS[method], m.STEPS), budget)


def paired_by_seed(
    result: Result[Any], setting: str, one: str, other: str, iterations: int, kind: str = "test"
) -> Mean:
    """By how many points one method is ahead of another at the end, with the seeds that both have:
    they fix weights and tasks.
    """
    ones, others = (
        {
            row["seed"]: row["accuracy"]
            for row in result.rows(**at_end(setting, method, iterations, kind))
            if row["accuracy"] is not None
        }
        for method in (one, other)
    )
    seeds = [seed for seed in ones if seed in others]
    return paired([100 * ones[seed] for seed in seeds], [100 * others[seed] for seed in seeds])


def lengths(result: Result[Any], setting: str, method: str) -> list[int]:
    """Meta-steps of the runs there are, the shortest first."""
    return sorted(
        {
            int(row["iterations"] or 0)
            for row in result.rows(kind="test", setting=setting, method=method)
        }
    )


def longest(result: Result[Any], setting: str, method: str) -> Mean | None:
    """The result of the longest runs there are."""
    found = [
        final(result, setting, method, length)
        for length in reversed(lengths(result, setting, method))
    ]
    return next((one for one in found if one is not None), None)


def found_at(
    result: Result[Any], setting: str, methods: Iterable[str], iterations: int, kind: str = "test"
) -> dict[str, Mean]:
    """The results of the methods that have been run so long."""
    found = {method: final(result, setting, method, iterations, kind) for method in methods}
    return {method: one for method, one in found.items() if one is not None}


def measured(result: Result[Any]) -> str:
    """What all methods reach, in words."""
    texts = []
    for setting in result.distinct("setting"):
        length = result.config.iterations
        texts.append(f"{setting} after {length} meta-steps: {_each(result, setting, length)}")
        longer = {k for method in LONG_METHODS for k in lengths(result, setting, method)}
        for count in sorted(k for k in longer if k > length):
            more = _each(result, setting, count, LONG_METHODS)
            texts += [f"after {count}: {more}"] if more else []
    return "; ".join(texts) + " (percent)."


def _each(
    result: Result[Any], setting: str, length: int, methods: Iterable[str] = ESTIMATORS
) -> str:
    found = found_at(result, setting, methods, length)
    return ", ".join(f"{method} {one.text(2)}" for method, one in found.items())
