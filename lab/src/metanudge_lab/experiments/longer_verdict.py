"""Who keeps its accuracy when adaptation goes on, whether that is the estimator or the mismatch,
and what goes with it.
"""

from __future__ import annotations

import statistics

from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.base import Result, Statement, Verdict
from metanudge_lab.experiments.longer_rows import (
    RANDOM,
    SHORT,
    parts_of,
    percent,
    ranks_agree,
    ratio,
    sharpness,
)
from metanudge_lab.experiments.longer_runs import PARTS, Config, name_of, seeds_of
from metanudge_lab.experiments.spread import Mean, below, paired, short

KEPT = 2.0  # points: what may be lost
OTHERS = (m.FO_MAML, m.MAML)


def judge(result: Result[Config]) -> Verdict:
    """The parts of the claim on every data set that was measured."""
    parts = parts_of(result)
    statements = [_keeps(result, part) for part in parts] + compare(result)
    wanted = [part for part, seeds in seeds_of(result.config).items() if seeds]
    statements += [Statement(None, PARTS[part]) for part in wanted if part not in parts]
    texts = [text for part in parts for text in (_measured(result, part),)]
    return Verdict.of(statements, " ".join(texts), " ".join(_why(result, part) for part in parts))


def compare(result: Result[Config]) -> list[Statement]:
    """Who is ahead after the most steps, with the whole interval of differences paired by seed."""
    last = max(result.config.adapt_steps)
    found = []
    for part in parts_of(result):
        for other in OTHERS:
            ours, theirs = name_of(m.LOSS, SHORT), name_of(other, SHORT)
            found.append(_ahead(result, part, ours, theirs, last, "ahead"))
        for other in OTHERS:
            mended, plain = name_of(other, RANDOM), name_of(other, SHORT)
            found.append(_ahead(result, part, mended, plain, last, "mismatch"))
        for other in OTHERS:
            ours, theirs = name_of(m.LOSS, RANDOM), name_of(other, RANDOM)
            found.append(_ahead(result, part, ours, theirs, last, "estimator"))
        found += [_sharp(result, part, other) for other in OTHERS]
    return found


def _ahead(
    result: Result[Config], part: str, one: str, other: str, steps: int, name: str
) -> Statement:
    gain = paired(percent(result, part, one, steps), percent(result, part, other, steps))
    words = (
        f"{PARTS[part]}: after {steps} steps {one} is {{}} {other} ({_signed(gain)} points, paired"
        " by seed)"
    )
    return Statement(
        gain.mean - gain.half > 0,
        words.format("ahead of"),
        words.format("behind" if gain.mean + gain.half < 0 else "not clearly ahead of"),
        name,
    )


def _keeps(result: Result[Config], part: str) -> Statement:
    """The change of FO-B-MAML from the steps of training to the most."""
    trained, last = name_of(m.LOSS, SHORT), max(result.config.adapt_steps)
    change = paired(percent(result, part, trained, last), percent(result, part, trained, m.STEPS))
    words = (
        f"{PARTS[part]}: {trained}, {{}} from {m.STEPS} steps to {last}"
        f" ({_signed(change)} points; {KEPT:g} are allowed)"
    )
    return Statement(
        change.mean - change.half >= -KEPT,
        words.format("keeps its accuracy"),
        words.format("may lose accuracy"),
        "keeps",
    )


def _sharp(result: Result[Config], part: str, other: str) -> Statement:
    """Whether the first step is further from overshooting at FO-B-MAML's θ."""
    ours, theirs = (
        sharpness(result, part, name_of(method, SHORT), 0) for method in (m.LOSS, other)
    )
    words = (
        f"{PARTS[part]}: α(L̂ + λ) at θ is {{}} with {m.LOSS} than with {other}"
        f" ({short(statistics.median(ours))} against {short(statistics.median(theirs))})"
    )
    return Statement(
        below(ours, theirs), words.format("lower"), words.format("not clearly lower"), "why"
    )


def _measured(result: Result[Config], part: str) -> str:
    """Accuracy after 5, 16 and the most steps, of all that was trained."""
    texts = []
    for trained in result.config.trained:
        found = [percent(result, part, trained, steps) for steps in _shown(result)]
        if all(found):
            told = ", ".join(Mean.of(values).text(1) for values in found)
            texts.append(f"{trained}: {told}")
    steps = ", ".join(map(str, _shown(result)))
    return f"{PARTS[part]}, percent after {steps} steps: {'; '.join(texts)}."


def _shown(result: Result[Config]) -> list[int]:
    return [m.STEPS, 16, max(result.config.adapt_steps)]


def _why(result: Result[Config], part: str) -> str:
    """What goes with losing accuracy over all runs, and what a smaller step makes of it."""
    last = max(result.config.adapt_steps)
    lost, walked, slow = list[float](), list[float](), list[str]()
    sharp: dict[int, list[float]] = {0: [], m.STEPS: []}
    for trained in result.config.trained:
        before, after = (percent(result, part, trained, steps) for steps in (m.STEPS, last))
        if not before:
            continue
        lost += [one - other for one, other in zip(before, after, strict=True)]
        for steps, found in sharp.items():
            found += sharpness(result, part, trained, steps)
        walked += ratio(result, part, trained, "distance", (last, m.STEPS))
        if trained in (name_of(m.LOSS, SHORT), *(name_of(other, SHORT) for other in OTHERS)):
            quarter = Mean.of(percent(result, part, trained, last, "slower"))
            left = ratio(result, part, trained, "residual", (m.STEPS, 0))
            apart = ratio(result, part, trained, "distance", (last, m.STEPS))
            slow.append(
                f"{trained} {quarter.text(1)} % (with all of it the residual is"
                f" {short(statistics.median(left))} of that at θ after {m.STEPS} steps, and"
                f" ‖φ − θ‖ after {last} is {short(statistics.median(apart))} of that after"
                f" {m.STEPS})"
            )
    chosen = [row["inner"] for row in result.rows(part=part, kind="chosen")]
    tried = [row["inner"] for row in result.rows(part=part, kind="tried")]
    edge = sum(rate in (min(tried), max(tried)) for rate in chosen) if tried else 0
    return (
        f"{PARTS[part]}: {edge} of {len(chosen)} searches chose an inner rate at an end of the"
        f" grid. Over {len(lost)} runs the points lost from {m.STEPS} to {last} steps go"
        f" with α(L̂ + λ) at θ (rank correlation {ranks_agree(sharp[0], lost):.2f}), with that"
        f" after {m.STEPS} steps ({ranks_agree(sharp[m.STEPS], lost):.2f}) and with how much"
        f" further from θ they lead ({ranks_agree(walked, lost):.2f}). With"
        f" {result.config.slower:g} times the inner rate {last} steps reach {', '.join(slow)}."
    )


def _signed(found: Mean) -> str:
    return f"{found.mean:+.1f} ± {found.ci95:.1f}"
