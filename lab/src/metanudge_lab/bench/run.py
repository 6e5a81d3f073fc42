"""A run of the benchmark as configured: measure case by case, and write each result when it is
there.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from metanudge.engines.stacked import compilation
from metanudge.training.device import device_called
from metanudge.training.errors import UserError
from metanudge.training.files import write_text
from metanudge_lab.bench import tables
from metanudge_lab.bench.cases import Case, find_cases
from metanudge_lab.bench.config import BenchConfig
from metanudge_lab.bench.contender import Contender, choose
from metanudge_lab.bench.explain import explain
from metanudge_lab.bench.first_step import first_steps
from metanudge_lab.bench.ours import added
from metanudge_lab.bench.rounding import DEFAULT as ROUNDING
from metanudge_lab.bench.rounding import rounding
from metanudge_lab.bench.scaling import DEFAULT as SCALING
from metanudge_lab.bench.scaling import scale
from metanudge_lab.bench.suite import CONTENDERS, Result, compare
from metanudge_lab.progress import Progress


def run(config: BenchConfig, progress: Progress) -> Iterator[tuple[Path, Result]]:
    """Every result, and the file it was written to, as they come."""
    _check(config)
    device, cases = device_called(config.device), find_cases(config.case)
    default = (
        ("fobmaml-loss",)
        if config.explain
        else SCALING
        if config.scaling
        else ROUNDING
        if config.rounding
        else ()
    )
    contenders = choose([*CONTENDERS, *added()], config.only or default)
    if config.rounding:
        _check_ours(contenders)
    config.out.mkdir(parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    if config.quick and config.threads is None:
        config = dataclasses.replace(config, threads=1)  # more would only wait for each other
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    try:
        for case in cases:
            with compilation(config.compile):
                found = list(_measure(case, contenders, config, device, progress))
            for name, result in found:
                endings = [
                    device.type,
                    *([] if config.rounding else [config.precision]),
                    *(["quick"] if config.quick else []),
                ]
                file = config.out / f"{'-'.join([name, *endings])}.json"
                write(file, result)
                yield file, result
    finally:
        torch.set_num_threads(threads)


def _measure(
    case: Case,
    contenders: list[Contender],
    config: BenchConfig,
    device: torch.device,
    progress: Progress,
) -> Iterator[tuple[str, Result]]:
    if config.explain:
        for contender in contenders:
            if (reason := contender.absence(device)) is not None:
                raise UserError(f"{contender.name} cannot be explained here, {reason}.")
            progress.note(f"{case.name}: profiling {contender.name}")
            yield f"{case.name}-explain-{contender.name}", explain(case, contender, config, device)
    elif config.scaling:
        yield f"{case.name}-scaling", scale(case, contenders, config, device, progress)
    elif config.rounding:
        yield f"{case.name}-rounding", rounding(case, contenders, config, device, progress)
    else:
        first = (
            _first_steps(case, contenders, config, device, progress) if config.first_step else {}
        )
        result = compare(case, contenders, config, device, progress)
        result["failed"] += first.pop("failed", [])
        yield case.name, {**result, **first}


def _first_steps(
    case: Case,
    contenders: list[Contender],
    config: BenchConfig,
    device: torch.device,
    progress: Progress,
) -> Result:
    """Of the first contender that is ours; as an entry of the result, or of its failures."""
    own = next((c for c in contenders if c.ours), None)
    if own is None:
        return {}
    progress.note(f"{case.name}: first meta-step of a fresh process")
    options: Any = {
        "device": str(device),
        "precision": config.precision,
        "quick": config.quick,
        "threads": config.threads,
    }
    options["steps"] = config.steps
    if config.tasks is not None:
        options["tasks"] = config.tasks
    try:
        return {"first_step": first_steps(own.name, case.name, **options)}
    except RuntimeError as error:
        label = "The first meta-step of a fresh process"
        return {
            "failed": [
                {
                    "name": own.name,
                    "label": label,
                    "package": "metanudge",
                    "method": "",
                    "error": str(error),
                }
            ]
        }


def show(result: Result) -> list[tables.TextTable]:
    """A result as tables."""
    if result["kind"] == "explain":
        return tables.explanation(result)
    if result["kind"] == "scaling":
        return [tables.scaling(result)]
    if result["kind"] == "rounding":
        return [tables.rounding(result)]
    return [
        tables.comparison(result),
        *([tables.first_steps(result)] if "first_step" in result else []),
    ]


def write(file: Path, result: Result) -> None:
    """As JSON; the file gets its name when it is complete."""
    write_text(file, json.dumps(result, indent=1, allow_nan=False) + "\n")


def read(file: Path) -> Result:
    """A result written before; `UserError` where the file is none."""
    try:
        result: Any = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(
            f"There is no file {file}. metanudge bench writes results to results/bench."
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as a result of metanudge bench: {error}") from error
    if not isinstance(result, dict) or result.get("kind") not in (
        "compare",
        "scaling",
        "explain",
        "rounding",
    ):
        raise UserError(f"{file} is not a result of metanudge bench.")
    return result


def _check(config: BenchConfig) -> None:
    counts = {
        name: getattr(config, name)
        for name in ("repeats", "warmup", "steps", "tasks", "threads", "batches")
    }
    for name, number in counts.items():
        if number is not None and number < 1:
            raise UserError(f"--{name} {number} is too small. Use 1 or more.")
    modes = [f"--{name}" for name in ("explain", "scaling", "rounding") if getattr(config, name)]
    if len(modes) > 1:
        raise UserError(f"{' and '.join(modes)} measure different things. Use one at a time.")
    if config.rounding and config.precision != "fp32":
        raise UserError(
            f"--rounding measures every precision of the device, so --precision {config.precision}"
            " has no meaning. Leave it out."
        )
    if config.batches is not None and not config.rounding:
        raise UserError(
            f"--batches {config.batches} counts the meta-batches of --rounding. For more calls of"
            " each contender, use --repeats."
        )


def _check_ours(contenders: list[Contender]) -> None:
    for contender in contenders:
        if not contender.ours:
            own = ", ".join(c.name for c in CONTENDERS if c.ours)
            raise UserError(
                f"--rounding looks into metanudge's own arithmetic, but {contender.name} is"
                f" {contender.package}'s. Use {own}."
            )
