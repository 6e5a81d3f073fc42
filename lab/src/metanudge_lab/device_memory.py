"""The memory of a GPU between measurements."""

from __future__ import annotations

import gc

import torch


def release(device: torch.device) -> None:
    """Give back what is held no longer: recorded meta-steps keep their memory until they are
    collected.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
