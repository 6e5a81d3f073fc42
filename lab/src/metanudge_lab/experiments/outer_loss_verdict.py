"""Whether FO-B-MAML ends below the others, and why where it does not."""

from __future__ import annotations

from typing import Any

from metanudge_lab.experiments import quadratics as q
from metanudge_lab.experiments.base import Result, Verdict
from metanudge_lab.experiments.outer_loss_rows import (
    BRIEF,
    COMPETITIVE,
    LOSSES,
    at_rest,
    best_rate,
    last_of,
    trained,
)
from metanudge_lab.experiments.spread import short


def judge(result: Result[Any]) -> Verdict:
    """Ours ends below FO-MAML, Reptile and iMAML with 2 and 5 CG steps, and within a factor of
    iMAML with 10, in both losses.
    """
    last = {
        (m, loss): last_of(result, m, loss, best_rate(result, m, loss))
        for m in trained(result)
        for loss in LOSSES
    }
    compared, failed, beaten = 0, [], []
    for loss in LOSSES:
        for rival in (q.FO_MAML, q.REPTILE, q.IMAML_2, q.IMAML_5, q.IMAML_10):
            ours, theirs = last[q.SYMMETRIC, loss], last[rival, loss]
            factor = COMPETITIVE if rival == q.IMAML_10 else 1.0
            compared += 1
            if not ours < factor * theirs:
                within = f"within a factor of {factor:g} of" if factor > 1 else "below"
                failed.append(
                    f"{within} {_spoken(rival)} {BRIEF[loss]} ({short(ours)} against"
                    f" {short(theirs)})"
                )
                beaten.append((rival, loss))
    measured = _measured(
        result, {method: short(value) for (method, loss), value in last.items() if loss == "exact"}
    )
    if not failed:
        reason = (
            "Symmetric FO-B-MAML ends below all four and near iMAML with 10 CG steps, in both"
            f" losses. {_more_steps(result)}"
        )
        return Verdict("reproduced", measured, reason)
    held = compared - len(failed)
    reason = (
        f"{held} of {compared} comparisons hold; symmetric FO-B-MAML does not end"
        f" {', nor '.join(failed)}."
    )
    return Verdict(
        "partly" if held else "not",
        measured,
        f"{reason} {_why(result, beaten)} {_more_steps(result)}",
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
    factor = COMPETITIVE if rival == q.IMAML_10 else 1.0
    return at_rest(result, q.SYMMETRIC, loss, steps) < factor * at_rest(result, rival, loss, steps)


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
