"""What the appendix says of ν, statement by statement, and where its explanation goes wrong."""

from __future__ import annotations

import itertools
import math
from typing import Any

from metanudge.testing.problems import log_slope
from metanudge_lab.experiments.base import Result, Statement, Verdict
from metanudge_lab.experiments.nu_sensitivity_rows import (
    KINKED,
    NOISY,
    QUADRATIC,
    SINGLE,
    SMOOTH,
    best_of,
    errors_at,
)
from metanudge_lab.experiments.spread import short

# the appendix's: few and many steps, small ν, where the bias takes over
FEW, MANY, SMALL, LARGE = (10, 50, 1e-2, 0.1)
RANGE = (0.1, 0.5)  # the rule's ν for few steps
FLAT, SPIKE = 1.1, 2.0


def judge(result: Result[Any]) -> Verdict:
    """The appendix's statements for the quadratic problem, one by one, and where its explanation of
    the first goes wrong.
    """
    parts = [
        Statement(holds, text, f"not that {text}", name) for holds, text, name in _parts(result)
    ]
    wrong = not all(part.holds for part in parts)
    return Verdict.of(parts, _measured(result), _explanation(result) if wrong else "")


def _parts(result: Result[Any]) -> list[tuple[bool, str, str]]:
    """What the appendix says, whether it holds for the loss nudge on the quadratic, and the words
    for it.
    """
    errors = {k: errors_at(result, QUADRATIC, k) for k in result.config.steps}
    small = {k: [e for nu, e in found.items() if nu <= SMALL] for k, found in errors.items()}
    ordered = [errors[k] for k in sorted(errors)]
    shared = [nu for nu in result.config.nus if nu <= LARGE]
    falls = all(
        after[nu] < before[nu] for before, after in itertools.pairwise(ordered) for nu in shared
    )
    best = {k: min(found.values()) for k, found in errors.items()}
    few, many = min(best), max(best)
    top = max(result.config.nus)
    spikes = all(not found[top] < SPIKE * found[LARGE] for found in errors.values())
    grows = [k for k, found in errors.items() if found[min(found)] > FLAT * found[SMALL]]
    statements = [
        (
            all(errors[k][SMALL] < FLAT * min(found) for k, found in small.items()),
            f"the error is flat or high for ν ≤ {SMALL:g}",
            "flat",
        ),
        (
            bool(grows),
            (
                "a small ν amplifies the noise of unconverged solves (the error does not grow"
                " towards small ν at any K)"
            ),
            "noise",
        ),
        (
            best[few] >= 10 * best[many],
            (
                f"K = {few} and {many} are an order of magnitude apart (at their best ν"
                f" {short(best[few])} and {short(best[many])})"
            ),
            "levels",
        ),
        (falls, f"more steps help at every ν ≤ {LARGE:g}", "steps"),
        (spikes, f"the error rises sharply beyond ν = {LARGE:g} at every K", "bias"),
    ]
    for k, found in errors.items():
        if k <= FEW:
            large = min(
                (e for nu, e in found.items() if RANGE[0] <= nu <= RANGE[1]), default=math.inf
            )
            little = min(small[k])
            text = (
                f"a ν of {RANGE[0]:g} to {RANGE[1]:g} serves K = {k} (at best {short(large)} there,"
                f" {short(little)} below {SMALL:g})"
            )
            statements.append((FLAT * large < little, text, "rule"))
        elif k >= MANY:
            little = max(e for nu, e in found.items() if 1e-3 <= nu <= SMALL)
            text = (
                f"a ν of 0.001 to 0.01 serves K = {k} ({short(little)} there, {short(found[LARGE])}"
                f" at {LARGE:g})"
            )
            statements.append((little < found[LARGE], text, "rule"))
    return statements


def _measured(result: Result[Any]) -> str:
    first, last = min(result.config.steps), max(result.config.steps)
    low, high = (errors_at(result, QUADRATIC, k) for k in (first, last))
    least, top = min(low), max(low)
    text = (
        f"On the quadratic problem the symmetric difference is off by {short(low[least])} at ν ="
        f" {least:g} and K = {first}, by {short(high[least])} at K = {last}; at ν = {LARGE:g} by"
        f" {short(low[LARGE])} and {short(high[LARGE])}, at ν = {top:g} by {short(low[top])} and"
        f" {short(high[top])}."
    )
    return f"{text} {_kinks(result)}".strip()


def _kinks(result: Result[Any]) -> str:
    """What ReLU and max-pooling do to the difference, and to the inner steps themselves."""
    errors = {
        k: errors_at(result, KINKED, k, "error_steps")
        for k in result.config.network_steps
        if result.rows(problem=KINKED)
    }
    if not errors:
        return ""
    at = [found[LARGE] for found in errors.values()]
    worst, nu, k = max(
        (error, nu, k) for k, found in errors.items() for nu, error in found.items() if nu <= LARGE
    )
    last = max(errors)
    left = [
        result.spread("residual_growth", problem=name, steps=last).median
        for name in (KINKED, SMOOTH)
        if result.rows(problem=name)
    ]
    smooth = f", with softplus and average pooling {short(left[1])}" if len(left) > 1 else ""
    return (
        "With ReLU and max-pooling it is off from the derivative of its own steps by"
        f" {short(min(at))} to {short(max(at))} at ν = {LARGE:g} and by up to {short(worst)} below"
        f" (K = {k}, ν = {nu:g}); {last} inner steps leave {short(left[0])} times the first inner"
        f" gradient there{smooth}."
    )


def _explanation(result: Result[Any]) -> str:
    """Where the flat error comes from: it is that of the K steps' own derivative. Noise needs
    errors that the solves do not share.
    """
    worst = max(errors_at(result, QUADRATIC, k, "error_steps")[SMALL] for k in result.config.steps)
    text = (
        f"What is left at small ν is no noise: at ν = {SMALL:g} the difference agrees with the"
        f" derivative of its own K steps within {short(worst)} at every K, so all the rest is what"
        " K steps leave of the implicit gradient, which no ν cures."
    )
    few, many = min(result.config.steps), max(result.config.steps)
    biases = {k: errors_at(result, QUADRATIC, k, "error_steps") for k in result.config.steps}
    top = max(result.config.nus)
    rising = sum(not bias[top] < SPIKE * bias[LARGE] for bias in biases.values())
    text += (
        f" Measured against that derivative, the error rises beyond ν = {LARGE:g} at {rising} of"
        f" {len(biases)} K: at K = {few} from {short(biases[few][LARGE])} to"
        f" {short(biases[few][top])} at ν = {top:g}, hidden behind what the steps leave."
    )
    if result.rows(problem=SINGLE):
        single, double = (errors_at(result, name, many) for name in (SINGLE, QUADRATIC))
        least = min(single)
        same = min(
            (
                nu
                for nu in single
                if all(single[n] < FLAT * double[n] for n in single if nu <= n <= SMALL)
            ),
            default=math.nan,
        )
        text += (
            f" Rounding does amplify: in float32 the error at ν = {least:g} and K = {many} is"
            f" {short(single[least])} where float64 has {short(double[least])}; from ν = {same:g}"
            " on they are the same."
        )
    if result.rows(problem=NOISY):
        noisy = {k: errors_at(result, NOISY, k) for k in result.config.steps}
        slopes = [_slope(errors) for errors in noisy.values()]
        best = {k: best_of(noisy[k])[0] for k in (few, many)}
        text += (
            " The premise is right where every solve is off by the same δ in a direction of its"
            f" own: the error then goes as ν to the power {max(slopes):.2f} or less for ν ≤"
            f" {SMALL:g}, and the best ν of the grid is {best[few]:g} at K = {few} and"
            f" {best[many]:g} at K = {many}."
        )
    return text


def _slope(errors: dict[float, float]) -> float:
    small = {nu: e for nu, e in errors.items() if nu <= SMALL and math.isfinite(e)}
    return log_slope(list(small), list(small.values()))
