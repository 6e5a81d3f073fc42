"""Settings and results in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from metanudge.names import clock
from metanudge.page.found import Found
from metanudge.training.config import TrainConfig, flag, own_code
from metanudge.training.errors import UserError
from metanudge.training.spec_language import split

_METHODS = {
    "fobmaml": "FO-B-MAML", "maml": "MAML", "fomaml": "FO-MAML", "reptile": "Reptile",
    "imaml": "iMAML", "esmaml": "ES-MAML", "exact": "the exact gradient",
}  # fmt: skip


def title_of(spec: str) -> str:
    """A spec for readers.

    Example:
        >>> title_of("fobmaml:nu=0.1,nudge=gradient"), title_of("gradient_descent:lr=0.1,steps=5")
        ('FO-B-MAML (nu = 0.1, nudge = gradient)', 'gradient descent (lr = 0.1, steps = 5)')
    """
    try:
        name, options = ("", {}) if own_code(spec) else split("", spec)
    except UserError:  # not ours to judge here
        return spec
    if not name:
        return spec
    told = _METHODS.get(name, name.replace("_", " "))
    text = ", ".join(f"{key} = {value}" for key, value in options.items())
    return f"{told} ({text})" if text else told


def lead(config: TrainConfig) -> str:
    """What was trained, in a sentence."""
    method = title_of(config.estimator).partition(" (")[0]
    return f"Meta-trained with {method} on {data_of(config)}: {tasks_of(config)}."


def data_of(config: TrainConfig) -> str:
    """The data set's name, or that of its file or folder."""
    return Path(config.data).name or config.data


def tasks_of(config: TrainConfig) -> str:
    """What a task is made of."""
    if config.target:
        column = f", one for each {config.task_column}" if config.task_column else ""
        return f"tasks that predict {config.target}{column}"
    if config.ways not in (None, 1):
        shots = "1 example" if config.shots == 1 else f"{config.shots} examples"
        return f"tasks of {config.ways} classes, with {shots} of each to adapt on"
    return f"regression tasks with {config.shots} points to adapt on"


def settings(found: Found) -> list[tuple[str, str]]:
    """What matters most, in words."""
    config = found.config
    summary = found.summary or {}
    count = summary.get("parameters")
    model = title_of(config.model) + (f", {count:,} parameters" if count else "")
    adapts = "" if config.adapt == "*" else f", of {config.adapt} alone"
    learned = [
        f"{what} learned ({how})"
        for what, how in (("λ", config.learn_lam), ("inner rates", config.learn_lr))
        if how != "none"
    ]
    outer = f"{config.iterations:,} meta-steps of {config.tasks} tasks"
    outer += f", {title_of(config.optimizer)}, {config.schedule}"
    rows = [
        ("data", f"{data_of(config)}: {tasks_of(config)}"),
        ("model", model),
        ("adaptation", f"{title_of(config.solver)}{adapts}; λ = {config.lam:g}"),
        ("meta-gradient", title_of(config.estimator)),
        ("learned, too", "; ".join(learned)),
        ("outer loop", outer),
        ("seed", str(config.seed)),
    ]
    return [(name, value) for name, value in rows if value]


def all_settings(config: TrainConfig) -> list[tuple[str, str, bool]]:
    """Every flag, its value, and whether that is its default."""
    return [
        (flag(one.name) if one.name != "data" else "DATA", str(value), value == one.default)
        for one in fields(config)
        if (value := getattr(config, one.name)) is not None
    ]


def machine(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the numbers depend on besides the settings."""
    threads = summary["threads"]
    rows = [
        ("metanudge", summary["version"]),
        ("torch", summary["torch"]),
        ("numpy", summary["numpy"]),
        ("device", summary["device"]),
        ("processor", summary["processor"]),
        ("threads", None if threads is None else str(threads)),
        ("processes", str(summary["processes"] or 1)),
        ("time", clock(summary["seconds"] or 0.0)),
    ]
    return [(name, value) for name, value in rows if value is not None]


@dataclass(frozen=True)
class Bar:
    """A method beside the others: its name, its value as text, how long its bar is in percent, how
    much better the learner is than it, and whether it is the learner.
    """

    name: str
    value: str
    length: float | None
    gain: str
    own: bool = False


@dataclass(frozen=True)
class Numbers:
    """How one quantity is written: accuracies in percent, losses in four digits."""

    quantity: str

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> Numbers:
        """Of a test's result, or a row of an evaluation."""
        return cls("accuracy" if result.get("accuracy") is not None else "loss")

    def value(self, number: float | None) -> str:
        """One number."""
        if number is None:
            return "–"
        text = f"{100 * number:.2f} %" if self.quantity == "accuracy" else f"{number:.4g}"
        return text.replace("-", "−") if number < 0 else text

    def interval(self, result: Mapping[str, Any], *, key: str = "") -> str:
        """A number with its interval; `key` is the quantity where it is another."""
        name = key or self.quantity
        if result.get(name) is None:
            return "–"
        half = result.get(f"{name}_ci95")
        value = self.value(result[name])
        return value if half is None else f"{value.removesuffix(' %')} ± {self.value(half)}"

    def bars(
        self, own: Mapping[str, Any], beside: Mapping[str, Mapping[str, Any]] | None
    ) -> list[Bar]:
        """The learner and the baselines, best first."""
        percent = self.quantity == "accuracy"
        rows = [("this learner", own, "", True)] + [
            (name, found, self.interval(found, key="learner_better_by"), False)
            for name, found in (beside or {}).items()
        ]
        known = [row[self.quantity] for _, row, *_ in rows if row.get(self.quantity) is not None]
        worst = max(known, default=0.0)
        made = []
        for name, row, gain, is_own in rows:
            number = row.get(self.quantity)
            length = None
            if number is not None and (percent or worst > 0):
                length = min(100.0, max(0.0, 100 * number / (1.0 if percent else worst)))
            made.append((number, Bar(name, self.interval(row), length, gain, is_own)))
        order = -1.0 if percent else 1.0
        made.sort(key=lambda pair: (pair[0] is None, order * (pair[0] or 0.0)))
        return [bar for _, bar in made]

    def verdict(self, beside: Mapping[str, Mapping[str, Any]] | None) -> tuple[str, str]:
        """Whether meta-learning was worth it: good, half or bad, and a sentence; nothing where
        there are no baselines.
        """
        known = {
            name: (found["learner_better_by"], found["learner_better_by_ci95"] or 0.0)
            for name, found in (beside or {}).items()
            if found["learner_better_by"] is not None
        }
        if not known:
            return "", ""
        told = {}
        for name, (gain, interval) in known.items():
            size = {self.quantity: abs(gain), f"{self.quantity}_ci95": interval}
            told[name] = f"by {self.interval(size)} on the same tasks"
        for name, (gain, interval) in known.items():
            if -gain > interval:
                return "bad", f"{name[:1].upper()}{name[1:]} is better here, {told[name]}."
        for name, (gain, interval) in known.items():
            if gain <= interval:
                return "half", f"Not told apart from {name}: the difference is {told[name][3:]}."
        name = next(iter(known))
        return "good", f"Better than every baseline; than the best of them, {name}, {told[name]}."
