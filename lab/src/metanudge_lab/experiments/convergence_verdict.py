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
)
from metanudge_lab.experiments.smoothness import CONSTANTS, PAIRS, PATH, PROOF
from metanudge_lab.experiments.spread import Spread, short

# at most half of GD's steps; with momentum, no more than GD's
FASTER = {CLIPPED: 2.0, NORMALIZED: 2.0, SNGDM: 1.0, ADAM: 1.0}


def judge(result: Result[Any]) -> Verdict:
    """The theorems on the growing problems, the proof's own step, the bias that is left; and
    Proposition 3 as it is stated.
    """
    return Verdict.of([*_theorems(result), *_proposition(result)], _measured(result))


def _theorems(result: Result[Any]) -> list[Statement]:
    growing = [name for name in GROWING if name in result.config.problems]
    faster = [
        _faster(result, name, factor, growing)
        for name, factor in FASTER.items()
        if name in result.config.optimizers
    ]
    return [*faster, _ends_below(result, growing), _proof(result), _floor(result)]


def _faster(
    result: Result[Any], optimizer: str, factor: float, growing: Sequence[str]
) -> Statement:
    pairs = [
        (_best(result, name, optimizer).reached, _best(result, name, GD).reached)
        for name in growing
    ]
    numbers = ", ".join(
        f"{count_of(own, result)} against {count_of(plain, result)}" for own, plain in pairs
    )
    share = "at most half of GD's steps" if factor > 1 else "no more steps than GD"
    words = (
        f"{optimizer} {{}} {share} where smoothness grows"
        f" ({numbers}){_memories(result, optimizer, growing)}"
    )
    holds = all(math.isfinite(own) and factor * own <= plain for own, plain in pairs)
    return holds, words.format("needs"), words.format("does not always get by with")


def _ends_below(result: Result[Any], growing: Sequence[str]) -> Statement:
    ends = [
        (_best(result, name, SNGDM, sampled=True).last, _best(result, name, GD, sampled=True).last)
        for name in growing
    ]
    numbers = ", ".join(f"{short(own)} against {short(plain)}" for own, plain in ends)
    words = f"with one task a step SNGDM ends {{}} GD ({numbers}){_steepness(result)}"
    below = all(own < plain for own, plain in ends)
    return below, words.format("below"), words.format("not below")


def _proof(result: Result[Any]) -> Statement:
    proofs = result.rows(kind=PROOF)
    broken = sum(row["broken"] for row in proofs)
    over = sum(row["steps"] > row["bound"] for row in proofs)
    words = (
        "the proof's step lowers F by what it promises at {} of"
        f" {sum(row['steps'] for row in proofs)} steps and keeps within its bound"
    )
    all_but = words.format(f"all but {broken}") + f" in all but {over} runs"
    return broken == 0 and over == 0, words.format("all"), all_but


def _floor(result: Result[Any]) -> Statement:
    floors = result.rows(kind=FLOOR)
    worst = max(abs(row["norm"] / row["bias"] - 1) for row in floors)
    slopes = {row["stencil"]: _floor_slope(result, row["stencil"]) for row in floors}
    orders = ", ".join(
        f"ν^{slope:.1f} with {stencil} differences" for stencil, slope in slopes.items()
    )
    words = (
        f"with FO-B-MAML's meta-gradients ‖∇F‖ ends at their bias (off it by at most {short(worst)}"
        f" of it), which goes as {orders}"
    )
    contrary = f"‖∇F‖ does not end at the bias of FO-B-MAML's meta-gradients ({worst:.0%} off)"
    return worst < 0.1, words, contrary


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
    return f", {', '.join(parts)}" if parts else ""


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
    return f"; on the exponential problem {', '.join(parts)}" if parts else ""


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
        found.append((stated <= 1, "the constants of Proposition 3 hold", words))
        clipped, plain = (_best(result, RIPPLED, name).reached for name in (CLIPPED, GD))
        numbers = f"{count_of(clipped, result)} steps against {count_of(plain, result)}"
        steepest = max(result.values("curvature", problem=RIPPLED, kind=PATH))
        lowest = min(result.values("lowest", problem=RIPPLED, kind=PATH))
        secant = max(result.values("secant", problem=RIPPLED, kind=PAIRS))
        words = (
            "growth that comes from the inner problem, as in Proposition 3, does not slow GD down"
            f" (ClippedGD needs {numbers}): curvature there goes up to {short(steepest)} and down"
            f" to {short(lowest)}, and between far points the gradient changes by no more than"
            f" {secant:.2g} per unit"
        )
        found.append(
            (clipped < plain, f"clipping helps on the rippled problem as well ({numbers})", words)
        )
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
        found.append(
            (ratio <= 1, f"the global form of Proposition 3 holds for {name} growth", words)
        )
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
