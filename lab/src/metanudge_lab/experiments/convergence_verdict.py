"""The theorems on the growing problems, and Proposition 3 as it is stated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from metanudge.testing.problems import log_slope
from metanudge_lab.experiments.base import Result, Statement, Verdict
from metanudge_lab.experiments.convergence_rows import (
    FLOOR,
    GROWING,
    MEMORY,
    RIPPLED,
    STEEPNESS,
    count_of,
)
from metanudge_lab.experiments.meta_optimizers import (
    ADAM,
    CLIPPED,
    GD,
    MEMORIES,
    NORMALIZED,
    SNGDM,
    Best,
    best,
    ends_by_seed,
    reached_by_seed,
)
from metanudge_lab.experiments.smoothness import CONSTANTS, PAIRS, PATH, PROOF
from metanudge_lab.experiments.spread import Spread, below, short

# at most half of GD's steps; with momentum, no more than GD's
FASTER = {CLIPPED: 2.0, NORMALIZED: 2.0, SNGDM: 1.0, ADAM: 1.0}
NEAR = 0.15  # of an exponent


def judge(result: Result[Any]) -> Verdict:
    """The optimizers on the growing problems, the proof's own step, the bias that is left; and
    Proposition 3 as it is stated.
    """
    parts = [*compare(result), _proof(result), *_floor(result), *_proposition(result)]
    growing = [name for name in GROWING if name in result.config.problems]
    more = [
        *(_memories(result, optimizer, growing) for optimizer in MEMORIES),
        _steepness(result),
        _ripples(result),
        "A meta-step costs the same with every optimizer, so equal steps are equal cost here.",
    ]
    return Verdict.of(parts, _measured(result), " ".join(filter(None, more)))


def compare(result: Result[Any]) -> list[Statement]:
    """The optimizers against gradient descent, paired by seed where smoothness grows."""
    growing = [name for name in GROWING if name in result.config.problems]
    faster = [
        _faster(result, name, factor, growing)
        for name, factor in FASTER.items()
        if name in result.config.optimizers
    ]
    inner = [_inner_growth(result)] if RIPPLED in result.config.problems else []
    return [*faster, _ends_below(result, growing), *inner]


def _inner_growth(result: Result[Any]) -> Statement:
    """Whether clipping helps where the growth comes from the inner problem, as in Proposition 3."""
    clipped, plain = (reached_by_seed(result, RIPPLED, name) for name in (CLIPPED, GD))
    numbers = " against ".join(
        count_of(Spread.of(values).median, result) for values in (clipped, plain)
    )
    words = (
        "growth that comes from the inner problem, as in Proposition 3, does not slow GD down"
        f" (ClippedGD needs {numbers} steps)"
    )
    holds = all(2 * own <= other for own, other in zip(clipped, plain, strict=True))
    held = f"clipping helps on the rippled problem as well ({numbers} steps)"
    return Statement(holds, held, words, "inner growth")


def _faster(
    result: Result[Any], optimizer: str, factor: float, growing: Sequence[str]
) -> Statement:
    """With every seed."""
    pairs = {
        name: list(
            zip(*(reached_by_seed(result, name, one) for one in (optimizer, GD)), strict=True)
        )
        for name in growing
    }
    numbers = ", ".join(
        " against ".join(
            count_of(Spread.of(values).median, result) for values in zip(*found, strict=True)
        )
        for found in pairs.values()
    )
    share = "at most half of GD's steps" if factor > 1 else "no more steps than GD"
    words = f"{optimizer} {{}} {share} where smoothness grows ({numbers})"
    holds = all(
        math.isfinite(own) and factor * own <= plain
        for found in pairs.values()
        for own, plain in found
    )
    name = "clipped" if optimizer in (CLIPPED, NORMALIZED) else "momentum"
    return Statement(
        holds, words.format("needs"), words.format("does not always get by with"), name
    )


def _ends_below(result: Result[Any], growing: Sequence[str]) -> Statement:
    ends = {name: [ends_by_seed(result, name, one) for one in (SNGDM, GD)] for name in growing}
    numbers = ", ".join(
        " against ".join(short(Spread.of(values).median) for values in pair)
        for pair in ends.values()
    )
    words = f"with one task a step SNGDM {{}} GD ({numbers})"
    return Statement(
        all(below(own, plain) for own, plain in ends.values()),
        words.format("ends below"),
        words.format("does not clearly end below"),
        "sampled",
    )


def _proof(result: Result[Any]) -> Statement:
    """The descent of each step, which can fail; its bound on their number, far above what was run,
    cannot.
    """
    proofs = result.rows(kind=PROOF)
    broken, steps = (sum(row[key] for row in proofs) for key in ("broken", "steps"))
    least = min(row["bound"] for row in proofs)
    words = f"the proof's step lowers F by what it promises at {{}} of {steps} steps"
    loose = f" (its bound on their number, {short(least)} or more, is too loose to be tested)"
    return Statement(
        broken == 0,
        words.format("all") + loose,
        words.format(f"all but {broken}") + loose,
        "proof",
    )


def _floor(result: Result[Any]) -> list[Statement]:
    """The order in ν of what is left where the estimates vanish."""
    found = []
    for stencil, order in (("forward", 1), ("symmetric", 2)):
        slope = _floor_slope(result, stencil)
        if math.isnan(slope):
            continue
        words = (
            f"descent along FO-B-MAML's meta-gradients leaves a ‖∇F‖ that goes as ν^{slope:.2f}"
            f" with {stencil} differences"
        )
        holds = abs(slope - order) <= NEAR
        found.append(Statement(holds, words, f"{words}, not ν^{order}", "floor"))
    return found


def _memories(result: Result[Any], optimizer: str, growing: Sequence[str]) -> str:
    """What shorter memories change, in words."""
    parts = []
    for variant in MEMORIES.get(optimizer, {}):
        rows = [
            result.values(
                "reached", kind=MEMORY, problem=name, optimizer=optimizer, variant=variant
            )
            for name in growing
        ]
        if all(rows):
            parts.append(
                f"{' and '.join(count_of(Spread.of(values).median, result) for values in rows)}"
                f" with {variant}"
            )
    return f"{optimizer} needs {', '.join(parts)}." if parts else ""


def _steepness(result: Result[Any]) -> str:
    """How the ends of SNGDM and GD compare from the flattest and the steepest start, in words."""
    starts = sorted(set(result.values("start", kind=STEEPNESS)))
    parts = []
    for start in starts[:1] + starts[1:][-1:]:
        own, plain = (
            result.values("last", kind=STEEPNESS, start=start, optimizer=name)[0]
            for name in (SNGDM, GD)
        )
        parts.append(
            f"{short(own)} against {short(plain)} where the start has ‖∇F‖ = {short(start)}"
        )
    return (
        f"From other starts on the exponential problem SNGDM ends at {', '.join(parts)}."
        if parts
        else ""
    )


def _ripples(result: Result[Any]) -> str:
    """Why growth of the inner problem does not slow GD down."""
    if RIPPLED not in result.config.problems:
        return ""
    steepest = max(result.values("curvature", problem=RIPPLED, kind=PATH))
    lowest = min(result.values("lowest", problem=RIPPLED, kind=PATH))
    secant = max(result.values("secant", problem=RIPPLED, kind=PAIRS))
    return (
        f"On the rippled problem curvature goes up to {short(steepest)} and down to"
        f" {short(lowest)}, and between far points the gradient changes by no more than"
        f" {secant:.2g} per unit."
    )


def _floor_slope(result: Result[Any], stencil: str) -> float:
    rows = result.rows(kind=FLOOR, stencil=stencil)
    return (
        log_slope([row["nu"] for row in rows], [row["norm"] for row in rows])
        if len(rows) > 1
        else math.nan
    )


def _proposition(result: Result[Any]) -> list[Statement]:
    found = []
    if RIPPLED in result.config.problems:
        stated, proved = (
            max(row[key] for row in result.rows(kind=CONSTANTS)) for key in ("stated", "proved")
        )
        words = (
            "the constants of Proposition 3, L₁/4 and L̂₂/(4λ), are too small by a factor of"
            f" {stated:.2g} where its assumptions hold (its proof gives 4L₁ and 4L̂₂/λ, of which"
            f" {proved:.0%} is used)"
        )
        held = "the constants of Proposition 3 hold"
        found.append(Statement(stated <= 1, held, words, "constants"))
    for name in (name for name in GROWING if name in result.config.problems):
        ratio = max(result.values("ratio", problem=name, kind=PAIRS))
        far = [(row["distance"], row["ratio"]) for row in result.rows(problem=name, kind=PAIRS)][
            -3:
        ]
        slope = log_slope(*zip(*far, strict=True))
        words = (
            f"its global form, with min(ℒ(θ), ℒ(θ′)), excludes {name} growth: from the minimiser to"
            f" points ever farther out its ratio grows like the distance to the power {slope:.1f},"
            f" up to {short(ratio)}, while ‖∇²F‖ ≤ L₀ + L₁‖∇F‖ holds along the path"
        )
        held = f"the global form of Proposition 3 holds for {name} growth"
        found.append(Statement(ratio <= 1, held, words, "global"))
    return found


def _best(result: Result[Any], problem: str, optimizer: str, *, sampled: bool = False) -> Best:
    found = best(result, problem, optimizer, sampled=sampled)
    assert found is not None, "every cell is there"
    return found


def _measured(result: Result[Any]) -> str:
    parts = []
    for problem in result.config.problems:
        flat, steep = (
            result.spread(key, problem=problem, kind=PROOF).median for key in ("flat", "steep")
        )
        steps = ", ".join(
            f"{name} {count_of(_best(result, problem, name).reached, result)}"
            for name in result.config.optimizers
        )
        parts.append(f"{problem} (L₀ = {flat:.2g}, L₁ = {steep:.2g}): {steps}")
    return (
        f"Meta-steps to ‖∇F‖ ≤ {result.config.epsilon:g} at the best step sizes:"
        f" {'; '.join(parts)}."
    )
