"""What the numbers of a run depend on besides its configuration: recorded with it, and compared
when it goes on.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from metanudge.version import __version__


def environment(device: torch.device, *, processes: int = 1) -> dict[str, Any]:
    """Versions, device, processor, and how the sums are shared out: where these are equal, equal
    runs give equal bytes.
    """
    return {
        "metanudge": __version__,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "processor": cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "processes": processes,
    }


def changes(recorded: Mapping[str, Any] | None, now: Mapping[str, Any]) -> list[str]:
    """What differs from the environment that a checkpoint recorded, as "threads 1 → 2"; nothing
    where the bytes will be the same.
    """
    if recorded is None:
        return [f"metanudge 0.1, which recorded neither threads nor versions → {now['metanudge']}"]
    return [
        f"{name} {recorded.get(name, 'unknown')} → {value}"
        for name, value in now.items()
        if recorded.get(name) != value
    ]


def cpu_model() -> str:
    """The processor's name where the system tells, else its architecture."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for text in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if text.startswith("model name"):
                return text.partition(":")[2].strip()
    return platform.processor() or platform.machine()
