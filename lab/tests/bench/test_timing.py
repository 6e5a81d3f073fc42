"""Interleaved timing, and the memory of a call."""

from __future__ import annotations

import time

import pytest
import torch

from metanudge.testing.memory import peak_memory
from metanudge_lab.bench.timing import Times, round_robin, timed

CPU = torch.device("cpu")


def test_calls_are_interleaved_and_every_round_begins_with_another() -> None:
    calls: list[str] = []
    told: list[str] = []
    works = {name: lambda name=name: calls.append(name) for name in "abc"}
    times = round_robin(works, rounds=4, device=CPU, done=lambda name, seconds: told.append(name))
    assert "".join(calls) == "abcbcacababc"
    assert told == calls
    assert {name: len(t.seconds) for name, t in times.items()} == {"a": 4, "b": 4, "c": 4}


def test_the_time_limit_cuts_whole_rounds_but_never_the_first() -> None:
    times = round_robin(
        {"a": lambda: None, "b": lambda: None}, rounds=5, device=CPU, until=time.monotonic() - 1
    )
    assert [len(t.seconds) for t in times.values()] == [1, 1]


def test_a_call_takes_as_long_as_it_takes() -> None:
    times = Times()
    timed(lambda: time.sleep(0.02), CPU, times)
    assert times.seconds[0] >= 0.02
    assert times.cpu_seconds[0] < times.seconds[0], "sleeping needs no processor"
    described = Times([3.0, 1.0, 2.0]).describe()
    assert (described["median"], described["quartiles"], described["fastest"]) == (
        2.0,
        [1.5, 2.5],
        1.0,
    )
    assert Times([3.0]).describe()["quartiles"] == [3.0, 3.0]


def test_peak_memory_of_a_call() -> None:
    x = torch.ones(1000, dtype=torch.float64)

    def work() -> None:
        y = x + 1
        z = y * 2
        del y
        z.sum()

    assert peak_memory(work, CPU) == pytest.approx(16000, abs=100)
