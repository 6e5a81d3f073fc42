"""How time grows with tasks, steps and shots, and memory with steps."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from metanudge.training.device import computing_in
from metanudge_lab.bench.cases import Case
from metanudge_lab.bench.config import BenchConfig
from metanudge_lab.bench.contender import Contender
from metanudge_lab.bench.peaks import measure_peaks
from metanudge_lab.bench.suite import Result, context, enter, title_of, workload_of
from metanudge_lab.bench.timing import quartiles, round_robin
from metanudge_lab.device_memory import release
from metanudge_lab.progress import Progress

DEFAULT = ("fobmaml-loss", "fobmaml-gradient", "fomaml", "maml", "vmap-maml")
AXES = {"tasks": (4, 8, 16, 32, 64), "steps": (1, 2, 5, 10, 20), "shots": (1, 2, 5, 10)}
QUICK_AXES = {"tasks": (1, 2, 4), "steps": (1, 2, 4), "shots": (1, 2)}
_ABOVE_LAUNCHES = 1.5


def scale(
    case: Case,
    contenders: Sequence[Contender],
    config: BenchConfig,
    device: torch.device,
    progress: Progress,
) -> Result:
    """Measure every axis within the time limit, in rounds: the smallest value of each, then the
    next of each, and so on.

    An axis ends where its next value would probably take too long, or where nobody is left: a
    contender that failed at one value is not tried at a larger one.
    """
    until = time.monotonic() + config.limit_seconds
    axes = QUICK_AXES if config.quick else AXES
    present = [c for c in contenders if c.absence(device) is None]
    going, took = dict.fromkeys(axes, present), dict.fromkeys(axes, 0.0)
    workload = workload_of(case, config, device)
    points: list[Result] = []
    notes: list[str] = []
    progress.begin(f"{case.name}, scaling", total=sum(map(len, axes.values())), done=0)
    try:
        with computing_in(config.precision, device):
            peaks = measure_peaks(device, config.precision, quick=config.quick)
            for axis, value in in_rounds(axes):
                begin = time.monotonic()
                if not going[axis]:
                    continue
                if begin + took[axis] > until:
                    notes.append(
                        f"{axis} = {value} and more left out: the limit of"
                        f" {config.limit_seconds:g} s"
                    )
                    progress.note(f"{case.name}: {notes[-1]}")
                    going[axis] = []
                    continue
                progress.start(f"{axis} = {value}")
                rows = _measure(case, going[axis], config, device, axis, value, notes)
                points += rows
                going[axis] = [c for c in going[axis] if c.name in {row["name"] for row in rows}]
                took[axis] = time.monotonic() - begin
                progress.finish(f"{axis} = {value}", took[axis])
    finally:
        progress.end()
    points.sort(key=lambda point: list(axes).index(point["axis"]))
    return {
        "kind": "scaling",
        "case": case.name,
        "title": title_of(case, config),
        **context(workload, config, device, peaks),
        "curves": [
            *_curves(points, "time", "seconds", tuple(axes)),
            *_curves(points, "memory", "memory_bytes", ("steps",)),
        ],
        "points": points,
        "notes": notes,
    }


def in_rounds(axes: Mapping[str, Sequence[int]]) -> list[tuple[str, int]]:
    """Axes and values in the order of measurement.

    Example:
        >>> in_rounds({"tasks": (4, 8, 16), "shots": (1, 2)})
        [('tasks', 4), ('shots', 1), ('tasks', 8), ('shots', 2), ('tasks', 16)]
    """
    rounds = range(max(map(len, axes.values())))
    return [
        (axis, values[number])
        for number in rounds
        for axis, values in axes.items()
        if number < len(values)
    ]


def _measure(
    case: Case,
    contenders: Sequence[Contender],
    config: BenchConfig,
    device: torch.device,
    axis: str,
    value: int,
    notes: list[str],
) -> list[Result]:
    workload = workload_of(case, config, device, **{axis: value})
    entrants = []
    for contender in contenders:
        try:
            entrants.append(enter(contender, workload, config))
        except Exception as error:  # out of memory, mostly: the curve ends there
            notes.append(f"{contender.label} at {axis} = {value}: {type(error).__name__}")
    times = (
        round_robin(
            {e.contender.name: e.prepared.step for e in entrants},
            rounds=config.repeats,
            device=device,
        )
        if entrants
        else {}
    )
    rows = [
        {
            "name": e.contender.name,
            "label": e.contender.label,
            "method": e.contender.method,
            "axis": axis,
            "value": value,
            "seconds": times[e.contender.name].median,
            "quartiles": list(quartiles(times[e.contender.name].seconds)),
            "memory_bytes": e.memory,
        }
        for e in entrants
    ]
    del entrants, times
    release(device)
    return rows


def _curves(
    points: list[Result], quantity: str, key: str, axes: tuple[str, ...]
) -> list[dict[str, Any]]:
    curves = []
    for axis in axes:
        for name in dict.fromkeys(point["name"] for point in points):
            found = [point for point in points if point["name"] == name and point["axis"] == axis]
            if not found:
                continue
            pairs = [(point["value"], point[key]) for point in found]
            curves.append(
                {
                    "name": name,
                    "label": found[0]["label"],
                    "method": found[0]["method"],
                    "quantity": quantity,
                    "axis": axis,
                    "points": [{"value": value, "measured": measured} for value, measured in pairs],
                    "exponent": exponent(pairs, above_launches=quantity == "time"),
                }
            )
    return curves


def exponent(points: Sequence[tuple[float, float]], *, above_launches: bool) -> float | None:
    """The slope of measured against value in log-log, by least squares; None where too few points
    are left.

    Args:
        points: pairs (value, measured).
        above_launches: leave out points that take less than 1.5 times the shortest one: there it is
            launching kernels, or calling operators, that takes the time, and not computing.

    Example:
        >>> round(exponent([(1, 3.0), (2, 12.0), (4, 48.0)], above_launches=False), 6)
        2.0
        >>> round(exponent([(1, 10.0), (2, 10.0), (4, 20.0), (8, 40.0)], above_launches=True), 6)
        1.0
        >>> exponent([(1, 10.0), (2, 11.0), (4, 10.5)], above_launches=True)
    """
    if above_launches:
        floor = min(measured for _, measured in points)
        points = [
            (value, measured) for value, measured in points if measured >= _ABOVE_LAUNCHES * floor
        ]
    if len(points) < 2:
        return None
    x, y = ([math.log(pair[i]) for pair in points] for i in (0, 1))
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum(
        (a - mean_x) ** 2 for a in x
    )
