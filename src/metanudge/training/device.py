"""Where and in which precision to compute, and what else the numbers of a run depend on.

torch is loaded by those who compute: the names of the precisions are part of the flags.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from metanudge.training.errors import UserError
from metanudge.version import __version__

if TYPE_CHECKING:
    import torch

Precision = Literal["fp32", "tf32", "bf16"]


def device_called(name: str) -> torch.device:
    """The device of a name: auto (CUDA where there is one), cpu, cuda or cuda:1; `UserError` where
    it cannot be had.

    Under torchrun, cuda is another GPU for every local rank.
    """
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise UserError(
            f"--device {name} is no device that torch knows. Use auto, cpu, cuda or cuda:1."
        ) from error
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = (
        device.index
        if device.index is not None
        else int(os.environ.get("LOCAL_RANK", "0")) % max(count, 1)
    )
    if index >= count:
        found = (
            f"{count} CUDA devices"
            if count
            else "no GPU"
            if torch.version.cuda
            else "no GPU, being a build without CUDA"
        )
        raise UserError(
            f"--device {name}: torch finds {found} here. Use --device cpu, or --device auto to take"
            " what there is."
        )
    return torch.device("cuda", index)


@contextmanager
def computing_in(name: Precision, device: torch.device) -> Iterator[None]:
    """A context in which torch computes in float32 throughout, in float32 with TF32 multiplications
    (on CUDA devices), or in bfloat16 by autocast.
    """
    import torch

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


def environment(device: torch.device, *, processes: int = 1) -> dict[str, Any]:
    """Versions, device, processor, and how the sums are shared out: where these are equal, equal
    runs give equal bytes.
    """
    import numpy as np
    import torch

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
