"""Whether the accuracies on Omniglot are those that are published, and what would bring more."""

from __future__ import annotations

import itertools
import math
from typing import Any

from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.base import Result, Verdict, status_of
from metanudge_lab.experiments.omniglot_rows import (
    PUBLISHED,
    final,
    found_at,
    lengths,
    longest,
    measured,
    paired_by_seed,
)
from metanudge_lab.experiments.omniglot_runs import ESTIMATORS, LONG_METHODS, MORE_STEPS
from metanudge_lab.experiments.spread import Mean


def judge(result: Result[Any]) -> Verdict:
    """The claim's parts: the published accuracy, iMAML's (published and our own), and more with
    longer training.
    """
    parts = [part for setting in result.config.settings for part in _parts(result, setting)]
    wrong = [part for part in parts if part]
    reason = (
        f"{'; '.join(wrong)}. {explanation(result)}"
        if wrong
        else "The published accuracies are met, iMAML's and that of our own too, and longer"
        " training helps, in all settings."
    )
    return Verdict(status_of(len(wrong), len(parts)), measured(result), reason)


def _parts(result: Result[Any], setting: str) -> list[str]:
    """What is wrong with each part of the claim in a setting; nothing where it holds."""
    ours = longest(result, setting, m.LOSS)
    assert ours is not None
    same = final(result, setting, m.LOSS, result.config.iterations)
    parts = [_missed(setting, ours, m.LOSS), _missed(setting, ours, m.IMAML, " for iMAML")]
    rivals = found_at(result, setting, (m.IMAML, m.DAMPED), result.config.iterations)
    if rivals and same is not None:
        parts.append(_behind(result, setting, same, rivals))
    if result.config.long:
        parts.append(_no_better(setting, same, ours))
    return parts


def _no_better(setting: str, same: Mean | None, longer: Mean) -> str:
    if same is None or longer.mean > same.mean:
        return ""
    return f"{setting}: longer training does not help ({same.text(2)}, then {longer.text(2)} %)"


def _missed(setting: str, ours: Mean, method: str, whose: str = "") -> str:
    mean, ci = PUBLISHED[method][setting]
    if ours.mean + ours.half >= mean - ci:
        return ""
    return f"{setting}: {ours.text(2)} %, where {mean:g} ± {ci:g} is published{whose}"


def _behind(result: Result[Any], setting: str, ours: Mean, rivals: dict[str, Mean]) -> str:
    """Where the best of our own runs of iMAML is ahead, by how much, and with more steps of
    adaptation.
    """
    last, best = result.config.iterations, max(rivals, key=lambda method: rivals[method].mean)
    ahead = paired_by_seed(result, setting, best, m.LOSS, last)
    if not ahead.mean - ahead.half > 0:
        return ""
    text = (
        f"{setting}: below our iMAML with as many meta-steps ({ours.text(2)} against"
        f" {rivals[best].text(2)} %, {ahead.text(2)} points apart, paired by seed)"
    )
    more = found_at(result, setting, (m.LOSS, best), last, kind="more steps")
    both = " against ".join(one.text(2) for one in more.values())
    steps = f"where adaptation takes {MORE_STEPS} steps instead of {m.STEPS}"
    return f"{text}; {steps}, {both} %" if both else text


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
    data = result.rows(kind="test")[0]["data"]
    small = f" The data are {data}." if data != "Omniglot" else ""
    return f"{'; '.join(texts)}.{small} The published runs of MAML have 60,000 meta-steps."


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
