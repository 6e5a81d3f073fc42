"""Compute in a precision: float32 throughout, float32 with TF32 multiplications (on CUDA devices),
or bfloat16 by autocast.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Precision = Literal["fp32", "tf32", "bf16"]


@contextmanager
def computing_in(name: Precision, device: torch.device) -> Iterator[None]:
    """A context in which torch computes so."""
    import torch  # here, because the names above are part of the flags, which need no torch

    tf32 = name == "tf32" and device.type == "cuda"
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    try:
        # Without the cache of cast weights: inner steps overwrite parameters in place, and a cached
        # copy would be stale.
        with torch.autocast(
            device.type, dtype=torch.bfloat16, cache_enabled=False, enabled=name == "bf16"
        ):
            yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
