"""Table 1, column by column."""

from __future__ import annotations

import math
from typing import Any

from metanudge_lab.experiments.base import Result, Statement, Verdict
from metanudge_lab.experiments.spending import (
    BIASED,
    FO_MAML,
    FORWARD,
    GD,
    IMAML,
    MAML,
    NESTEROV,
    PRECISION,
    SYMMETRIC,
    TANGENT,
    exponents,
    kappa,
    memory,
    memory_exponent,
    reach,
)
from metanudge_lab.experiments.spread import short

NEAR, STRAIGHT = 0.15, 0.98  # exponents within 0.15 of the table's; steps linear in log(1/ε)


def judge(result: Result[Any]) -> Verdict:
    """Table 1, column by column."""
    parts = [*_compute(result), *compare(result), *_space(result), *_bias(result)]
    return Verdict.of(parts, _measured(result))


def _compute(result: Result[Any]) -> list[Statement]:
    """Whether, and the words for it where it is and where it is not."""
    unbiased = [method for method in result.config.methods if method not in BIASED]
    found = []
    for solver, theory in ((GD, 1.0), (NESTEROV, 0.5)):
        powers = [exponents(result, method, solver).kappa for method in unbiased]
        low, high = (f"{choose(powers):.2f}" for choose in (min, max))
        words = (
            f"the inner steps go as κ to the {low}{f' to {high}' if high != low else ''} with"
            f" {solver}"
        )
        holds = all(abs(power - theory) <= NEAR for power in powers)
        found.append(Statement(holds, words, f"{words}, not {theory:g}", "steps"))
    straight = min(
        exponents(result, method, solver).straight
        for method in unbiased
        for solver in result.config.solvers
    )
    words = f"linear in log(1/ε) (R² of at least {straight:.3f})"
    found.append(
        Statement(straight > STRAIGHT, f"they are {words}", f"they are not {words}", "steps")
    )
    plateaus = {
        method: _plateau(result, method) for method in BIASED if method in result.config.methods
    }
    first = max(result.config.precisions)
    numbers = ", ".join(f"{method} {short(value)}" for method, value in plateaus.items())
    stuck = all(value > first for value in plateaus.values())
    found.append(
        Statement(
            stuck,
            f"FO-MAML and Reptile reach no precision, at best {numbers}",
            f"FO-MAML or Reptile get below {first:g} ({numbers})",
            "biased",
        )
    )
    return found


def compare(result: Result[Any]) -> list[Statement]:
    """Whose memory grows with the inner steps, and whose is FO-MAML's."""
    maml = memory_exponent(result, MAML, "steps")
    first = [m for m in result.config.methods if m not in (MAML, IMAML, TANGENT)]
    flat = max(memory_exponent(result, method, "steps") for method in first)
    ours, plain, implicit = (memory(result, method) for method in (SYMMETRIC, FO_MAML, IMAML))
    return [
        Statement(
            maml > 1 - NEAR and flat < 0.05 and ours < 1.1 * plain and implicit > 1.1 * ours,
            f"MAML's memory goes as K to the {maml:.2f}, that of first-order methods as K to the"
            f" {flat:.2f} at most; FO-B-MAML's ({ours:.3g} copies of θ) is FO-MAML's ({plain:.3g}),"
            f" iMAML's above ({implicit:.3g})",
            f"memory goes as K to the {maml:.2f} with MAML and up to {flat:.2f} with first-order"
            f" methods; FO-B-MAML needs {ours:.3g} copies of θ, FO-MAML {plain:.3g}, iMAML"
            f" {implicit:.3g}",
            "memory",
        )
    ]


def _space(result: Result[Any]) -> list[Statement]:
    growth = memory_exponent(result, SYMMETRIC, "examples")
    found = [
        Statement(
            growth < 0.05,
            "it does not depend on the number of examples",
            "Mem(θ) is not all of it: like a training step's it goes as the number of examples to"
            f" the {growth:.2f} (one backward pass)",
            "mem theta",
        )
    ]
    if TANGENT in result.config.methods:
        power, maml = (memory_exponent(result, method, "steps") for method in (TANGENT, MAML))
        words = (
            "differentiating in ν itself costs memory that goes as K to the"
            f" {power:.2f} in forward mode (the tangent), where MAML's goes as K to the {maml:.2f}"
        )
        found.append(
            Statement(
                power > maml / 2,
                words,
                f"the paper says that AD in ν brings MAML's memory back, but {words}",
                "ad in nu",
            )
        )
    return found


def _bias(result: Result[Any]) -> list[Statement]:
    powers = {method: exponents(result, method, GD).delta for method in result.config.methods}
    second = {method: powers[method] for method in (MAML, IMAML) if method in powers}
    numbers = ", ".join(f"{method} {power:.2f}" for method, power in second.items())
    found = [
        Statement(
            all(abs(power - 1) <= NEAR for power in second.values()),
            f"the error goes as δ ({numbers})",
            f"the error does not go as δ ({numbers})",
            "bias",
        )
    ]
    for method, bound, name in ((FORWARD, 1 / 2, "√δ"), (SYMMETRIC, 2 / 3, "δ^2/3")):
        if method in powers:
            words = f"{method} as δ^{powers[method]:.2f}, no worse than the bound {name}"
            found.append(
                Statement(
                    powers[method] > bound - NEAR,
                    words,
                    f"{method} goes as δ^{powers[method]:.2f}, worse than {name}",
                    "bias",
                )
            )
    return found


def _plateau(result: Result[Any], method: str) -> float:
    return min(result.values("error", what=PRECISION, method=method))


def _measured(result: Result[Any]) -> str:
    last, largest = min(result.config.precisions), max(result.config.conditions)
    parts = []
    for method in result.config.methods:
        found = reach(result, method, NESTEROV, largest, last)
        if found is not None and math.isfinite(found.steps):
            products = f" and {found.products:.0f} Hessian products" if found.products else ""
            parts.append(f"{method} {found.gradients:.0f} gradients{products}")
    return (
        f"To an error of {last:g} at κ = {kappa(largest):g} with Nesterov's method:"
        f" {', '.join(parts)}."
    )
