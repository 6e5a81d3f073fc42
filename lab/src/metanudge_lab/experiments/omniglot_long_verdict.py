"""Whether long training reaches what is published on Omniglot."""

from __future__ import annotations

from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.base import Cell, Result, Statement, Verdict
from metanudge_lab.experiments.omniglot_long_plan import (
    AIMS,
    ALL,
    RECIPE_METHOD,
    RECIPE_STEPS,
    Config,
)
from metanudge_lab.experiments.omniglot_rows import PUBLISHED
from metanudge_lab.experiments.omniglot_verdict import MARGIN
from metanudge_lab.experiments.spread import Mean, paired, sentence


def accuracies(
    result: Result[Config], setting: str, method: str, iterations: int, steps: int
) -> list[float]:
    """At the end, in percent, seed by seed; none where a run diverged."""
    where = {"setting": setting, "method": method, "iterations": iterations}
    return [100 * value for value in result.values("accuracy", kind="test", steps=steps, **where)]


def runs_of(result: Result[Config]) -> list[tuple[str, str, int]]:
    """Setting, method and meta-steps of what has been trained."""
    rows = result.rows(part="training")
    return list(
        dict.fromkeys(
            (str(row["setting"]), str(row["method"]), int(row["iterations"])) for row in rows
        )
    )


def recipes_of(result: Result[Config]) -> list[tuple[str, str, int]]:
    """Setting, recipe and meta-steps of the recipes that have been tried."""
    tried = {(row["setting"], row["recipe"]) for row in result.rows(part="recipe")}
    return [one for one in result.config.recipes if one[:2] in tried]


def by_recipe(result: Result[Config], setting: str, recipe: str, steps: int) -> list[float]:
    """With all ingredients of a recipe, in percent, seed by seed."""
    where = {"setting": setting, "recipe": recipe, "kind": "test"}
    return [100 * value for value in result.values("accuracy", steps=steps, **where)]


def gain(result: Result[Config], setting: str, recipe: str) -> Mean | None:
    """By how many points a recipe is ahead of the method without it, paired by seed."""
    length = max(1, RECIPE_STEPS // result.config.shorten)
    plain = accuracies(result, setting, RECIPE_METHOD, length, m.STEPS)
    better = by_recipe(result, setting, recipe, m.STEPS)
    return paired(better, plain) if len(better) == len(plain) and plain else None


def enough(result: Result[Config]) -> bool:
    """Whether all methods were trained in the first setting; what else is planned may be open."""
    setting, _, iterations, _ = result.config.plan[0]
    rates: Cell = {"part": "rates", "setting": setting}
    training: Cell = {"part": "training", "setting": setting, "iterations": iterations}
    wanted = [rates.items(), training.items()]
    return not any(one <= cell.items() for cell in result.missing for one in wanted)


def judge(result: Result[Config]) -> Verdict:
    """Whether FO-B-MAML, trained longer, reaches what is published and is not behind any baseline;
    and whether our recipes reach what we aim at.
    """
    statements: list[Statement] = []
    for setting, methods, length, seeds in result.config.plan:
        ours = accuracies(result, setting, m.LOSS, length, m.STEPS)
        where = f"{setting}, {length} meta-steps"
        if len(ours) < seeds:
            statements.append(Statement(None, where))
            continue
        statements.append(_level(setting, where, ours))
        for method in methods:
            if method in (m.FO_MAML, m.MAML, m.DAMPED):
                theirs = accuracies(result, setting, method, length, m.STEPS)
                statements.append(_beside(method, where, theirs, ours))
    for setting, recipe, _ in result.config.recipes:
        if recipe == ALL:
            found = by_recipe(result, setting, recipe, m.STEPS)
            words = f"{setting}: our aim of {AIMS[setting]:g} % with all ingredients"
            reached = sum(found) / len(found) >= AIMS[setting] if found else None
            yes = f"{words} is reached" if found else words
            statements.append(Statement(reached, yes, f"{words} is missed", "aim"))
    return Verdict.of(statements, measured(result))


def _level(setting: str, where: str, ours: list[float]) -> Statement:
    """Whether the published accuracy is reached: FO-B-MAML's, or MAML's where it has none."""
    whose = m.LOSS if setting in PUBLISHED[m.LOSS] else m.MAML
    published, ci = PUBLISHED[whose][setting]
    words = f"{where}: {published:g} ± {ci:g} %, published for {whose}, is {{}}"
    good = sum(ours) / len(ours) >= published - ci
    return Statement(good, words.format("reached"), words.format("missed"), "accuracy")


def _beside(method: str, where: str, theirs: list[float], ours: list[float]) -> Statement:
    """Whether a baseline is not ahead."""
    if len(theirs) != len(ours):
        return Statement(None, f"{where}: {method}")
    ahead = paired(theirs, ours)
    words = (
        f"{where}: {method} {{}} ahead by more than {MARGIN:g} points"
        f" ({ahead.mean:+.2f} ± {ahead.ci95:.2f}, paired by seed)"
    )
    fine = ahead.mean + ahead.half <= MARGIN
    return Statement(fine, words.format("is not"), words.format("may be"), "second order")


def measured(result: Result[Config]) -> str:
    """Accuracies of all that was trained, in words."""
    texts = []
    for setting, method, iterations in runs_of(result):
        ends = {
            k: accuracies(result, setting, method, iterations, k)
            for k in (m.STEPS, max(result.config.adapt_steps))
        }
        each = ", ".join(
            f"{Mean.of(values).text(2)} with {k} steps" for k, values in ends.items() if values
        )
        texts.append(f"{method}, {setting}, {iterations} meta-steps: {each or 'diverged'}")
    for setting, recipe, iterations in recipes_of(result):
        found = by_recipe(result, setting, recipe, m.STEPS)
        if found:
            texts.append(
                f"{RECIPE_METHOD} with {recipe}, {setting}, {iterations} meta-steps:"
                f" {Mean.of(found).text(2)}"
            )
    return sentence(*texts) if texts else ""
