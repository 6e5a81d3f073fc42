"""What the rows of the experiment on intents say."""

from __future__ import annotations

from typing import Any, NamedTuple

from metanudge_lab import style
from metanudge_lab.experiments.base import Drawing, Result, ResultTable, Shown, Statement, Verdict
from metanudge_lab.experiments.intents_baselines import BASELINES, LOGISTIC
from metanudge_lab.experiments.spread import Mean, paired

FROZEN, LORA = "frozen features", "LoRA"
CHOSEN = "chosen on validation classes"


class Setting(NamedTuple):
    """One comparison."""

    part: str
    data: str
    on: str
    ways: int
    shots: int

    @property
    def title(self) -> str:
        """For people."""
        trained = self.on if self.on == self.data else f"{self.data} → {self.on}"
        return f"{trained}, {self.ways}-way {self.shots}-shot"

    @property
    def group(self) -> str:
        """Of which statement it is a part."""
        return self.part if self.on == self.data else f"{self.part}, other data"


def settings(result: Result[Any]) -> list[Setting]:
    """Those of which there are rows of learners."""
    keys = ("part", "data", "on", "ways", "shots")
    found = [Setting(*(row[key] for key in keys)) for row in result.rows(kind="test")]
    return sorted(dict.fromkeys(found), key=lambda one: (one.part == LORA, one.on != one.data))


def by_fold(result: Result[Any], setting: Setting, method: str) -> dict[int, float]:
    """Test accuracy in %, fold by fold; baselines are those on frozen features."""
    part = FROZEN if method in BASELINES else setting.part
    where = {**setting._asdict(), "part": part}
    return {
        row["fold"]: 100 * row["accuracy"]
        for row in result.rows(kind="test", method=method, **where)
    }


def chosen_by_fold(result: Result[Any], setting: Setting) -> dict[int, float]:
    """Test accuracy of the learner that is best on a fold's validation classes."""
    found: dict[int, tuple[float, float]] = {}
    for row in result.rows(kind="test", **setting._asdict()):
        if row["method"] not in BASELINES:
            best = found.get(row["fold"], (-1.0, 0.0))
            found[row["fold"]] = max(best, (row["validation"], 100 * row["accuracy"]))
    return {fold: accuracy for fold, (_, accuracy) in found.items()}


def gain(result: Result[Any], setting: Setting, found: dict[int, float]) -> Mean | None:
    """Over logistic regression, paired by fold; None where there is nothing to compare."""
    other = by_fold(result, setting, LOGISTIC)
    both = sorted(found.keys() & other.keys())
    return paired([found[k] for k in both], [other[k] for k in both]) if both else None


def gains(result: Result[Any], setting: Setting) -> dict[str, tuple[dict[int, float], Mean | None]]:
    """Accuracies and the gain of each method, the chosen learner first."""
    found = {CHOSEN: chosen_by_fold(result, setting)}
    for method in (*result.distinct("method"),):
        found[method] = by_fold(result, setting, method)
    return {name: (one, gain(result, setting, one)) for name, one in found.items() if one}


def draw(result: Result[Any]) -> list[Drawing]:
    """Gains over logistic regression with their intervals, a panel for each setting."""
    shown = [one for one in settings(result) if chosen_by_fold(result, one)]
    columns = min(4, max(1, len(shown)))
    rows = max(1, -(-len(shown) // columns))
    figure, axes = style.figure(
        columns, rows, width=3.4 * columns + 1, height=2.6 * rows, squeeze=False
    )
    for panel in axes.flat[len(shown) :]:
        panel.set_visible(False)
    ends, known = [], list[str]()
    for number, (panel, setting) in enumerate(zip(axes.flat, shown, strict=False)):
        found = {name: one for name, (_, one) in gains(result, setting).items() if one is not None}
        found.pop(LOGISTIC, None)
        for place, one in enumerate(found.values()):
            panel.errorbar(one.mean, -place, xerr=one.half, fmt="o", markersize=4, color=style.INK)
        panel.axvline(0.0, color=style.INK, linewidth=0.8)
        at_left = number % columns == 0
        names = [] if list(found) == known and not at_left else list(found)
        known = list(found)
        panel.set_yticks([-k for k in range(len(found))], names or [""] * len(found))
        panel.set_title(f"{setting.part}\n{setting.title}", fontsize=8)
        panel.set_xlabel("points ahead of logistic regression", fontsize=8)
        panel.tick_params(labelsize=7)
        if CHOSEN in found:
            ends.append(f"{setting.part}, {setting.title}: {found[CHOSEN].text(2)}")
    alt = "Points of accuracy ahead of logistic regression on the same tasks, of the learner that"
    return [Drawing(figure, alt=f"{alt} is best on validation classes: {'; '.join(ends)}.")]


def table(result: Result[Any]) -> ResultTable:
    """Accuracy, and its difference to logistic regression."""
    rows: list[tuple[str | Shown | None, ...]] = []
    for setting in settings(result):
        for name, (found, more) in gains(result, setting).items():
            known = Shown.of(Mean.of([*found.values()]), 2)
            ahead = None if more is None or name == LOGISTIC else Shown.of(more, 2)
            rows.append((setting.part, setting.title, name, known, ahead))
    header = ("part", "tasks", "method", "accuracy, %", "ahead of logistic regression, points")
    return ResultTable(header, rows)


def enough(result: Result[Any]) -> bool:
    """Whether all was measured on frozen features; adapters may be open."""
    return not any(cell["part"] == FROZEN for cell in result.missing)


def judge(result: Result[Any]) -> Verdict:
    """In how many settings the chosen learner is ahead, the interval of the difference above 0."""
    statements, groups = compare(result), _by_group(result)
    if LORA not in groups:
        statements.append(Statement(None, "adapters"))
    measured = []
    for group, found in groups.items():
        told = ", ".join(f"{setting.title} {one.mean:+.2f} ± {one.ci95:.2f}"
                         for setting, one in found)  # fmt: skip
        measured.append(f"{group}: {told}")
    return Verdict.of(
        statements,
        f"Points ahead of logistic regression, paired by fold: {'; '.join(measured)}.",
    )


def compare(result: Result[Any]) -> list[Statement]:
    """Whether the chosen learner is ahead in at least half of the settings of a group."""
    statements = []
    for group, found in _by_group(result).items():
        ahead = sum(one.mean - one.half > 0 for _, one in found)
        behind = sum(one.mean + one.half < 0 for _, one in found)
        words = (
            f"on {group} the learner chosen on validation classes is ahead of logistic regression"
            f" beyond the interval in {ahead} of {len(found)} settings, behind in {behind}"
        )
        statements.append(Statement(2 * ahead >= len(found), words, words, group))
    return statements


def _by_group(result: Result[Any]) -> dict[str, list[tuple[Setting, Mean]]]:
    groups: dict[str, list[tuple[Setting, Mean]]] = {}
    for setting in settings(result):
        more = gain(result, setting, chosen_by_fold(result, setting))
        if more is not None:
            groups.setdefault(setting.group, []).append((setting, more))
    return groups
