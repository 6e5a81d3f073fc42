"""The parts of Figure 2's claim."""

from __future__ import annotations

import statistics
from typing import Any

from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.base import Result, Statement, Verdict
from metanudge_lab.experiments.mnist1d_rows import (
    METHODS,
    at_equal_cost,
    curve,
    curves,
    last_before,
)
from metanudge_lab.experiments.spread import Mean, below, paired

EARLY, LAST = 100, 600  # iterations
EARLY_ACCURACY, FINAL_ACCURACY, FO_MAML_BELOW = 0.85, 0.95, 0.55
COMPETITIVE = 0.01


def judge(result: Result[Any]) -> Verdict:
    """The claim's parts; those about the last of 600 iterations only where there are as many."""
    early, last = last_before(result, EARLY), max(result.config.at)
    means = {method: curve(result, method) for method in METHODS}
    measured = (
        f"FO-B-MAML reaches {_highest(means[m.LOSS], EARLY):.3f} within {early} iterations; after"
        f" {last} it has {means[m.LOSS][last].text(3)}, with the gradient nudge"
        f" {means[m.GRADIENT][last].text(3)}, MAML {means[m.MAML][last].text(3)}, iMAML"
        f" {means[m.IMAML][last].text(3)} ({means[m.DAMPED][last].text(3)} if damped), FO-MAML"
        f" {means[m.FO_MAML][last].text(3)}, Reptile {means[m.REPTILE][last].text(3)}."
    )
    statements = [*_levels(means, early, last), *compare(result)]
    if last < LAST:
        statements.append(Statement(None, f"what holds after {LAST} iterations", name="final"))
    return Verdict.of(statements, measured, f"{explanation(result)} {_equal_cost(result)}")


def _levels(means: dict[str, dict[int, Mean]], early: int, last: int) -> list[Statement]:
    """The numbers that the paper names."""
    reached, other = _highest(means[m.LOSS], EARLY), _highest(means[m.FO_MAML], last)
    final = means[m.LOSS][last]
    found = [
        Statement(
            reached >= EARLY_ACCURACY,
            f"FO-B-MAML is above {EARLY_ACCURACY:g} within {early} iterations",
            f"FO-B-MAML reaches {reached:.3f} within {early} iterations, not {EARLY_ACCURACY:g}",
            "early",
        ),
        Statement(
            other < FO_MAML_BELOW,
            f"FO-MAML stays below {FO_MAML_BELOW:g}",
            f"FO-MAML, tuned on the same grid, does not stay below {FO_MAML_BELOW:g} but reaches"
            f" {other:.3f}",
            "fo-maml",
        ),
    ]
    if last >= LAST:
        words = f"FO-B-MAML ends at {final.text(3)}"
        found.append(
            Statement(
                round(final.mean, 2) >= FINAL_ACCURACY,
                words,
                f"{words}, below {FINAL_ACCURACY:g}",
                "final",
            )
        )
    return found


def compare(result: Result[Any]) -> list[Statement]:
    """How close the curves are to MAML's, and where the last accuracies lie; paired by seed."""
    maml = curves(result, m.MAML)
    apart = {name: _apart(curves(result, name), maml) for name in (m.LOSS, m.FO_MAML, m.REPTILE)}
    ours = curves(result, m.LOSS)
    above = statistics.fmean(one[k] - maml[s][k] for s, one in ours.items() for k in one if k)
    own = statistics.fmean(apart[m.LOSS])
    found = []
    for name in (m.FO_MAML, m.REPTILE):
        words = (
            f"closer to MAML's than {name}'s ({own:.3f} apart, {above:+.3f} on average; {name}'s"
            f" {statistics.fmean(apart[name]):.3f})"
        )
        holds = below(apart[m.LOSS], apart[name])
        text = "its curve is {}" + words
        found.append(Statement(holds, text.format(""), text.format("not clearly "), "tracks"))
    last = max(result.config.at)
    if last >= LAST:
        gain = paired(*([one[s][last] for s in ours] for one in (ours, maml)))
        words = f"by {COMPETITIVE:g} ({gain.mean:+.3f} ± {gain.half:.3f}, paired by seed)"
        found.append(
            Statement(
                gain.mean - gain.half >= -COMPETITIVE,
                f"it does not end below MAML {words}",
                f"it may end below MAML {words}",
                "competitive",
            )
        )
    return found


def _apart(ones: dict[int, dict[int, float]], others: dict[int, dict[int, float]]) -> list[float]:
    """The mean distance of two curves after the start, for every seed."""
    return [
        statistics.fmean(abs(one[k] - others[seed][k]) for k in one if k)
        for seed, one in ones.items()
    ]


def _highest(means: dict[int, Mean], until: int) -> float:
    return max(found.mean for k, found in means.items() if k <= until)


def _equal_cost(result: Result[Any]) -> str:
    budget, found = at_equal_cost(result)
    told = ", ".join(f"{name} {one.text(3)} (iteration {at})" for name, (at, one) in found.items())
    return (
        "All this is at equal meta-iterations, as in the paper. With the gradients that FO-MAML"
        f" spends in all of them, {budget} a task: {told}. Seconds were not recorded."
    )


def explanation(result: Result[Any]) -> str:
    """Where FO-MAML does stay below: which settings of the grid, and what a network that was never
    trained does.
    """
    rows = result.rows(kind="grid")
    below = [row for row in rows if not (row["accuracy"] or 0.0) >= FO_MAML_BELOW]
    untrained = max(rows, key=lambda row: float(row["untrained"]))
    inner = [
        rate
        for rate in result.config.inner_rates
        if all(row in below for row in rows if row["inner"] == rate)
    ]
    where = (
        f", among them all with an inner rate of {', '.join(f'{rate:g}' for rate in inner)}"
        if inner
        else ""
    )
    best = max(rows, key=lambda row: float(row["accuracy"] or 0.0))
    return (
        f"Over the whole grid FO-MAML ends below {FO_MAML_BELOW:g} after"
        f" {result.config.grid_iterations} iterations in {len(below)} of {len(rows)}"
        f" settings{where}; its best is {best['accuracy']:.3f} (inner rate {best['inner']:g},"
        f" meta-rate {best['rate']:g}), and weights that were never trained adapt to"
        f" {untrained['untrained']:.3f} with an inner rate of {untrained['inner']:g}."
    )
