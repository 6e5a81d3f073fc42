"""Whether any choice is better than the defaults somewhere and worse nowhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from metanudge_lab.experiments.base import Result, Verdict
from metanudge_lab.experiments.network_errors import TARGETS
from metanudge_lab.experiments.variants import (
    POINTS,
    Variant,
    accuracy,
    compared,
    cosine,
    name_of,
    trained_variants,
)

NOISE = 0.005  # accuracies closer than this are alike, whatever the seeds say


def judge(result: Result[Any]) -> Verdict:
    """For each choice, all else as by default: is there one that is better somewhere and worse
    nowhere?
    """
    default = Variant.default()
    options = result.config.options
    found = {key: _best(result, default, key, values) for key, values in options.items()}
    beaten = {key: one for key, one in found.items() if one is not None}
    other = default.changed("nudge", "gradient" if default.nudge == "loss" else "loss")
    steps = min(result.config.steps)
    quality = ", ".join(
        f"{cosine(result, key, point, steps, default):.2f} ({point}, {TARGETS[key]})"
        for point in POINTS
        for key in TARGETS
    )
    measured = (
        f"The defaults ({default}) reach {_numbers(result, default)}; with the {other.nudge} nudge"
        f" it is {_numbers(result, other)}. Their cosine at K = {steps} is {quality}."
        f" {'; '.join(_highest(result, *one) for one in compared(result))}."
    )
    kept = [key for key in options if key not in beaten]
    held = (
        f"No other choice is better somewhere and worse nowhere: {', '.join(kept) or 'none'}."
        f" {_by_cosine(result, default)}"
    )
    if not beaten:
        return Verdict("reproduced", measured, held)
    better = "; ".join(f"{key} = {value} ({text})" for key, (value, text) in beaten.items())
    return Verdict(
        "partly" if kept else "not", measured, f"{held} The table speaks for others: {better}."
    )


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
        variant: accuracy(result, part, variant, key)
        for variant in trained_variants(result.config.options)
    }
    known = {variant: found.mean for variant, found in means.items() if found is not None}
    best = max(known, key=lambda variant: known[variant])
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
        gains = [
            (one, gain, noise)
            for one in compared(result)
            for gain, noise in _gain(result, *pair, *one)
        ]
        better = [(one, gain) for one, gain, noise in gains if gain > noise]
        if better and not any(gain < -noise for _, gain, noise in gains):
            text = ", ".join(f"{gain:+.3f} on {name_of(result, *one)}" for one, gain in better)
            found.append((max(gain for _, gain in better), value, text))
    return max(found)[1:] if found else None


def _gain(
    result: Result[Any], default: Variant, other: Variant, part: str, key: str
) -> list[tuple[float, float]]:
    """How much better another variant is than the default, and what may be noise; nothing where one
    was not measured.

    A training that ended in NaN is no noise.
    """
    base, found = (accuracy(result, part, variant, key) for variant in (default, other))
    if base is None or found is None:
        return []
    failed = 0.0 in result.values(key, part=part, **other.keys)
    noise = max(NOISE, base.half + found.half)
    return [(found.mean - base.mean, 0.0 if failed else noise)]
