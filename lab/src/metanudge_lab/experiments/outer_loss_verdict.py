"""Whether FO-B-MAML ends below the others, and why where it does not."""

from __future__ import annotations

from typing import Any

from metanudge_lab.experiments import quadratics as q
from metanudge_lab.experiments.base import Result, Statement, Verdict
from metanudge_lab.experiments.outer_loss_rows import (
    BRIEF,
    COMPETITIVE,
    LOSSES,
    affordable,
    at_rest,
    best_ends,
    best_rate,
    last_of,
    trained,
)
from metanudge_lab.experiments.spread import Spread, below, short

# by which name the list of claims knows the comparison
RIVALS = {
    q.FO_MAML: "first order",
    q.REPTILE: "first order",
    q.IMAML_2: "imaml",
    q.IMAML_5: "imaml",
    q.IMAML_10: "competitive",
}


def judge(result: Result[Any]) -> Verdict:
    """Ours ends below FO-MAML, Reptile and iMAML with 2 and 5 CG steps, and within a factor of
    iMAML with 10, in both losses.
    """
    statements = compare(result)
    keys = [(rival, loss) for loss in LOSSES for rival in RIVALS]
    beaten = [key for key, one in zip(keys, statements, strict=True) if not one.holds]
    last = {m: last_of(result, m, "exact", best_rate(result, m, "exact")) for m in trained(result)}
    measured = _measured(result, {method: short(value) for method, value in last.items()})
    more = [_why(result, beaten)] if beaten else []
    return Verdict.of(
        statements, measured, " ".join([*more, _more_steps(result), _equal_cost(result)])
    )


def compare(result: Result[Any]) -> list[Statement]:
    """Whether ours ends below each of the others, paired by seed, in each of the losses."""
    found = []
    for loss in LOSSES:
        ours = best_ends(result, q.SYMMETRIC, loss)
        for rival, name in RIVALS.items():
            theirs = best_ends(result, rival, loss)
            factor = _factor(rival)
            within = f"within a factor of {factor:g} of" if factor > 1 else "below"
            one, other = (short(Spread.of(values).median) for values in (ours, theirs))
            words = f"{within} {_spoken(rival)} {BRIEF[loss]} ({one} against {other})"
            holds = below(ours, theirs, factor)
            found.append(
                Statement(holds, f"it ends {words}", f"it does not clearly end {words}", name)
            )
    return found


def _factor(rival: str) -> float:
    return COMPETITIVE if rival == q.IMAML_10 else 1.0


def _equal_cost(result: Result[Any]) -> str:
    told = []
    for method in (q.SYMMETRIC, q.GRADIENT, q.IMAML_5, q.MAML, q.FO_MAML):
        if method in trained(result) and (at := affordable(result, method)):
            end = last_of(result, method, "exact", best_rate(result, method, "exact", at), at)
            told.append(f"{_spoken(method)} {short(end)} (iteration {at})")
    return (
        "This is at equal meta-iterations; with as many backward passes as the cheapest method"
        f" takes for all of them it is, at the inner solution, {', '.join(told)}."
    )


def _why(result: Result[Any], beaten: list[tuple[str, str]]) -> str:
    """Whether comparisons fail in passing or for the bias that so few inner steps leave: the limits
    tell.
    """
    passing = [pair for pair in beaten if _holds_at_rest(result, *pair, result.config.steps)]
    biased = [pair for pair in beaten if pair not in passing]
    told = []
    if biased:
        held = [
            k
            for k in result.config.limit_steps
            if all(_holds_at_rest(result, *pair, k) for pair in biased)
        ]
        told.append(
            f"{'Those' if not passing else 'Some'} fail not for want of iterations, but for the"
            f" bias that {result.config.steps} inner steps leave: also in the limit (second"
            " figure), where the estimate vanishes and descent along it comes to rest"
            + (
                f"; there they hold with K = {', '.join(map(str, held))}."
                if held
                else ", with every K tried."
            )
        )
    for rival, loss in passing:
        ours, theirs = (
            short(at_rest(result, method, loss, result.config.steps))
            for method in (q.SYMMETRIC, rival)
        )
        told.append(
            f"{BRIEF[loss].capitalize()} {_spoken(rival)} is ahead only in passing: in the limit it"
            f" is {ours} against {theirs}."
        )
    return " ".join(told)


def _holds_at_rest(result: Result[Any], rival: str, loss: str, steps: int) -> bool:
    theirs = at_rest(result, rival, loss, steps)
    return at_rest(result, q.SYMMETRIC, loss, steps) < _factor(rival) * theirs


def _spoken(method: str) -> str:
    return method.replace(",", " with")


def _more_steps(result: Result[Any]) -> str:
    """What more inner steps do to the limits."""
    first, last = result.config.limit_steps[0], result.config.limit_steps[-1]
    told = [
        f"{short(at_rest(result, m, 'exact', first))} to"
        f" {short(at_rest(result, m, 'exact', last))} for {_spoken(m)}"
        for m in (q.SYMMETRIC, q.GRADIENT, q.IMAML_5, q.FO_MAML, q.REPTILE)
    ]
    return (
        f"More inner steps, K = {first} to {last}, bring the limit at the inner solution from"
        f" {', '.join(told)}."
    )


def _measured(result: Result[Any], last: dict[str, str]) -> str:
    return (
        f"After {result.config.iterations} meta-iterations the outer loss (at the inner solution)"
        f" is above its minimum by {last[q.SYMMETRIC]} with symmetric FO-B-MAML, {last[q.GRADIENT]}"
        f" with the gradient nudge, {last[q.IMAML_2]}, {last[q.IMAML_5]} and {last[q.IMAML_10]}"
        f" with iMAML and 2, 5 and 10 CG steps, {last[q.FO_MAML]} with FO-MAML and"
        f" {last[q.REPTILE]} with Reptile."
    )
