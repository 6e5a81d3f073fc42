"""Measuring: cell by cell, saved after each, resumed where it stopped."""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from metanudge.names import near
from metanudge.training.device import device_called
from metanudge.training.errors import UserError
from metanudge_lab.experiments import available, store
from metanudge_lab.experiments.base import (
    Cell,
    Experiment,
    FinishedCell,
    Mode,
    Result,
    json_safe,
    label,
)
from metanudge_lab.experiments.working import forget, working_in
from metanudge_lab.progress import Lines, Progress
from metanudge_lab.provenance import provenance, same_machine


@dataclass(frozen=True)
class Options:
    """How to measure.

    Attributes:
        mode: "full" or "quick".
        folder: where results go (see `metanudge_lab.experiments.store`).
        device: "auto" (CUDA where there is one), "cpu", "cuda" or "cuda:1".
        limit_seconds: start no cell that would probably end later than this after the start.
        pattern: measure only cells whose label contains or matches it, such as "method=MAML*" or
            "seed=0".
        restart: forget what was measured before, instead of going on from it.
    """

    mode: Mode = "full"
    folder: Path = Path("results")
    device: str = "auto"
    limit_seconds: float | None = None
    pattern: str = "*"
    restart: bool = False


def run(
    experiment: Experiment[Any],
    options: Options,
    *,
    progress: Progress | None = None,
    config: Any = None,
) -> Result[Any]:
    """Measure the cells that are missing, save after each, and give what there is then.

    Args:
        experiment: what to measure.
        options: how.
        progress: where news go; plain lines when left out.
        config: other settings than the mode's.
    """
    show = progress if progress is not None else Lines()
    started = time.monotonic()
    device = device_called(options.device)
    file = store.result_file(options.folder, experiment.name, options.mode)
    result = _former(
        experiment,
        file,
        options,
        config if config is not None else experiment.configuration(options.mode),
    )
    wanted = [cell for cell in result.missing if matches(cell, options.pattern)]
    if not wanted:
        if result.missing:
            raise UserError(_nothing_matches(options.pattern, result.missing))
        show.note(
            f"{experiment.name}: all {len(result.measured)} cells are there ({file}); --restart"
            " measures anew"
        )
        return result
    experiment.remember(result)
    result, machine = _with_machine(result, provenance(device))
    show.begin(experiment.name, total=len(result.measured) + len(wanted), done=len(result.measured))
    longest = max((one.seconds for one in result.measured if one.machine == machine), default=0.0)
    try:
        for number, cell in enumerate(wanted):
            elapsed = time.monotonic() - started
            if options.limit_seconds is not None and elapsed + longest > options.limit_seconds:
                show.note(
                    _stopped(
                        experiment.name, elapsed, options.limit_seconds, wanted[number:], longest
                    )
                )
                break
            show.start(label(cell))
            begun = time.monotonic()
            with working_in(store.working_folder(file, result.config, cell)):
                rows = json_safe(experiment.measure(dict(cell), result.config, device))
                seconds = time.monotonic() - begun
                longest = max(longest, seconds)
                result = _with_cell(result, FinishedCell(cell, rows, round(seconds, 3), machine))
                store.save(file, result)
            show.finish(label(cell), seconds)
    finally:
        show.end()
    return result


def take(experiment: Experiment[Any], options: Options, folders: Iterable[Path]) -> Result[Any]:
    """Add the cells of results in other folders, measured in pieces or on several machines, to
    those of the options' folder, and save them there. What is there already stays.
    """
    file = store.result_file(options.folder, experiment.name, options.mode)
    result = _former(experiment, file, options, experiment.configuration(options.mode))
    for folder in folders:
        source = store.result_file(folder, experiment.name, options.mode)
        if not source.is_file():
            raise UserError(f"There is no {source}. Name folders that were given as --out.")
        if differences := store.changes(experiment, source, result.config):
            raise UserError(
                f"{source} was measured under another configuration ({'; '.join(differences)})."
                " Cells of different configurations cannot be joined."
            )
        found = store.read(experiment, source)
        for one in found.measured:
            if one.cell in result.missing:
                result, machine = _with_machine(result, found.machines[one.machine])
                result = _with_cell(result, replace(one, machine=machine))
    store.save(file, result)
    return result


def check_names(names: Iterable[str]) -> tuple[str, ...]:
    """The experiments of these names, `all` for every one; `UserError` suggests the nearest for an
    unknown name.
    """
    known, asked = available(), tuple(names)
    for name in asked:
        if name not in (*known, "all"):
            hint = near(name.replace("_", "-"), (*known, "all"))
            raise UserError(
                f"There is no experiment {name!r}.{hint} The experiments are {', '.join(known)};"
                " all runs every one."
            )
    return known if "all" in asked else tuple(dict.fromkeys(asked))


def matches(cell: Cell, pattern: str) -> bool:
    """Whether a cell's label contains or matches a pattern.

    Example:
        >>> (matches({"method": "MAML", "seed": 0}, "method=MAML"),
        ...     matches({"method": "MAML", "seed": 0}, "*seed=[12]"))
        (True, False)
    """
    return pattern in label(cell) or fnmatch.fnmatchcase(label(cell), pattern)


def _former(experiment: Experiment[Any], file: Path, options: Options, config: Any) -> Result[Any]:
    """What was measured before under the same config, or nothing."""
    cells = json_safe(experiment.cells(config))
    assert len({label(cell) for cell in cells}) == len(cells), (
        f"{experiment.name}: cells are not distinct"
    )
    fresh = Result(experiment.name, options.mode, config, missing=cells)
    if options.restart:
        for cell in cells:
            forget(store.working_folder(file, config, cell))
        return fresh
    if not file.is_file():
        return fresh
    differences = store.changes(experiment, file, config)
    if differences:
        raise UserError(
            f"{file} was measured under another configuration ({'; '.join(differences)}). Add"
            " --restart to measure anew, which replaces it, or name another folder with --out."
        )
    return store.read(experiment, file)


def _with_machine(result: Result[Any], machine: dict[str, Any]) -> tuple[Result[Any], int]:
    for number, known in enumerate(result.machines):
        if same_machine(known, machine):
            return result, number
    return replace(result, machines=[*result.machines, machine]), len(result.machines)


def _with_cell(result: Result[Any], measured: FinishedCell) -> Result[Any]:
    return replace(
        result,
        measured=[*result.measured, measured],
        missing=[cell for cell in result.missing if cell != measured.cell],
    )


def _nothing_matches(pattern: str, missing: list[Cell]) -> str:
    examples = "; ".join(label(cell) for cell in missing[:3])
    return (
        f"--cells {pattern!r} matches none of the {len(missing)} cells that are left, such as"
        f" {examples}."
    )


def _stopped(name: str, elapsed: float, limit: float, left: list[Cell], longest: float) -> str:
    return (
        f"{name}: stopped after {elapsed:.0f} s to stay within {limit:g} s, since a cell has taken"
        f" up to {longest:.1f} s; {len(left)} cells are left, the next is {label(left[0])}. The"
        " same command goes on from here."
    )
