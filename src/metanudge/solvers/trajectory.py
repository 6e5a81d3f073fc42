"""The way of a solve, kept so that it can be walked back: φ_K, …, φ_1, φ_0."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from metanudge.params import Params
from metanudge.solvers.adjoint import Memory, Point, Update
from metanudge.solvers.base import Oracle, Solution, Trace

Keep = Literal["auto", "device", "host", "recompute"]
_SHARE = 0.5  # of the free memory, for points on the device


@dataclass
class Trajectory:
    """Points of a solve from which steps are to be differentiated, the last one first.

    Attributes:
        update: the steps.
    """

    update: Update
    _oracle: Oracle
    _points: dict[int, Point]
    _end: int
    _host: Host | None = None

    def backwards(self) -> Iterator[tuple[int, Point]]:
        """Every step and where it began, the last one first. A point is forgotten when the next one
        is asked for; from the host the next one is on its way meanwhile.
        """
        end, order = self._end, sorted(self._points, reverse=True)
        if self._host is not None and order:
            self._host.fetch(self._points.pop(order[0]))
        for first in order:
            points = self._segment(first, self._taken(first), end)
            while points:
                yield first + len(points) - 1, points.pop()
            end = first

    def _taken(self, first: int) -> Point:
        if self._host is None:
            return self._points.pop(first)
        point = self._host.fetched()
        if self._points:
            self._host.fetch(self._points.pop(max(self._points)))
        return point

    def _segment(self, first: int, point: Point, end: int) -> list[Point]:
        """A kept point and those after it, up to where the next kept one is: their steps once
        more.
        """
        noted = self.update.needs_gradient and point.g is None
        points = []
        for step in range(first, end):
            if not noted and step == end - 1:
                points.append(point)
                break
            _, g = self._oracle.gradient(point.d, step, self.update.batch_size)
            points.append(Point(point.d, point.memory, g if noted else None))
            point = Point(*self.update.advance(step, point.d, g, point.memory))
        return points


def solve(
    update: Update, oracle: Oracle, *, last: int, keep: Keep = "device"
) -> tuple[Solution, Trajectory]:
    """Take all steps from d = 0 and keep where the last so many of them began.

    Args:
        last: how many steps will be differentiated.
        keep: `"device"` keeps every point where it is made, `"host"` in the host's memory (see
            `Host`), `"recompute"` every √last-th one, from which the steps between are taken once
            more on the way back. `"auto"`: on the device, or on the host where half of the free
            memory does not hold them.

    Cost: `steps` gradients; with `"recompute"` up to `last` more on the way back.
    """
    d = oracle.zeros()
    memory = update.begin(d)
    begin = update.steps - last
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        keep = "device" if keep in ("auto", "host") else keep  # a recording cannot leave it
    if keep == "auto":
        keep = chosen(d, memory, last, gradients=update.needs_gradient)
    stride = math.isqrt(max(last - 1, 0)) + 1 if keep == "recompute" else 1
    points: dict[int, Point] = {}
    trace = Trace(oracle)
    host = Host(next(iter(d.values())).device) if keep == "host" else None
    for step in range(update.steps):
        kept = step >= begin and (step - begin) % stride == 0
        point = Point(d, memory) if kept else None
        if host is not None and point is not None:
            point = host.put(point)  # while the gradient is computed
        loss, g = oracle.gradient(d, step, update.batch_size)
        trace.record(loss, g)
        if point is not None:
            noted = g if update.needs_gradient and keep != "recompute" else None
            if host is not None and noted is not None:
                noted = host.put(Point(noted, ())).d
            points[step] = replace(point, g=noted)
            del point, noted
        d, memory = update.advance(step, d, g, memory)
        # or the old gradient would still be alive while the next forward pass stores its
        # activations
        del g
    if host is not None:
        host.wait()
    way = Trajectory(update, oracle, points, update.steps, host)
    return trace.solution(update.result(d, memory), update.steps), way


class Host:
    """Points in the host's memory, pinned. On a CUDA device they are copied on a stream of their
    own while the device goes on computing.

    Every copy waits for all that the device's stream was given before: what is copied is there, and
    whatever lay where a fetched point goes is no longer read. What is put away is held until the
    device's stream waits for its copy: before, its memory is nobody else's. A fetched point is
    handed out once the device's stream waits for it, and the next one is on its way by then, so
    that two are on the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._held: Point | None = None
        self._ahead: Point | None = None

    def put(self, point: Point) -> Point:
        """A copy of a point on the host, to be read after the next `wait`."""
        self.wait()
        with self._copying():
            there = moved(point, to_host)
        self._held = point
        return there

    def fetch(self, point: Point) -> None:
        """Begin to copy a point back to the device."""
        with self._copying():
            self._ahead = moved(point, lambda leaf: to_device(leaf, self._device))

    def fetched(self) -> Point:
        """The point that was begun with, for the device's stream."""
        self.wait()
        point, self._ahead = self._ahead, None
        assert point is not None
        return point

    def wait(self) -> None:
        """Have the device's stream wait for all copies; the host does not."""
        if self._side is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._side)
        self._held = None

    @contextmanager
    def _copying(self) -> Iterator[None]:
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            yield


def chosen(d: Params, memory: Memory, last: int, *, gradients: bool) -> Literal["device", "host"]:
    """Where so many points fit."""
    leaf = next(iter(d.values()))
    if leaf.device.type != "cuda":
        return "device"
    parts = (d, *memory, *([d] if gradients else []))
    size = sum(t.nbytes for part in parts for t in part.values())
    return "device" if last * size <= _SHARE * free_memory(leaf.device) else "host"


def free_memory(device: torch.device) -> int:
    """Bytes that torch can still have on a CUDA device, its own unused reserves included."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def as_it_is(leaf: Tensor) -> Tensor:
    """Where it is."""
    return leaf


def to_host(leaf: Tensor) -> Tensor:
    """Into pinned memory, without waiting."""
    if leaf.device.type == "cpu":
        return leaf
    kept = torch.empty_like(leaf, device="cpu", pin_memory=True)
    return kept.copy_(leaf, non_blocking=True)


def to_device(leaf: Tensor, device: torch.device) -> Tensor:
    """Back from there, without waiting."""
    return leaf.to(device, non_blocking=True)


def moved(point: Point, move: Callable[[Tensor], Tensor]) -> Point:
    """All its tensors to another place."""
    if move is as_it_is:
        return point

    def each(part: Params) -> Params:
        return {n: move(leaf) for n, leaf in part.items()}

    return Point(
        each(point.d),
        tuple(each(part) for part in point.memory),
        None if point.g is None else each(point.g),
    )
