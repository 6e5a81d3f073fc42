"""Wall-clock times of many pieces of work, interleaved: a machine that slows down slows down for
all of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Times:
    """Seconds of every call: on the clock; of the CPU, which others on the machine disturb less;
    between two events on a GPU.
    """

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    device_seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Of the wall-clock seconds."""
        return statistics.median(self.seconds)

    def describe(self) -> dict[str, Any]:
        """Median, quartiles and all samples, as JSON values.

        Example:
            >>> (Times([4.0, 1.0, 2.0, 3.0]).describe()["median"],
            ...     Times([4.0, 1.0, 2.0, 3.0, 5.0]).describe()["quartiles"])
            (2.5, [2.0, 4.0])
        """
        described = {
            "median": self.median,
            "quartiles": list(quartiles(self.seconds)),
            "fastest": min(self.seconds),
            "samples": self.seconds,
        }
        if self.cpu_seconds:
            described["cpu_median"] = statistics.median(self.cpu_seconds)
        if self.device_seconds:
            described["device_median"] = statistics.median(self.device_seconds)
        return described


def quartiles(values: list[float]) -> tuple[float, float]:
    """The first and the third; of a single value, the value."""
    if len(values) == 1:
        return values[0], values[0]
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return first, third


def timed(work: Callable[[], object], device: torch.device, times: Times) -> None:
    """Run once and note how long it took until the device was done."""
    if device.type != "cuda":
        begin, cpu_begin = time.perf_counter(), time.process_time()
        work()
        times.seconds.append(time.perf_counter() - begin)
        times.cpu_seconds.append(time.process_time() - cpu_begin)
        return
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin = time.perf_counter()
    start.record()
    work()
    end.record()
    torch.cuda.synchronize(device)
    times.seconds.append(time.perf_counter() - begin)
    times.device_seconds.append(start.elapsed_time(end) / 1e3)


def round_robin(
    works: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    device: torch.device,
    until: float = float("inf"),
    done: Callable[[str, float], None] = lambda name, seconds: None,
) -> dict[str, Times]:
    """Times of every piece of work, one call of each in turn, the turn beginning with another one
    each round.

    Args:
        works: what to time, by name.
        rounds: calls of each.
        device: where it works.
        until: start no further round that would probably end after this moment of `time.monotonic`;
            the first is always run.
        done: told of every call.
    """
    times = {name: Times() for name in works}
    names = list(works)
    longest = 0.0
    for number in range(rounds):
        begin = time.monotonic()
        if number and begin + longest > until:
            break
        for name in names[number % len(names) :] + names[: number % len(names)]:
            timed(works[name], device, times[name])
            done(name, times[name].seconds[-1])
        longest = max(longest, time.monotonic() - begin)
    return times
