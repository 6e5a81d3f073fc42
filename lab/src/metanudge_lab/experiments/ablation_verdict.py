"""Whether any choice is better than the defaults somewhere and worse nowhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from metanudge_lab.experiments.base import Result, Statement, Verdict, state_of
from metanudge_lab.experiments.network_errors import TARGETS
from metanudge_lab.experiments.variants import (
    AT_EQUAL_COST,
    AT_OWN_RATES,
    DATA,
    OTHERS,
    POINTS,
    Choice,
    Other,
    Variant,
    accuracy,
    compared,
    cosine,
    name_of,
    trained_choices,
    trained_variants,
)

VIEWS = {
    "": "estimator",
    AT_EQUAL_COST: "estimator at equal cost",
    AT_OWN_RATES: "estimator at rates of its own",
}
NOISE = 0.005  # accuracies closer than this are alike, whatever the seeds say


def judge(result: Result[Any]) -> Verdict:
    """For each choice, all else as by default: is there one that is better somewhere and worse
    nowhere?
    """
    default, found = Variant.default(), beaten_by(result)
    parts = tuple(
        Statement(one is None, f"no other {key} is better", f"{key} = {one and one[0]} is", key)
        for key, one in found.items()
    )
    failed = [DATA[part] for part in DATA if fails(result, default, part)]
    words = "the defaults fail on {} data set"
    parts += (
        Statement(not failed, words.format("no"), f"{words.format('a')} ({', '.join(failed)})"),
    )
    other = default.changed("nudge", "gradient" if default.nudge == "loss" else "loss")
    steps = min(result.config.steps)
    quality = ", ".join(
        f"{cosine(result, key, point, steps, default):.2f} ({point}, {TARGETS[key]})"
        for point in POINTS
        for key in TARGETS
    )
    everywhere = [one for view in VIEWS for one in compared(result, view)]
    measured = (
        f"The defaults ({default}) reach {_numbers(result, default)}; with the {other.nudge} nudge"
        f" it is {_numbers(result, other)}. Their cosine at K = {steps} is {quality}."
        f" {'; '.join(_highest(result, *one) for one in everywhere)}."
    )
    kept = [key for key, one in found.items() if one is None]
    held = (
        f"No other choice is better somewhere and worse nowhere: {', '.join(kept) or 'none'}."
        f" {_by_cosine(result, default)}"
    )
    better = "; ".join(f"{key} = {one[0]} ({one[1]})" for key, one in found.items() if one)
    more = f" The table speaks for others: {better}." if better else ""
    return Verdict(state_of(parts) if kept else "not", measured, held + more, parts)


def compare(result: Result[Any]) -> list[Statement]:
    """Whether another choice beats the default."""
    return [
        Statement(one is not None, f"another {key} is better somewhere and worse nowhere", name=key)
        for key, one in beaten_by(result).items()
    ]


def beaten_by(result: Result[Any]) -> dict[str, tuple[str, str] | None]:
    """For each choice, which other one is better than the default somewhere and worse nowhere, and
    where; None where none is.
    """
    default = Variant.default()
    options = result.config.options
    found = {key: _best(result, default, key, values) for key, values in options.items()}
    for view, name in VIEWS.items():
        if compared(result, view):
            found[name] = _best_other(result, default, view)
    return found


def _numbers(result: Result[Any], variant: Variant) -> str:
    found = [(one, accuracy(result, one[0], variant, one[1])) for one in compared(result)]
    return ", ".join(
        f"{mean.mean:.3f} on {name_of(result, *one)}" for one, mean in found if mean is not None
    )


def _by_cosine(result: Result[Any], default: Variant) -> str:
    """What the cosines, averaged over points and targets, would have chosen, one choice at a
    time.
    """
    steps = min(result.config.steps)

    def mean(variant: Variant) -> float:
        found = [cosine(result, key, point, steps, variant) for point in POINTS for key in TARGETS]
        return sum(found) / len(found)

    chosen = []
    for key, values in result.config.options.items():
        best = max((default.changed(key, value) for value in values), key=mean)
        name = best.keys[key] if best.keys[key] else "none"
        chosen.append(f"{key} = {name}" + (f" ({mean(best):.2f})" if best != default else ""))
    return (
        f"By the mean cosine with both targets, {mean(default):.2f} for the defaults, one would"
        f" take {', '.join(chosen)}."
    )


def _highest(result: Result[Any], part: str, key: str) -> str:
    means = {
        choice: accuracy(result, part, choice, key)
        for choice in trained_choices(result.config.options)
    }
    known = {choice: found.mean for choice, found in means.items() if found is not None}
    best = max(known, key=lambda choice: known[choice])
    return f"The highest of all on {name_of(result, part, key)} is {known[best]:.3f} ({best})"


def _best(
    result: Result[Any], default: Variant, key: str, values: Sequence[str]
) -> tuple[str, str] | None:
    """The option that is better than the default by most somewhere, beyond the noise, and worse
    nowhere; and where it is better.

    Where it was not trained with the default's ν, both are taken at the paper's.
    """
    found = []
    for value in values:
        pair = default, default.changed(key, value)
        if pair[1] not in trained_variants(result.config.options):
            same = default.changed("nu", Variant.paper().nu)
            pair = same, same.changed(key, value)
        found += [(gain, value, text) for gain, text in _only_better(result, *pair)]
    return max(found)[1:] if found else None


def _best_other(result: Result[Any], default: Variant, view: str) -> tuple[str, str] | None:
    """The same among estimators that nudge nothing."""
    found = [
        (gain, name, text)
        for name in OTHERS
        for gain, text in _only_better(result, default, Other(name), view)
    ]
    return max(found)[1:] if found else None


def _only_better(
    result: Result[Any], default: Variant, other: Choice, view: str = ""
) -> list[tuple[float, str]]:
    """By how much another choice is better than the default at most, and where: on a data set with
    each number of steps of adaptation; nothing where it is not, or is worse anywhere.
    """
    found = [(one, _gain(result, default, other, *one)) for one in compared(result, view)]
    gains = [(one, *gain) for one, gain in found if gain is not None]
    not_better = {part for (part, _), gain, noise, _ in gains if not gain > noise}
    better = [(one, gain) for one, gain, *_ in gains if one[0] not in not_better]
    if not better or any(gain < -allowed for _, gain, _, allowed in gains):
        return []
    text = ", ".join(f"{gain:+.3f} on {name_of(result, *one)}" for one, gain in better)
    return [(max(gain for _, gain in better), text)]


def _gain(
    result: Result[Any], default: Variant, other: Choice, part: str, key: str
) -> tuple[float, float, float] | None:
    """How much better another variant is than the default, beyond what gain that is no noise, and
    beyond what loss; None where one was not measured.

    A training that ended in NaN is no noise: another's counts against it, and next to the default's
    nothing is called better, since intervals of few seeds some of which failed say little.
    """
    base, found = (accuracy(result, part, variant, key) for variant in (default, other))
    if base is None or found is None:
        return None
    noise = max(NOISE, base.half + found.half)
    allowed = 0.0 if 0.0 in result.values(key, part=part, **other.keys) else noise
    return found.mean - base.mean, math.inf if fails(result, default, part) else noise, allowed


def fails(result: Result[Any], variant: Variant, part: str) -> bool:
    """Whether a training of the default ended in NaN, which explains nothing."""
    return 0.0 in result.values("accuracy", part=part.removesuffix(AT_EQUAL_COST), **variant.keys)
