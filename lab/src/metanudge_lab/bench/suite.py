"""The comparison: every contender on one case, interleaved, as JSON values."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import torch

from metanudge.testing.memory import peak_memory
from metanudge.training.device import computing_in
from metanudge_lab.bench.cases import Case
from metanudge_lab.bench.config import BenchConfig
from metanudge_lab.bench.contender import Contender, ReadyContender
from metanudge_lab.bench.cost import CostModel, cost_model
from metanudge_lab.bench.ours import OURS
from metanudge_lab.bench.peaks import Peaks, measure_peaks
from metanudge_lab.bench.rivals import RIVALS
from metanudge_lab.bench.timing import Times, round_robin, timed
from metanudge_lab.bench.workload import Workload
from metanudge_lab.device_memory import release
from metanudge_lab.progress import Progress
from metanudge_lab.provenance import provenance

CONTENDERS: tuple[Contender, ...] = (*OURS, *RIVALS)
Result = dict[str, Any]


@dataclass(frozen=True)
class Entrant:
    """A contender that has warmed up: how long each warm-up call took (the first with all
    preparations), and its peak memory.
    """

    contender: Contender
    prepared: ReadyContender
    warmup: list[float]
    memory: int


def compare(
    case: Case,
    contenders: Sequence[Contender],
    config: BenchConfig,
    device: torch.device,
    progress: Progress,
) -> Result:
    """Measure one case."""
    until = time.monotonic() + config.limit_seconds
    workload = workload_of(case, config, device)
    present = [c for c in contenders if c.absence(device) is None]
    progress.begin(case.name, total=len(present) * (1 + config.repeats), done=0)
    entrants: list[Entrant] = []
    failed: list[Result] = []
    try:
        with computing_in(config.precision, device):
            peaks = measure_peaks(device, config.precision, quick=config.quick)
            model = cost_model(workload, config.precision)
            for contender in present:
                progress.start(f"{contender.name}, warming up")
                begin = time.monotonic()
                try:
                    entrants.append(enter(contender, workload, config))
                # whatever a foreign package raises; a rival that fails is a result
                except Exception as error:
                    failed.append({**names(contender), "error": describe(error)})
                    progress.note(f"{case.name}: {contender.name} failed. {failed[-1]['error']}")
                    release(device)
                progress.finish(f"{contender.name}, warm-up", time.monotonic() - begin)
            works = {entrant.contender.name: entrant.prepared.step for entrant in entrants}
            times = (
                round_robin(
                    works, rounds=config.repeats, device=device, until=until, done=progress.finish
                )
                if works
                else {}
            )
    finally:
        progress.end()
    return {
        "kind": "compare",
        "case": case.name,
        "title": title_of(case, config),
        **context(workload, config, device, peaks),
        "rows": [row(entrant, times[entrant.contender.name], model, peaks) for entrant in entrants],
        "failed": failed,
        "absent": [
            {**names(c), "reason": reason}
            for c in contenders
            if (reason := c.absence(device)) is not None
        ],
    }


def title_of(case: Case, config: BenchConfig) -> str:
    """The case for people; one at tiny sizes says so."""
    return f"{case.title} (tiny sizes)" if config.quick else case.title


def workload_of(case: Case, config: BenchConfig, device: torch.device, **sizes: Any) -> Workload:
    """The case as configured."""
    if config.tasks is not None:
        sizes.setdefault("tasks", config.tasks)
    sizes.setdefault("steps", config.steps)
    return case.make(device, quick=config.quick, **sizes)


def warmup_calls(config: BenchConfig, device: torch.device) -> int:
    """As configured; a GPU needs a few for choosing kernels and recording graphs."""
    return config.warmup if config.warmup is not None else 3 if device.type == "cuda" else 1


def enter(contender: Contender, workload: Workload, config: BenchConfig) -> Entrant:
    """Prepare and warm up a contender, and measure its memory.

    On a GPU the memory is that of preparation and warm-up, since recorded graphs allocate then and
    never again; on a CPU that of one more call.
    """
    device = workload.device
    ready: list[ReadyContender] = []
    times = Times()

    def first() -> None:
        ready.append(contender.prepare(workload))
        ready[0].step()

    def warm_up() -> None:
        timed(first, device, times)
        for _ in range(warmup_calls(config, device) - 1):
            timed(ready[0].step, device, times)

    if device.type == "cuda":
        memory = peak_memory(warm_up, device)
    else:
        warm_up()
        memory = peak_memory(ready[0].step, device)
    return Entrant(contender, ready[0], times.seconds, memory)


def row(entrant: Entrant, times: Times, model: CostModel, peaks: Peaks) -> Result:
    """Everything known about a contender, as JSON values."""
    work = entrant.prepared.work()
    cost = model.total(work, peaks)
    return {
        **names(entrant.contender),
        "engine": entrant.prepared.engine(),
        "seconds": times.describe(),
        "warmup_s": entrant.warmup,
        "memory_bytes": entrant.memory,
        "work_per_task": asdict(work),
        "gradients_per_s": work.gradients * model.tasks / times.median,
        "flops": cost.flops,
        "least_bytes": cost.bytes,
        "flops_per_s": cost.flops / times.median,
        "roofline_s": cost.seconds,
        "times_roofline": times.median / cost.seconds,
    }


# Options that say what to do, not how it is measured.
_NO_SETTINGS = ("draw", "out", "explain", "scaling", "rounding", "batches")


def context(
    workload: Workload, config: BenchConfig, device: torch.device, peaks: Peaks | None = None
) -> Result:
    """Where and how it was measured, as JSON values."""
    settings = {
        name: _json(value) for name, value in asdict(config).items() if name not in _NO_SETTINGS
    }
    return {
        "provenance": {
            **provenance(device),
            "packages": _versions(),
            "load": _load(),
            "openmp": _openmp(),
        },
        "config": settings,
        "workload": workload.describe(),
        **({} if peaks is None else {"peaks": peaks.describe()}),
    }


def names(contender: Contender) -> Result:
    """Whose numbers these are, as JSON values."""
    return {
        "name": contender.name,
        "label": contender.label,
        "package": contender.package,
        "method": contender.method,
    }


def _versions() -> dict[str, str]:
    found = {}
    for name in sorted({c.package for c in CONTENDERS if not c.ours and c.package != "torch"}):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _load() -> list[float] | None:
    return [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None


def _openmp() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("OMP_", "GOMP_", "KMP_", "MKL_"))
    }


def _json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def describe(error: Exception) -> str:
    """Its kind and the first line of what it says."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:300]}"
