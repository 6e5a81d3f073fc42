"""Compute in a precision: float32 throughout, float32 with TF32 multiplications, or bfloat16 by autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from metanudge.training.config import Precision


@contextmanager
def computing_in(name: Precision, device: torch.device) -> Iterator[None]:
    """A context in which torch computes so."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    tf32 = name == "tf32" and device.type == "cuda"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    try:
        # Without the cache of cast weights: inner steps overwrite parameters in place, and a cached copy would be stale.
        with torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False, enabled=name == "bf16"):
            yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
