"""Verdicts on who is ahead owe it to the labels: with labels dealt anew they seldom hold.

Over the committed rows. What matches, rather than leads, is no such verdict.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import pytest

from metanudge_lab.experiments import available, load
from metanudge_lab.experiments.base import Experiment, FinishedCell, Result, Statement
from metanudge_lab.experiments.shuffles import passing, shuffled
from metanudge_lab.experiments.spread import below
from metanudge_lab.experiments.store import find
from metanudge_lab.report.short import field
from toy_experiment import toy

RESULTS = Path(__file__).parents[3] / "results"
TIMES, MOST = 200, 0.05
# Who leads is nowhere said here: levels, exponents and bounds, or that one matches another.
NO_LEADERS = {
    "auto-nu", "bias-constants", "bias-rates", "inner-noise", "lambda-effect", "lambda-networks",
    "nu-sensitivity", "omniglot", "omniglot-long", "outer-rates", "transformer",
}  # fmt: skip


@pytest.mark.parametrize("name", available())
def test_statements_about_methods_seldom_hold_for_shuffled_labels(name: str) -> None:
    experiment = load(name)
    results = find(experiment, RESULTS)
    says_nothing = experiment.compare is Experiment.compare
    assert says_nothing == (name in NO_LEADERS)
    if not results or not experiment.enough(results[0]) or not experiment.compare(results[0]):
        pytest.skip("nothing is compared, or too little is measured")
    named = [one for one in experiment.judge(results[0]).parts if one.name]
    assert {one.name for one in experiment.compare(results[0])} <= {one.name for one in named}
    shares = passing(experiment, results[0], TIMES)
    assert max(shares.values()) <= MOST, shares


@pytest.mark.parametrize("kind", ["test", "more steps"])
def test_as_many_are_seldom_behind_for_shuffled_labels(kind: str) -> None:
    """What the first screen of the page recommends."""
    result = find(load("omniglot"), RESULTS)[0]
    alike = dataclasses.replace(load("omniglot"), unit=("setting", "seed"))
    behind = len(field(result, kind)[1])
    assert behind
    often = sum(len(field(shuffled(alike, result, k), kind)[1]) >= behind for k in range(TIMES))
    assert often <= MOST * TIMES


def test_labels_may_be_of_several_keys() -> None:
    """All of a label's keys go together, also where others have other keys."""
    cells = [{"nudge": "a", "nu": "1"}, {"nudge": "b", "nu": "2"}, {"method": "MAML"}]
    measured = [
        FinishedCell({**cell, "seed": 0}, [{"x": x}], 0.0, 0) for x, cell in enumerate(cells)
    ]
    whole = toy(labels=("nudge", "nu", "method"))
    found = [shuffled(whole, Result("toy", "full", None, measured), k) for k in range(40)]
    dealt = {tuple(sorted(one.rows(x=0)[0].items())) for one in found}
    assert dealt == {tuple(sorted({**cell, "seed": 0, "x": 0}.items())) for cell in cells}


def _result(values: dict[str, list[float]]) -> Result:
    cells = [
        FinishedCell({"method": method, "seed": seed}, [{"error": value}], 0.0, 0)
        for method, found in values.items()
        for seed, value in enumerate(found)
    ]
    return Result("toy", "full", None, cells)


def _ahead(result: Result) -> list[Statement]:
    a, b = ([result.values("error", method=name, seed=k)[0] for k in range(6)] for name in "AB")
    return [Statement(below(a, b), "A is ahead", "A is not", "ahead")]


def test_a_check_that_cannot_fail_is_found_out() -> None:
    result = _result({name: [1.0 + seed for seed in range(6)] for name in "ABCD"})
    always = toy(compare=lambda result: [Statement(True, "all is well", "", "always")])
    assert passing(always, result, 20) == {"always": 1.0}
    lead = _result({name: [k + 0.1 * s for s in range(6)] for k, name in enumerate("ABCD", 1)})
    assert _ahead(lead)[0].holds
    assert passing(toy(compare=_ahead), lead, 100)["ahead"] <= MOST


def test_labels_are_dealt_within_units_among_equals() -> None:
    result = _result({"A": [1.0, 2.0], "B": [3.0, 4.0], "C": [5.0]})
    found = [shuffled(toy(), result, seed) for seed in range(40)]
    for one in found:
        assert sorted(one.values("error", seed=0)) == [1.0, 3.0, 5.0]
        assert sorted(one.values("error", seed=1)) == [2.0, 4.0]
    where = Counter(one.rows(error=1.0)[0]["method"] for one in found)
    assert set(where) == {"A", "B", "C"}, "with seed 0 all three have the same cells"
    assert {one.rows(error=2.0)[0]["method"] for one in found} == {"A", "B"}
