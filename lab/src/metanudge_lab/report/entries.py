"""What there is to report: for each experiment its result, verdict, table and pictures, or that it
has not been run.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from metanudge.names import clock
from metanudge.training.errors import UserError
from metanudge_lab import claims
from metanudge_lab.claims import CLAIMS, Claim
from metanudge_lab.experiments import available, load
from metanudge_lab.experiments.base import Drawing, Experiment, Result, ResultTable, Shown, Verdict
from metanudge_lab.experiments.store import find, result_file

_SENTENCE = re.compile(r"(?<=[.)])\s+(?=[A-Z])")
State = Literal["reproduced", "partly", "not", "unfinished", "missing"]
STATES: dict[State, str] = {
    "reproduced": "reproduced",
    "partly": "partly reproduced",
    "not": "not reproduced",
    "unfinished": "unfinished",
    "missing": "not run yet",
}


@dataclass(frozen=True)
class Entry:
    """One experiment on the page.

    Attributes:
        experiment: what it is.
        state: the verdict, or that there is none yet.
        measured, reason: as in the verdict.
        result: the rows; None where it has not been run.
        table: its numbers.
        drawings: its pictures.
        aside: what other result there is that is not shown.
        verdict: what state, measured and reason come from, once there is one.
    """

    experiment: Experiment[Any]
    state: State
    measured: str
    reason: str
    result: Result[Any] | None = None
    table: ResultTable | None = None
    drawings: list[Drawing] = field(default_factory=list)
    aside: str = ""
    verdict: Verdict | None = None

    @property
    def name(self) -> str:
        """Of the experiment."""
        return self.experiment.name

    @property
    def status(self) -> str:
        """The state in words."""
        return STATES[self.state]

    @property
    def command(self) -> str:
        """What to type for the full measurement."""
        return f"metanudge reproduce {self.name}"

    @property
    def whose(self) -> str:
        """Who claims what is judged."""
        return "Our claim" if self.experiment.where == "not in the paper" else "The paper"

    @property
    def gist(self) -> str:
        """The first sentence of what was measured."""
        return _SENTENCE.split(self.measured, maxsplit=1)[0]

    @property
    def settings(self) -> list[tuple[str, str]]:
        """The configuration as text."""
        config = {} if self.result is None else dataclasses.asdict(self.result.config)
        return [
            (key, ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value))
            for key, value in config.items()
        ]

    @property
    def facts(self) -> list[tuple[str, str]]:
        """Seeds, cells and time."""
        if self.result is None:
            return []
        cells, missing = len(self.result.measured), len(self.result.missing)
        seeds = self.result.distinct("seed")
        rows = (
            [("seeds", ", ".join(map(str, seeds)) or "none: nothing random")]
            if self.result.measured
            else []
        )
        rows.append(("cells", f"{cells} of {cells + missing}" if missing else str(cells)))
        return [
            *rows,
            ("time", clock(self.result.seconds)),
            ("rows", str(result_file(Path(), self.name, self.result.mode))),
        ]

    @property
    def not_run(self) -> list[str]:
        """What is planned and was not measured, with how many seeds."""
        missing = [] if self.result is None else self.result.missing
        parts = [", ".join(str(v) for k, v in cell.items() if k != "seed") for cell in missing]
        return [
            text if count == 1 else f"{text} ({count} times)"
            for text, count in Counter(parts).items()
        ]

    @property
    def machines(self) -> list[list[tuple[str, str]]]:
        """Where it was measured: one list of facts for each machine and commit."""
        return (
            []
            if self.result is None
            else [machine_facts(machine) for machine in self.result.machines]
        )


def gather(folder: Path) -> list[Entry]:
    """An entry for every experiment, from the results in a folder."""
    return [entry(load(name), folder) for name in available()]


def entry(experiment: Experiment[Any], folder: Path) -> Entry:
    """The entry of one experiment."""
    results = find(experiment, folder)
    if not results or not results[0].measured:
        return Entry(experiment, "missing", "", "")
    result, others = results[0], results[1:]
    try:
        table, drawings = experiment.table(result), experiment.draw(result)
        verdict = experiment.judge(result) if experiment.enough(result) else None
    except KeyError as error:
        file = result_file(folder, experiment.name, result.mode)
        raise UserError(
            f"{file}: its rows lack {error}, which {experiment.name} has now. Measure anew with"
            " --restart."
        ) from error
    aside = "".join(f"There is also {_described(other)}, not shown. " for other in others).strip()
    if verdict is None:
        done, total = len(result.measured), len(result.measured) + len(result.missing)
        return Entry(
            experiment,
            "unfinished",
            f"{done} of {total} cells are measured.",
            "No verdict before all are.",
            result,
            table,
            drawings,
            aside,
        )
    return Entry(
        experiment,
        verdict.status,
        verdict.measured,
        verdict.reason,
        result,
        table,
        drawings,
        aside,
        verdict,
    )


@dataclass(frozen=True)
class Answer:
    """One claim of the paper on the page: what answers it, and how."""

    claim: Claim
    state: claims.State

    @property
    def status(self) -> str:
        """The state in words."""
        return claims.STATES[self.state]


def answers(entries: list[Entry]) -> list[Answer]:
    """To every claim of the paper, from the verdicts there are."""
    verdicts = {entry.name: entry.verdict for entry in entries if entry.verdict is not None}
    return [Answer(claim, claim.state(verdicts)) for claim in CLAIMS]


def text_of(value: str | int | float | Shown | None) -> str:
    """A value of a table as it is shown.

    Example:
        >>> text_of(0.00123456), text_of(7), text_of(None), text_of(Shown(1.0, "100 %"))
        ('0.00123', '7', '–', '100 %')
    """
    if isinstance(value, Shown):
        return value.text
    if value is None:
        return "–"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def sort_key(value: str | int | float | Shown | None) -> str:
    """What a value of a table is sorted by: a number where there is one, else the text."""
    number = value.value if isinstance(value, Shown) else value
    return (
        repr(float(number))
        if isinstance(number, (int, float))
        else ""
        if number is None
        else str(number)
    )


def machine_facts(machine: dict[str, Any]) -> list[tuple[str, str]]:
    """Provenance in a few lines."""
    commit = (machine.get("commit") or "unknown")[:12] + (
        " with uncommitted changes" if machine.get("dirty") else ""
    )
    versions = ", ".join(
        f"{package} {machine.get(package)}" for package in ("metanudge", "torch", "numpy", "python")
    )
    device = machine.get("device") or "unknown"
    where = "" if device == "CPU" else f"{device} (CUDA {machine.get('cuda')}), "
    hardware = (
        f"{where}{machine.get('cpu')}, {machine.get('threads')} of {machine.get('cores')} cores"
    )
    return [
        ("commit", commit),
        ("hardware", hardware),
        ("versions", versions),
        ("date", str(machine.get("date", ""))[:10]),
    ]


def _described(result: Result[Any]) -> str:
    cells = "1 cell" if len(result.missing) == 1 else f"{len(result.missing)} cells"
    missing = "" if result.complete else f", unfinished ({cells} missing)"
    return f"a {result.mode} measurement{missing}"
