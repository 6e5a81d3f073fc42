"""Results on disk: one JSON file an experiment, written whole or not at all.

FOLDER/NAME.json          full
FOLDER/quick/NAME.json    quick
FOLDER/figures/           PNG and SVG, drawn from the files above
FOLDER/NAME.cells/        while a cell is measured, what it needs to go on after a crash
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from metanudge.training import files
from metanudge.training.errors import UserError
from metanudge_lab.experiments.base import (
    MODES,
    Cell,
    Experiment,
    FinishedCell,
    Mode,
    Result,
    json_safe,
)

FORMAT = 1
REPAIR = "Delete it, or measure anew with --restart."


def result_file(folder: Path, name: str, mode: Mode) -> Path:
    """Where the rows of an experiment are."""
    return folder / f"{name}.json" if mode == "full" else folder / "quick" / f"{name}.json"


def working_folder(file: Path, config: Any, cell: Cell) -> Path:
    """Where a cell keeps what it needs to go on after a crash; another one for another config."""
    content = json.dumps(json_safe([dataclasses.asdict(config), cell]), sort_keys=True)
    return file.with_suffix(".cells") / hashlib.sha256(content.encode()).hexdigest()[:16]


def save(file: Path, result: Result[Any]) -> None:
    """Write a result; a crash leaves the former file as it was."""
    content = {
        "format": FORMAT,
        "experiment": result.name,
        "mode": result.mode,
        "config": dataclasses.asdict(result.config),
        "machines": result.machines,
        "cells": [dataclasses.asdict(measured) for measured in result.measured],
    }
    write_text(file, _readable(json_safe(content)))


def write_text(file: Path, text: str) -> None:
    """Write a text file that is there complete or not at all."""
    write_bytes(file, text.encode("utf-8"))


def write_bytes(file: Path, content: bytes) -> None:
    """Write a file that is there complete or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    files.write_bytes(file, content)


def read(experiment: Experiment[Any], file: Path) -> Result[Any]:
    """The result in a file; `UserError` names the file and what is wrong with it."""
    content = _content(experiment, file)
    try:
        config = experiment.config(
            **{key: _tuples(value) for key, value in content["config"].items()}
        )
    except TypeError as error:
        raise UserError(
            f"{file} was measured with other options than {experiment.name} has now ({error})."
            f" {REPAIR}"
        ) from error
    measured = [_measured(file, number, entry) for number, entry in enumerate(content["cells"])]
    done = [one.cell for one in measured]
    missing = [cell for cell in json_safe(experiment.cells(config)) if cell not in done]
    return Result(experiment.name, content["mode"], config, measured, content["machines"], missing)


def find(experiment: Experiment[Any], folder: Path) -> list[Result[Any]]:
    """The results of an experiment in a folder, the one to show first: full before quick, where at
    least half of it is there.
    """
    files = [result_file(folder, experiment.name, mode) for mode in MODES]
    return sorted(
        (read(experiment, file) for file in files if file.is_file()),
        key=lambda result: len(result.missing) > len(result.measured),
    )


def changes(experiment: Experiment[Any], file: Path, config: Any) -> list[str]:
    """What differs between the config in a file and this one, as "steps: 5 → 10"."""
    saved, wanted = _content(experiment, file)["config"], json_safe(dataclasses.asdict(config))
    keys = dict.fromkeys([*saved, *wanted])
    return [
        f"{key}: {saved.get(key, 'absent')} → {wanted.get(key, 'absent')}"
        for key in keys
        if saved.get(key) != wanted.get(key)
    ]


def _content(experiment: Experiment[Any], file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} cannot be read as JSON ({error}). {REPAIR}") from error
    shapes = {"experiment": str, "mode": str, "config": dict, "machines": list, "cells": list}
    wrong = [
        key
        for key, kind in shapes.items()
        if not isinstance(content, dict) or not isinstance(content.get(key), kind)
    ]
    if wrong:
        raise UserError(
            f"{file} is not the result of an experiment: {', '.join(wrong)} missing or of the wrong"
            f" kind. {REPAIR}"
        )
    if content.get("format") != FORMAT or content["mode"] not in MODES:
        raise UserError(
            f"{file} has format {content.get('format')!r}, mode {content['mode']!r}; this version"
            f" reads {FORMAT}. {REPAIR}"
        )
    if content["experiment"] != experiment.name:
        raise UserError(
            f"{file} holds {content['experiment']!r}, not {experiment.name!r}: was it renamed?"
            f" {REPAIR}"
        )
    return content


def _measured(file: Path, number: int, entry: Any) -> FinishedCell:
    try:
        return FinishedCell(
            cell=dict(entry["cell"]),
            rows=list(entry["rows"]),
            seconds=float(entry["seconds"]),
            machine=int(entry["machine"]),
        )
    except (TypeError, KeyError, ValueError) as error:
        raise UserError(f"{file}: cell {number} is damaged ({error!r}). {REPAIR}") from error


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _readable(content: dict[str, Any]) -> str:
    """JSON with one row a line: compact, and where one number changes, one line changes."""
    head = _dumps({key: value for key, value in content.items() if key != "cells"}, indent=2)
    cells = ",\n".join(map(_cell, content["cells"]))
    return f'{head[:-2]},\n  "cells": [\n{cells}\n  ]\n}}\n'


def _cell(cell: dict[str, Any]) -> str:
    head = _dumps({key: value for key, value in cell.items() if key != "rows"})
    rows = ",\n      ".join(map(_dumps, cell["rows"]))
    return f'    {head[:-1]}, "rows": [\n      {rows}\n    ]}}'


def _dumps(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
