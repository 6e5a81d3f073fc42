"""Random states: the global generators of Python, NumPy and torch as one value that a checkpoint
holds.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def rng_state() -> dict[str, Any]:
    """The states of the global random generators of Python, NumPy and torch (CPU and every GPU), as
    `save` takes them.

    A `torch.Generator` of your own is saved with `generator.get_state()`, a NumPy one with
    `rng.bit_generator.state`.

    Example:
        >>> before = rng_state()
        >>> first = torch.rand(2)
        >>> set_rng_state(before)
        >>> torch.equal(first, torch.rand(2))
        True
    """
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002  the global state, since models may use it
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Put the global random generators back; states of GPUs that this machine does not have are
    left out.
    """
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    for device, cuda in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(cuda, device)
