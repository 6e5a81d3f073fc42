"""Verdicts on who is ahead owe it to the labels: with labels dealt anew they seldom hold.

Over the committed rows. What matches, rather than leads, is no such verdict.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from metanudge_lab.experiments import available, load
from metanudge_lab.experiments.base import FinishedCell, Result, Statement
from metanudge_lab.experiments.shuffles import passing, shuffled
from metanudge_lab.experiments.spread import below
from metanudge_lab.experiments.store import find
from toy_experiment import toy

RESULTS = Path(__file__).parents[3] / "results"
TIMES, MOST = 200, 0.05


@pytest.mark.parametrize("name", available())
def test_statements_about_methods_seldom_hold_for_shuffled_labels(name: str) -> None:
    experiment = load(name)
    results = find(experiment, RESULTS)
    if not results or not experiment.enough(results[0]) or not experiment.compare(results[0]):
        pytest.skip("nothing is compared, or too little is measured")
    named = [one for one in experiment.judge(results[0]).parts if one.name]
    assert {one.name for one in experiment.compare(results[0])} <= {one.name for one in named}
    shares = passing(experiment, results[0], TIMES)
    assert max(shares.values()) <= MOST, shares


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
