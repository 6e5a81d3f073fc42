"""Whether kernels can be built for the device at hand."""

from __future__ import annotations

from metanudge.engines.packed import triton_is_there
from metanudge.engines.stacked import compiles


def triton_works() -> bool:
    """Whether kernels may be built, and Triton is there."""
    return compiles() and triton_is_there()
