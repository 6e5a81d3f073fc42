"""Whether kernels may be built for the device at hand (Triton) and meta-steps recorded (CUDA
graphs).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch

_allowed = ContextVar("allowed", default=True)


@contextmanager
def compilation(allowed: bool) -> Iterator[None]:
    """Within, nothing is compiled or recorded unless this and all surrounding ones allow it."""
    before = _allowed.set(_allowed.get() and allowed)
    try:
        yield
    finally:
        _allowed.reset(before)


def compiles() -> bool:
    """Whether kernels may be built and meta-steps recorded."""
    return _allowed.get()


def triton_works() -> bool:
    """Whether kernels may be built, Triton is there (it comes with torch for CUDA) and knows the
    current device.
    """
    return compiles() and _triton_is_there()


@cache
def _triton_is_there() -> bool:
    return importlib.util.find_spec(
        "triton"
    ) is not None and torch.cuda.get_device_capability() >= (8, 0)
