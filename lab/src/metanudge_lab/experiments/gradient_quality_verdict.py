"""Figure 1, above, judged: what more inner steps bring, and who is ahead of whom."""

from __future__ import annotations

import itertools
from typing import Any

from metanudge_lab.experiments import quadratics as q
from metanudge_lab.experiments.base import Result, Statement, Verdict
from metanudge_lab.experiments.gradient_quality_rows import (
    PAPER_STEPS,
    RIVALS,
    ROUNDING,
    WARM,
    by_seed,
    median,
    medians,
    part_text,
    split_at,
)
from metanudge_lab.experiments.spread import Spread, short

Errors = dict[int, list[float]]  # by seed, for every number of steps


def judge(result: Result[Any]) -> Verdict:
    """Our error goes on falling, FO-MAML's and Reptile's do not; ours is below iMAML's with 2 and 5
    CG steps; ES-MAML fails.
    """
    statements = compare(result)
    behind = any(one.name.startswith("imaml") and not one.holds for one in statements)
    return Verdict.of(statements, _measured(result), _why(result) if behind else "")


def compare(result: Result[Any]) -> list[Statement]:
    """All parts set methods against one another, seed by seed: with a seed all have the same
    tasks.
    """
    found = []
    for lam in result.config.lams:
        methods = (q.SYMMETRIC, q.FO_MAML, q.REPTILE, *RIVALS, q.ES_MAML)
        errors = {method: by_seed(result, method, lam) for method in methods}
        found.append(_more_steps(errors, lam))
        found += [
            _below(result, lam, name, errors[q.SYMMETRIC], errors[rival])
            for rival, name in RIVALS.items()
        ]
        if errors[q.ES_MAML]:
            found.append(_fails(result, lam, errors[q.SYMMETRIC], errors[q.ES_MAML]))
    return found


def _more_steps(errors: dict[str, Errors], lam: float) -> Statement:
    falling = all(map(_falls, errors[q.SYMMETRIC].values()))
    others = [m for m in (q.FO_MAML, q.REPTILE) if any(map(still_falls, errors[m].values()))]
    words = [] if falling else ["that of symmetric FO-B-MAML does not"]
    words += [f"that of {method} does at the end" for method in others]
    return Statement(
        falling and not others,
        f"at λ = {lam:g} the error falls with every increase of K, and FO-MAML's and Reptile's do"
        " not",
        f"at λ = {lam:g} not every error falls as claimed: {', '.join(words)}",
        "more steps",
    )


def _below(result: Result[Any], lam: float, cg: str, ours: Errors, theirs: Errors) -> Statement:
    steps = result.config.steps
    behind = [k for k, ahead in zip(steps, _ahead(ours, theirs), strict=True) if not ahead]
    behind = [k for k in behind if k >= PAPER_STEPS]
    words = f"iMAML with {cg} CG steps at {{}} (λ = {lam:g})"
    return Statement(
        not behind,
        f"it is ahead of {words.format(f'every K ≥ {PAPER_STEPS}')}",
        f"it is behind {words.format(_at(behind, steps))} with some seed",
        f"imaml-{cg}",
    )


def _fails(result: Result[Any], lam: float, ours: Errors, theirs: Errors) -> Statement:
    """ES-MAML gains nothing by more steps, and ends behind FO-B-MAML with every seed."""
    last = result.config.steps[-1]
    error = Spread.of([errors[-1] for errors in theirs.values()]).median
    cosine, own = (median(result, "cosine", m, lam, last) for m in (q.ES_MAML, q.SYMMETRIC))
    words = (
        f"at λ = {lam:g} ES-MAML with 20 samples ends with an error of {short(error)} and a cosine"
        f" of {cosine:.2f} (FO-B-MAML: {own:.4f})"
    )
    holds = not any(map(still_falls, theirs.values())) and _ahead(ours, theirs)[-1]
    return Statement(holds, words, f"{words}: no failure", "es-maml")


def _ahead(ours: Errors, theirs: Errors) -> list[bool]:
    """For every number of steps, whether the error is the smaller one with every seed; rounding is
    nobody's error.
    """
    seeds = [list(zip(ours[seed], theirs[seed], strict=True)) for seed in ours]
    return [all(a < b or a < ROUNDING for a, b in pairs) for pairs in zip(*seeds, strict=True)]


def _why(result: Result[Any]) -> str:
    """Where the symmetric stencil is behind iMAML, and which part of its error makes it so."""
    lam, at = result.config.lams[0], split_at(result)
    ours, theirs, warm, nudged = (
        part_text(median(result, "part_inner", method, lam, at))
        for method in (q.SYMMETRIC, q.IMAML_5, WARM, q.GRADIENT)
    )
    return (
        f"Why it is behind, measured at λ = {lam:g} and K = {at}"
        " (second figure): the loss nudge adds up query gradients on the whole way from θ, iMAML"
        f" takes one, at its end, so that unfinished inner solves make an error of {ours} in the"
        f" one and {theirs} in the other. Nudged solves that start at the solution bring this part"
        f" to {warm}: {_standing(result, WARM, lam)}. The gradient nudge, which takes one query"
        f" gradient too, has {nudged}, in part cancelled by that of the linear system:"
        f" {_standing(result, q.GRADIENT, lam)}."
    )


def _measured(result: Result[Any]) -> str:
    steps, told = result.config.steps, []
    for lam in result.config.lams:
        errors = medians(result, lam)
        two, five = (_where_behind(result, q.SYMMETRIC, rival, lam) for rival in RIVALS)
        nudged = _where_behind(result, q.GRADIENT, q.IMAML_5, lam)
        told.append(
            f"At λ = {lam:g} the error of symmetric FO-B-MAML falls from"
            f" {short(errors[q.SYMMETRIC][0])} at K = {steps[0]} to"
            f" {short(errors[q.SYMMETRIC][-1])} at K = {steps[-1]} (FO-MAML:"
            f" {short(errors[q.FO_MAML][-1])}); it is above that of iMAML with 2 CG steps at {two}"
            f" and with 5 at {five}, with the gradient nudge at {nudged}."
        )
    return " ".join(told)


def _where_behind(result: Result[Any], ours: str, rival: str, lam: float) -> str:
    errors, steps = medians(result, lam), result.config.steps
    return _at(_behind(steps, errors[ours], errors[rival]), steps, none="no K")


def _standing(result: Result[Any], ours: str, lam: float) -> str:
    behind = _where_behind(result, ours, q.IMAML_5, lam)
    return (
        f"{'ahead of' if behind == 'no K' else 'behind'} iMAML with 5 CG steps at"
        f" {'every K' if behind == 'no K' else behind}"
    )


def _at(chosen: list[int], steps: tuple[int, ...], *, none: str = "") -> str:
    """Some of the K that were tried, in words.

    Example:
        >>> (_at([5, 10, 20], (1, 5, 10, 20, 50)), _at([1, 20], (1, 5, 10, 20, 50)),
        ...     _at([], (1,), none="no K"))
        ('K = 5 to 20', 'K = 1, 20', 'no K')
    """
    if not chosen:
        return none
    whole = [k for k in steps if chosen[0] <= k <= chosen[-1]]
    return (
        f"K = {chosen[0]} to {chosen[-1]}"
        if whole == chosen and len(chosen) > 1
        else f"K = {', '.join(map(str, chosen))}"
    )


def _behind(steps: tuple[int, ...], ours: list[float], theirs: list[float]) -> list[int]:
    """The K at which our error is not the smaller one; rounding is nobody's error.

    Example:
        >>> _behind((1, 2, 5), [0.1, 0.4, 1e-13], [0.2, 0.3, 1e-14])
        [2]
    """
    return [
        k
        for k, own, other in zip(steps, ours, theirs, strict=True)
        if not own < other and not own < ROUNDING
    ]


def _falls(errors: list[float]) -> bool:
    """Whether every increase of K helps, until only what the stencil itself leaves, O(ν²), may be
    left.
    """
    return all(after < before or after < 1e-3 for before, after in itertools.pairwise(errors))


def still_falls(errors: list[float]) -> bool:
    """Whether the last increase of K brought the error to less than three quarters."""
    return len(errors) > 1 and errors[-1] < 0.75 * errors[-2]
