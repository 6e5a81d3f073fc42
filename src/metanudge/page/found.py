"""What there is to show of a run: its settings, result, curve and evaluation, from its folder.

The folder may be a stranger's. Its JSON files are held against the form that a run writes; no code
is imported, no data are read and no link is followed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metanudge.tasks.episodes import SPLITS
from metanudge.training.config import TrainConfig
from metanudge.training.errors import UserError, readable
from metanudge.training.evaluation import eval_file
from metanudge.training.files import is_intact, parse_json, read_bytes
from metanudge.training.metrics import read_metrics
from metanudge.training.runs import METRICS, SUMMARY, read_config
from metanudge.training.summary import check_summary

_MOST_BYTES = 1 << 26
_LARGEST = 1e100


@dataclass(frozen=True)
class Maybe:
    """A key that may be missing or null."""

    form: Any


@dataclass(frozen=True)
class Named:
    """An object with any keys, whose values have one form."""

    form: Any


Number = float | None
_BESIDE = Named(
    {"tasks": int, "accuracy": Maybe(Number), "accuracy_ci95": Maybe(Number), "loss": Maybe(Number),
     "loss_ci95": Maybe(Number), "learner_better_by": Number, "learner_better_by_ci95": Number}
)  # fmt: skip
_TEST = {
    "tasks": Maybe(int), "loss": Number, "loss_ci95": Maybe(Number), "loss_before": Maybe(Number),
    "accuracy": Maybe(Number), "accuracy_ci95": Maybe(Number), "accuracy_before": Maybe(Number),
}  # fmt: skip
_SUMMARY = {
    "version": str, "steps": int, "seconds": Number, "checkpoint_step": Maybe(int),
    "parameters": Maybe(int), "torch": Maybe(str), "numpy": Maybe(str), "device": Maybe(str),
    "processor": Maybe(str), "threads": Maybe(int), "processes": Maybe(int),
    "test": Maybe(_TEST), "baselines": Maybe(_BESIDE),
}  # fmt: skip
_ROW = {
    "steps": int, "batch_norm": Maybe(str), "loss": Number, "loss_ci95": Number,
    "accuracy": Number, "accuracy_ci95": Number, "worst_decile": Number, "diverged": int,
    "r2": Number, "rmse": [Number],
}  # fmt: skip
_CLASS = {
    "name": str, "accuracy": float, "examples": int,
    "taken_for": [{"name": str, "times": int, "examples": int}],
}  # fmt: skip
_EVALUATION = {
    "step": int, "tasks": int, "split": str, "steps": int, "rows": [_ROW], "classes": [_CLASS],
    "baselines": Maybe(_BESIDE),
    "shown": [{"class": str, "taken_for": str, "example": Named(str), "like": Named(str)}],
}  # fmt: skip


@dataclass(frozen=True)
class Found:
    """A run, as its folder has it.

    Attributes:
        folder: of the run.
        config: as it was started.
        rows: of its metrics.
        summary: its result; None where it has none yet.
        evaluation: what `metanudge eval` found on the test tasks (else validation, else training
            tasks); None where it was not run.
        notes: what is wrong with the files.
    """

    folder: Path
    config: TrainConfig
    rows: list[dict[str, Any]]
    summary: dict[str, Any] | None
    evaluation: dict[str, Any] | None
    notes: list[str]

    @property
    def steps(self) -> int:
        """Meta-steps that were done."""
        last = max((row["step"] for row in self.rows), default=0)
        return max(last, 0 if self.summary is None else self.summary["steps"])

    @property
    def finished(self) -> bool:
        """Whether there is a result after as many meta-steps as were asked for."""
        return self.summary is not None and self.summary["steps"] >= self.config.iterations


def read_run(folder: Path) -> Found:
    """Read the folder of a run; `UserError` where there is none, or a file of it is not what a run
    writes.
    """
    config = read_config(folder, trust=True)  # nothing that it names is imported or fetched
    notes: list[str] = []
    check_summary(folder, notes.append)
    with readable(folder / METRICS):
        rows = [row for row in read_metrics(folder / METRICS, note=notes.append) if _sound(row)]
    summary = _document(folder / SUMMARY, _SUMMARY, "Resume the run to its end")
    evaluation = None
    for split in reversed(SPLITS):
        file = eval_file(folder, split)
        evaluation = _document(file, _EVALUATION, "Run metanudge eval again", notes)
        if evaluation is not None:
            break
    return Found(folder, config, rows, summary, evaluation, notes)


def _sound(row: Mapping[str, Any]) -> bool:
    return all(value is None or abs(value) < _LARGEST for value in row.values())


def _document(
    file: Path,
    form: Mapping[str, Any],
    remedy: str,
    notes: list[str] | None = None,
) -> dict[str, Any] | None:
    """A JSON file of a run, held against its form; None where there is none. Notes, if given, say
    where its seal is broken.
    """
    if not os.path.lexists(file):
        return None
    try:
        with readable(file):
            document = parse_json(read_bytes(file, limit=_MOST_BYTES))
        intact = isinstance(document, dict) and is_intact(document, indent=1)
        _hold(document, form, "it")
    except ValueError as error:
        raise UserError(f"{file} is not what a run writes: {error}. {remedy}.") from error
    if notes is not None and not intact:
        notes.append(f"{file} was changed after it was written: do not rely on its numbers.")
    found: dict[str, Any] = document
    return found


def _hold(value: Any, form: Any, name: str) -> None:
    """Raise a `ValueError` unless a JSON value has a form; missing keys that may be become None.

    Example:
        >>> _hold({"steps": [1, None]}, {"steps": [float | None], "note": Maybe(str)}, "it")
        >>> _hold({"steps": ["1"]}, {"steps": [float]}, "it")
        Traceback (most recent call last):
        ValueError: it.steps[0] is '1'
    """
    if isinstance(form, Maybe):
        if value is not None:
            _hold(value, form.form, name)
    elif isinstance(form, (dict, Named)):
        if not isinstance(value, dict):
            raise ValueError(f"{name} is {value!r:.40}")
        keys = dict.fromkeys(value, form.form) if isinstance(form, Named) else form
        for key, inner in keys.items():
            if key not in value and not isinstance(inner, Maybe):
                raise ValueError(f"{name} has no {key}")
            _hold(value.setdefault(key, None), inner, f"{name}.{key}")
    elif isinstance(form, list):
        if not isinstance(value, list):
            raise ValueError(f"{name} is {value!r:.40}")
        for place, item in enumerate(value):
            _hold(item, form[0], f"{name}[{place}]")
    elif not _is_a(value, form):
        raise ValueError(f"{name} is {value!r:.40}")


def _is_a(value: Any, form: Any) -> bool:
    if form is str:
        return isinstance(value, str)
    if value is None:
        return form == Number
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return (form is not int or isinstance(value, int)) and abs(value) < _LARGEST
