"""Whether the accuracies on Omniglot are those that are published, and what would bring more."""

from __future__ import annotations

import itertools
import math
from typing import Any

from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.base import Result, Statement, Verdict
from metanudge_lab.experiments.omniglot_rows import (
    PUBLISHED,
    final,
    found_at,
    lengths,
    longest,
    measured,
    paired_by_seed,
    spent,
)
from metanudge_lab.experiments.omniglot_runs import ESTIMATORS, LONG_METHODS, MORE_STEPS
from metanudge_lab.experiments.spread import Mean

MARGIN = 0.1  # points: what is not more behind than that matches


def judge(result: Result[Any]) -> Verdict:
    """The claim's parts: the published accuracy, iMAML's (published and our own), and more with
    longer training.
    """
    statements = [
        one for setting in result.config.settings for one in _levels(result, setting)
    ] + _beside_imaml(result)
    statements.append(
        Statement(None, f"iMAML trained with {MORE_STEPS} inner steps, as published", name="fewer")
    )
    return Verdict.of(statements, measured(result), explanation(result))


def _levels(result: Result[Any], setting: str) -> list[Statement]:
    """The published accuracies, and whether longer training helps."""
    ours = longest(result, setting, m.LOSS)
    assert ours is not None
    found = [_reached(setting, ours, m.LOSS), _reached(setting, ours, m.IMAML, " for iMAML")]
    same = final(result, setting, m.LOSS, result.config.iterations)
    if result.config.long and same is not None:
        words = f"{setting}: longer training {{}} ({same.text(2)}, then {ours.text(2)} %)"
        holds = ours.mean > same.mean + same.half
        found.append(Statement(holds, words.format("helps"), words.format("does not help"), "long"))
    return found


def _reached(setting: str, ours: Mean, method: str, whose: str = "") -> Statement:
    mean, ci = PUBLISHED[method][setting]
    words = f"{setting}: {ours.text(2)} %, where {mean:g} ± {ci:g} is published{whose}"
    name = "imaml" if whose else "accuracy"
    return Statement(ours.mean + ours.half >= mean - ci, words, words, name)


def _beside_imaml(result: Result[Any]) -> list[Statement]:
    """FO-B-MAML beside the best of our own runs of iMAML with as many meta-steps and seeds.

    That it matches is no statement about who is ahead: between methods this close it would hold
    for others too.
    """
    last, found = result.config.iterations, []
    for setting in result.config.settings:
        rivals = found_at(result, setting, (m.IMAML, m.DAMPED), last)
        ours = final(result, setting, m.LOSS, last)
        if rivals and ours is not None:
            best = max(rivals, key=lambda method: rivals[method].mean)
            behind = paired_by_seed(result, setting, best, m.LOSS, last)
            words = (
                f"{setting}: {{}} our iMAML with as many meta-steps ({ours.text(2)} against"
                f" {rivals[best].text(2)} %, {behind.text(2)} points behind, paired by seed)"
            )
            holds = behind.mean + behind.half <= MARGIN
            ahead = behind.mean + behind.half < 0
            found.append(
                Statement(
                    holds,
                    words.format("ahead of" if ahead else "as good as"),
                    words.format("behind"),
                    "own imaml",
                )
            )
    return found


def explanation(result: Result[Any]) -> str:
    """What would bring more: the last half of the meta-steps, longer runs, more steps of
    adaptation.
    """
    texts = []
    for setting in result.config.settings:
        last = result.config.iterations
        methods = (*result.config.methods, *result.config.second_order, *result.config.once)
        gains = [_gain(result, setting, method, last) for method in methods]
        known = [gain for gain in gains if gain == gain]
        if known:
            texts.append(
                f"{setting}: between {last // 2} and {last} meta-steps all methods gained"
                f" {min(known):+.1f} to {max(known):+.1f} points"
            )
        for method in LONG_METHODS:
            for one, two in itertools.pairwise(lengths(result, setting, method)):
                short, long = (final(result, setting, method, count) for count in (one, two))
                if short is not None and long is not None:
                    texts.append(
                        f"{method} gained {long.mean - short.mean:+.2f} from {one} to {two}"
                    )
        more = found_at(result, setting, ESTIMATORS, last, kind="more steps")
        kept = ", ".join(f"{method} {found.mean:.1f}" for method, found in more.items())
        if kept:
            texts.append(
                f"trained with {last} meta-steps and adapting with {MORE_STEPS} steps instead of"
                f" {m.STEPS}: {kept}"
            )
        texts.append(_equal_cost(result, setting))
    data = result.rows(kind="test")[0]["data"]
    small = f" The data are {data}." if data != "Omniglot" else ""
    return (
        f"{'; '.join(texts)}.{small} The published runs of MAML have 60,000 meta-steps. The verdict"
        " is at equal meta-steps; minutes, which the table gives, are of runs that shared a device."
    )


def _equal_cost(result: Result[Any], setting: str) -> str:
    """The comparison with as many gradients instead of as many meta-steps."""
    found = {method: spent(result, setting, method) for method in ESTIMATORS}
    told = ", ".join(
        f"{method} {one[1]:.1f} (meta-step {one[0]})" for method, one in found.items() if one
    )
    return (
        "with the gradients that FO-MAML spends in all its meta-steps, at the last test before"
        f" they are used up and with learning rates still high: {told}"
    )


def _gain(result: Result[Any], setting: str, method: str, last: int) -> float:
    where = {"kind": "test", "setting": setting, "method": method, "iterations": last}
    before, after = (
        result.values("accuracy", iteration=k, **where) for k in (max(1, last // 2), last)
    )
    return (
        100 * (sum(after) / len(after) - sum(before) / len(before))
        if before and after
        else math.nan
    )
