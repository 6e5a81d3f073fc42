"""What a verdict owes to which method is which: the same rows, with the methods' labels dealt anew.

A statement that one method is ahead of another means something only where it would seldom hold if
the labels meant nothing.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter, defaultdict
from typing import Any

from metanudge_lab.experiments.base import Cell, Experiment, FinishedCell, Result, label


def shuffled(experiment: Experiment[Any], result: Result[Any], seed: int) -> Result[Any]:
    """The result with the labels of methods dealt anew within each unit (a seed, a size), among the
    methods that have the same cells there.
    """
    dice = random.Random(seed)
    units: dict[str, dict[str, list[FinishedCell]]] = defaultdict(lambda: defaultdict(list))
    known: dict[str, Cell] = {}
    for one in result.measured:
        if own := {key: one.cell[key] for key in experiment.labels if key in one.cell}:
            unit = label({key: one.cell.get(key) for key in experiment.unit})
            units[unit][label(own)].append(one)
            known[label(own)] = own
    dealt: dict[int, Cell] = {}
    for methods in units.values():
        alike: dict[frozenset[str], list[str]] = defaultdict(list)
        for method, cells in methods.items():
            alike[frozenset(label(_rest(one, known[method])) for one in cells)].append(method)
        for group in alike.values():
            for method, other in zip(group, dice.sample(group, len(group)), strict=True):
                dealt |= {
                    id(one): {**_rest(one, known[method]), **known[other]}
                    for one in methods[method]
                }
    measured = [
        dataclasses.replace(one, cell=dealt.get(id(one), one.cell)) for one in result.measured
    ]
    return dataclasses.replace(result, measured=measured)


def passing(experiment: Experiment[Any], result: Result[Any], times: int) -> dict[str, float]:
    """How often the statements of each name all hold with shuffled labels, as a share."""
    held: Counter[str] = Counter()
    names = {one.name for one in experiment.compare(result)}
    for seed in range(times):
        found = experiment.compare(shuffled(experiment, result, seed))
        held.update({n for n in names if all(one.holds for one in found if one.name == n)})
    return {name: held[name] / times for name in sorted(names)}


def _rest(one: FinishedCell, own: Cell) -> Cell:
    return {key: value for key, value in one.cell.items() if key not in own}
