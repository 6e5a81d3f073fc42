"""Whether kernels can be built for the device at hand."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch

from metanudge.engines.stacked import compiles


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
