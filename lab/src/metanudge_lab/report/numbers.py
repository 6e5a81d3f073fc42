"""The numbers that the paper gives, and beside them ours, from the rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from metanudge_lab.experiments import (
    inner_noise,
    memory,
    memory_cnn,
    memory_length,
    memory_mnist1d,
    memory_width,
)
from metanudge_lab.experiments import lambda_effect as lams
from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.base import Result, ResultTable
from metanudge_lab.experiments.mnist1d_rows import curve, last_before
from metanudge_lab.experiments.mnist1d_verdict import (
    EARLY,
    EARLY_ACCURACY,
    FINAL_ACCURACY,
    FO_MAML_BELOW,
)
from metanudge_lab.experiments.nu_sensitivity_rows import QUADRATIC, best_of, errors_at
from metanudge_lab.experiments.omniglot_rows import PUBLISHED, lengths, longest
from metanudge_lab.experiments.omniglot_runs import FIVE_WAY
from metanudge_lab.experiments.power_laws import laws
from metanudge_lab.experiments.spread import short
from metanudge_lab.report.entries import Entry


@dataclass(frozen=True)
class Number:
    """One number of the paper.

    Attributes:
        where: its place there.
        what: it is of.
        theirs: as the paper gives it.
        by: the experiment that measures it.
        ours: from that experiment's rows.
    """

    where: str
    what: str
    theirs: str
    by: str
    ours: Callable[[Result[Any]], str]


def _omniglot(setting: str, method: str, result: Result[Any]) -> str:
    found = longest(result, setting, method)
    if found is None:
        return "not run"
    percent = replace(found, note="").text(2)
    return f"{percent} % after {lengths(result, setting, method)[-1]} meta-steps{found.note}"


def _early(result: Result[Any]) -> str:
    at = last_before(result, EARLY)
    return f"{curve(result, m.LOSS)[at].text(3)} after {at}"


def _final(result: Result[Any]) -> str:
    last = max(result.config.at)
    return f"{curve(result, m.LOSS)[last].text(3)} after {last}"


def _highest(result: Result[Any]) -> str:
    return max(curve(result, m.FO_MAML).values(), key=lambda one: one.mean).text(3)


def _megabytes(method: str, axis: memory.Axis, result: Result[Any]) -> str:
    """At the largest size; on MNIST-1D with the paper's shots."""
    sizes = result.distinct(axis.key)
    size = memory_mnist1d.PAPER_SHOTS if axis == memory_mnist1d.AXIS else max(sizes)
    where: dict[str, Any] = {axis.key: size}
    if axis == memory_cnn.AXIS:
        where["shots"] = result.config.shots[0]
    peak = memory.megabytes(memory.memory(result, method, **where))
    return f"{peak} MB, {axis.at.format(size)}"


def _error(last: bool, result: Result[Any]) -> str:
    steps = (max if last else min)(result.config.steps)
    nu, error = best_of(errors_at(result, QUADRATIC, steps))
    return f"{short(error)} at K = {steps}, ν = {nu:g}"


def _from_to(key: str, result: Result[Any]) -> str:
    curve = result.spreads(key, "lam", result.config.lams, problem=lams.SAME, kind="grid")
    first, *_, last = (found.median for found in curve.values())
    return f"{first:.3g} to {last:.3g}"


def _order(stencil: str, result: Result[Any]) -> str:
    found = laws(result, "delta").items()
    slopes = [one.slope for (_, nudge, what), one in found if (nudge, what) == ("loss", stencil)]
    return f"{min(slopes):.2f} to {max(slopes):.2f}"


def _inner_power(result: Result[Any]) -> str:
    return f"{inner_noise.power(result, inner_noise.OWN, 'inner'):.2f}"


def _whole_power(stencil: str, result: Result[Any]) -> str:
    own = inner_noise.power(result, inner_noise.OWN, "gradient", stencil)
    return f"{inner_noise.OUTER + own:.2f}"


_NOTES = {m.LOSS: "", m.IMAML: ", from its own paper (ours damped, as its code is)"}
_MNIST = "accuracy on MNIST-1D"
_DISTANCE = " to ".join(f"{one:g}" for one in lams.PAPER_DISTANCE)
NUMBERS = (
    *(
        Number(
            "Table 2",
            f"{method}, {setting}{_NOTES.get(method, ', from its own paper')}",
            f"{PUBLISHED[method][setting][0]:g} ± {PUBLISHED[method][setting][1]:g} %",
            "omniglot",
            partial(_omniglot, setting, m.DAMPED if method == m.IMAML else method),
        )
        for setting in FIVE_WAY
        for method in PUBLISHED
    ),
    Number("§ 6.2", f"{_MNIST} within {EARLY}", f"above {EARLY_ACCURACY:g}", "mnist1d", _early),
    Number("§ 6.2", f"{_MNIST} in the end", f"about {FINAL_ACCURACY:g}", "mnist1d", _final),
    Number("§ 6.2", f"FO-MAML's highest {_MNIST}", f"{FO_MAML_BELOW:g}", "mnist1d", _highest),
    *(
        Number(
            "§ 6.4",
            f"{method} on MNIST-1D",
            f"{memory_mnist1d.PAPER[method]:g} MB",
            "memory-mnist1d",
            partial(_megabytes, method, memory_mnist1d.AXIS),
        )
        for method in memory_mnist1d.PAPER
    ),
    *(
        Number(
            where,
            f"{method}, {what}",
            theirs,
            one.EXPERIMENT.name,
            partial(_megabytes, method, one.AXIS),
        )
        for where, what, theirs, one, method in (
            ("§ 6.4", "ConvNet", "about 10³ MB at 250", memory_cnn, m.LOSS),
            ("§ 6.4", "Transformer", "below 3·10² MB at 512", memory_width, m.LOSS),
            ("Figure 6", "Transformer", "about 10³ MB at 512", memory_length, m.MAML),
        )
    ),
    Number("Appendix A.1", "error, K = 100", "near 10⁻²", "nu-sensitivity", partial(_error, True)),
    Number(
        "Appendix A.1",
        "error, K = 5",
        "an order of magnitude above",
        "nu-sensitivity",
        partial(_error, False),
    ),
    Number(
        "Figure 5",
        "‖φ* − θ‖, λ = 0.1 to 10",
        _DISTANCE,
        "lambda-effect",
        partial(_from_to, "distance"),
    ),
    Number(
        "Appendix A.2",
        "condition number (ours was chosen so)",
        "25 to 5",
        "lambda-effect",
        partial(_from_to, "condition"),
    ),
    Number("Corollary 1", "power of δ, forward", "1/2", "bias-rates", partial(_order, "forward")),
    Number(
        "Corollary 1", "power of δ, symmetric", "2/3", "bias-rates", partial(_order, "symmetric")
    ),
    Number("§ 5.3", "power of 1/δ, SGD steps", "1", "inner-noise", _inner_power),
    *(
        Number(
            "§ 5.3",
            f"power of 1/ε, all gradients, {stencil}",
            f"{theirs:g}",
            "inner-noise",
            partial(_whole_power, stencil),
        )
        for stencil, theirs in inner_noise.PAPER.items()
    ),
)


def beside(entries: list[Entry]) -> ResultTable:
    """The paper's numbers with ours, as far as they are measured."""
    results = {one.name: one.result for one in entries if one.verdict is not None}
    rows = []
    for one in NUMBERS:
        result = results.get(one.by)
        ours = "not measured yet" if result is None else one.ours(result)
        rows.append((one.where, one.what, one.theirs, ours, one.by))
    return ResultTable(("in the paper", "number", "the paper's", "ours", "experiment"), rows)
