"""What a machine's numbers depend on: what repeats bit for bit here, what does not elsewhere, and
why.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_UNNOTICED = "two processes that write to one run would not notice"
_OF_A_RUN = ("device", "processes")  # recorded, but no property of a machine


def reproducibility(run: Path | None) -> dict[str, str]:
    """One line for each thing that decides over the last bits, and how a run's own compare where
    one is given.
    """
    import torch

    found = {}
    found["here"] = (
        "the same command repeats bit for bit with the same versions, threads and processor;"
        " elsewhere rounding may differ:"
    )
    threads = torch.get_num_threads()
    shared = "nothing is split among threads"
    if threads > 1:
        shared = "sums are split among them; OMP_NUM_THREADS=1 gives the bits of one thread"
    found["threads"] = f"{threads}: {shared}"
    found["kernels"] = (
        f"{torch.backends.cpu.get_cpu_capability()} ({_set('ATEN_CPU_CAPABILITY')}): another"
        " instruction set sums in another order"
    )
    found["libraries"] = ", ".join(_libraries()) or "neither MKL nor oneDNN"
    if torch.cuda.is_available():
        found["gpu"] = (
            f"train makes cuDNN deterministic; {_set('CUBLAS_WORKSPACE_CONFIG')}; index_add and the"
            " like in a model of yours may vary"
        )
    found["file locks"] = _locks(Path("runs") if Path("runs").is_dir() else Path())
    found["output"] = getattr(sys.stdout, "encoding", None) or "none"
    if not found["output"].lower().startswith("utf"):
        found["output"] += ": signs that it lacks are spelled out (λ as lambda)"
    if run is not None:
        found["run"] = _compared(run)
    return found


def _set(variable: str) -> str:
    return f"{variable}={os.environ[variable]}" if variable in os.environ else f"{variable} not set"


def _libraries() -> Iterator[str]:
    import torch

    if torch.backends.mkl.is_available():
        yield f"MKL ({_set('MKL_CBWR')}; COMPATIBLE: the same bits on every processor, slower)"
    if torch.backends.mkldnn.is_available():
        yield f"oneDNN ({_set('ONEDNN_MAX_CPU_ISA')})"


def _locks(folder: Path) -> str:
    """Whether the file system of the runs can lock, tried on a file without a name."""
    from metanudge.training.files import NO_LOCKS

    try:
        import fcntl

        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        return f"none on this system: {_UNNOTICED}"
    except OSError as error:
        if error.errno in NO_LOCKS:
            return f"none in {folder.resolve()} ({error.strerror}): {_UNNOTICED}"
        return f"unknown: {folder.resolve()} cannot be written ({error.strerror})"
    return f"available in {folder.resolve()}"


def _compared(run: Path) -> str:
    """What a run recorded of the machine it was trained on, where it differs from this one."""
    import torch

    from metanudge.training.checkpoint import CheckpointStore
    from metanudge.training.device import environment
    from metanudge.training.runs import CHECKPOINTS, read_config

    read_config(run)
    recorded: Any = CheckpointStore(run / CHECKPOINTS).load("last").state.get("environment")
    if not isinstance(recorded, dict):
        return f"{run} recorded neither versions nor threads, so it may go on with other last bits"
    other = [
        f"{name} {recorded[name]}, here {value}"
        for name, value in environment(torch.device("cpu")).items()
        if name not in _OF_A_RUN and recorded.get(name, value) != value
    ]
    if not other:
        return f"{run} was trained with the same as here"
    return f"{run} was trained with {'; '.join(other)}: it goes on with other last bits"
