"""Whether MAML by differences has MAML's gradient on the Transformer, and trains it as well."""

from __future__ import annotations

import math
import statistics

from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.base import Result, Statement, Verdict, numbers
from metanudge_lab.experiments.spread import Mean
from metanudge_lab.experiments.transformer_quality import COARSE, NAMES
from metanudge_lab.experiments.transformer_rows import (
    at_equal_cost,
    cosines,
    diverged,
    finals,
    lag,
    mean_of,
    unreached,
)
from metanudge_lab.experiments.transformer_runs import DIFFERENCE, Config

EVERYWHERE, MEDIAN = 0.99, 0.97  # cosines in float32, and in the coarser precisions
BITS = ("bf16", "bf16-true")
NOISE = 0.005  # losses closer than this are alike, whatever the seeds say


def enough(result: Result[Config]) -> bool:
    """Whether gradients were compared all along every training by differences."""
    return not any(cell["part"] == "quality" for cell in result.missing)


def judge(result: Result[Config]) -> Verdict:
    """Gradients first, then training at each inner rate, after equally many meta-steps."""
    statements = [
        _in_single(result),
        *(_in_coarse(result, precision) for precision in COARSE),
        *(_trains(result, inner) for inner in result.config.inner_rates),
        *(_in_bits(result, precision) for precision in BITS),
    ]
    told = [losses(result, inner) for inner in result.config.inner_rates]
    return Verdict.of(statements, " ".join([*told, all_cosines(result)]))


def _in_single(result: Result[Config]) -> Statement:
    found, missing = cosines(result, DIFFERENCE, "fp32") or [-1.0], unreached(result)
    words = f"in float32 the least cosine of all {len(found)} is {min(found):.4f}, "
    never = f", and {missing} points were not reached, as training diverged" if missing else ""
    fine = min(found) >= EVERYWHERE and not missing
    return Statement(fine, f"{words}at least {EVERYWHERE:g}", f"{words}aim {EVERYWHERE:g}{never}")


def _in_coarse(result: Result[Config], precision: str) -> Statement:
    found, name = cosines(result, DIFFERENCE, precision), NAMES[precision]
    if not found:
        return Statement(None, f"{name}, as there was no CUDA device")
    middle = statistics.median(found)
    words = f"in {name} the median is {middle:.4f} (least {min(found):.4f}), "
    return Statement(middle >= MEDIAN, f"{words}at least {MEDIAN:g}", f"{words}aim {MEDIAN:g}")


def _in_bits(result: Result[Config], precision: str) -> Statement:
    """The default estimator in bfloat16 beside itself in float32."""
    rows, name = result.rows(kind="bits", precision=precision), NAMES[precision]
    wanted = len(result.config.inner_rates) * len(result.config.points[:-1])
    if len(rows) < wanted:
        return Statement(None, f"FO-B-MAML's default in {name} beside itself in float32")
    least = min(-1.0 if math.isnan(value) else value for value in numbers(rows, "cosine"))
    words = f"FO-B-MAML's default in {name} has a least cosine of {least:.4f} to itself in float32"
    return Statement(
        least >= EVERYWHERE, f"{words}, at least {EVERYWHERE:g}", f"{words}, aim {EVERYWHERE:g}"
    )


def _trains(result: Result[Config], inner: float) -> Statement:
    """Not behind MAML by more than the interval of paired differences, which must be narrow enough
    to see FO-MAML behind, if FO-MAML is.
    """
    ours, theirs, first = (
        finals(result, method, inner) for method in (DIFFERENCE, m.MAML, m.FO_MAML)
    )
    where, seeds = f"at inner rate {inner:g}", result.config.seeds
    if min(len(ours), len(theirs), len(first)) < seeds:
        return Statement(
            None,
            f"training {where}, where MAML ran with {len(theirs)} and FO-MAML with {len(first)} of"
            f" {seeds} seeds",
        )
    alone = [seed for seed in diverged(ours) if seed not in diverged(theirs)]
    if alone:
        return Statement(
            False, "", f"{where} differences diverge with {len(alone)} seeds, MAML does not"
        )
    behind = lag(ours, theirs)
    if behind is None:
        return Statement(
            False, "", f"{where} too few trainings end to compare differences with MAML"
        )
    other, words = lag(first, theirs), f"{where} the loss is {_signed(behind)} from MAML's"
    if _is_behind(behind):
        return Statement(False, "", f"{words} after as many meta-steps, behind it")
    if other is not None and _is_behind(other) and behind.mean + behind.half >= other.mean:
        return Statement(
            False, "", f"{words}, too uncertain to tell it from FO-MAML's {_signed(other)}"
        )
    return Statement(True, f"{words} after as many meta-steps, not behind it")


def _is_behind(found: Mean) -> bool:
    return found.mean - found.half > 0 and found.mean > NOISE


def losses(result: Result[Config], inner: float) -> str:
    """Losses of all at one inner rate, and how far they are from MAML's after as many meta-steps
    and gradients, in words.
    """
    ends, rest = [], []
    theirs = finals(result, m.MAML, inner)
    cheap = at_equal_cost(result, m.MAML, inner, "gradients")
    for method in result.config.methods:
        own = finals(result, method, inner)
        if not own:
            continue
        found, failed = mean_of(list(own.values())), len(diverged(own))
        text = "diverged" if found is None else found.text(3)
        ends.append(f"{method} {text}" + (f" ({failed} diverged)" if failed and found else ""))
        equal = lag(at_equal_cost(result, method, inner, "gradients"), cheap)
        steps = lag(own, theirs)
        if method != m.MAML and steps is not None and equal is not None:
            rest.append(f"{method} {_signed(steps)} and {_signed(equal)}")
    if not ends:
        return ""
    apart = f" From MAML's, paired, at equal meta-steps and gradients: {'; '.join(rest)}."
    return f"Loss in the end at inner rate {inner:g}: {', '.join(ends)}.{apart if rest else ''}"


def all_cosines(result: Result[Config]) -> str:
    """Of every estimator, in words."""
    found = {
        method: values
        for method in result.distinct("method")
        if (values := cosines(result, method, "fp32"))
    }
    each = ", ".join(
        f"{method} {statistics.median(values):.3f} ({min(values):.3f})"
        for method, values in found.items()
    )
    return f"Median (least) cosine in float32 over all points: {each}."


def _signed(found: Mean) -> str:
    return f"{found.mean:+.4f} ± {found.ci95:.4f}"
