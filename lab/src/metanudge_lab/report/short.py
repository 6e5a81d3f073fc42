"""The first screen: what holds, what does not, and what to use, in about ten lines, from verdicts
and rows alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.base import Result
from metanudge_lab.experiments.equal_cost import passes
from metanudge_lab.experiments.omniglot_rows import found_at, paired_by_seed
from metanudge_lab.experiments.omniglot_runs import ESTIMATORS, FIVE_WAY, MORE_STEPS
from metanudge_lab.experiments.spread import Mean
from metanudge_lab.report.entries import Answer, Entry, answers

_MOST = 4  # claims in a list


@dataclass(frozen=True)
class Line:
    """One line: what it is about, its text, and an experiment to look at."""

    head: str
    text: str
    link: str = ""


def in_short(entries: list[Entry]) -> list[Line]:
    """The lines, those without anything to say left out."""
    asked = answers(entries)
    lines = [_listed("Holds", asked, "reproduced")]
    lines += _claims("Does not hold", asked, "not")
    lines += [_listed("Holds in part", asked, "partly"), _open(asked)]
    lines += _use(entries)
    return [line for line in lines if line.text]


def _listed(head: str, asked: list[Answer], state: str) -> Line:
    """How many claims, and where they stand in the paper."""
    found = [answer.claim.where for answer in asked if answer.state == state]
    places = "; ".join(dict.fromkeys(found))
    return Line(head, f"{len(found)} of {len(asked)} claims: {places}." if found else "")


def _claims(head: str, asked: list[Answer], state: str) -> list[Line]:
    """The first few in full, of as many experiments as there are."""
    found = [answer for answer in asked if answer.state == state]
    by = [answer.claim.experiments[0] for answer in found]
    again = [name in by[:place] for place, name in enumerate(by)]
    found = [one for _, one in sorted(zip(again, found, strict=True), key=lambda pair: pair[0])]
    lines = [
        Line(head, f"{answer.claim.where}: {answer.claim.says}", answer.claim.experiments[0])
        for answer in found[:_MOST]
    ]
    rest = "; ".join(answer.claim.where for answer in found[_MOST:])
    return [*lines, Line(head, f"Nor do {len(found) - _MOST} more: {rest}." if rest else "")]


def _open(asked: list[Answer]) -> Line:
    waiting = sum(answer.state == "unfinished" for answer in asked)
    untestable = sum(answer.state == "untestable" for answer in asked)
    parts = [f"{waiting} not measured yet"] if waiting else []
    parts += [f"{untestable} not testable"] if untestable else []
    return Line("Open", ", ".join(parts) + "." if parts else "")


def _use(entries: list[Entry]) -> list[Line]:
    """What reaches most on Omniglot, 5-way 1-shot, and what that costs."""
    result = next((e.result for e in entries if e.name == "omniglot" and e.result), None)
    return [] if result is None else [best(result, "test"), best(result, "more steps")]


def best(result: Result[object], kind: str) -> Line:
    """The best method, those that it does not lead seed by seed, and the cheapest of them."""
    found, behind = field(result, kind)
    if not found:
        return Line("Use", "")
    best, *others = (method for method in found if method not in behind)
    cost = {method: passes(ESTIMATORS[method], m.STEPS) for method in (best, *others)}
    cheapest = min(cost, key=lambda method: cost[method])
    steps = f"{m.STEPS} steps, as in training" if kind == "test" else f"{MORE_STEPS} steps"
    text = f"Omniglot {FIVE_WAY[0]}, adapting with {steps}: {best}, {found[best].text(2)} %"
    if others:
        text += f"; not told apart from it: {', '.join(others)}"
    if behind:
        more = f" and {len(behind) - 1} others" if len(behind) > 1 else ""
        text += f"; behind it: {behind[0]} {found[behind[0]].text(2)} %{more}"
    if others:
        text += f". {cheapest} spends least: {cost[cheapest]:g} gradients a task"
    return Line("Use", f"{text}.", "omniglot")


def field(result: Result[object], kind: str) -> tuple[dict[str, Mean], list[str]]:
    """The methods that were run with several seeds (with one, where none has more), the best first,
    and those that it leads seed by seed with the whole interval.
    """
    setting, length = FIVE_WAY[0], getattr(result.config, "iterations", 0)
    found = found_at(result, setting, ESTIMATORS, length, kind)
    several = {method: one for method, one in found.items() if not math.isnan(one.ci95)} or found
    order = sorted(several, key=lambda method: -several[method].mean)
    ahead = {one: paired_by_seed(result, setting, order[0], one, length, kind) for one in order}
    behind = [one for one in order[1:] if ahead[one].mean - ahead[one].ci95 > 0]
    return {method: several[method] for method in order}, behind
