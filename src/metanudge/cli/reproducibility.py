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

_OF_A_RUN = ("device", "processes")  # recorded, but no property of a machine


def reproducibility(run: Path | None) -> Iterator[tuple[str, str]]:
    """One line for each thing that decides over the last bits, and how a run's own compare where
    one is given.
    """
    import torch

    yield (
        "here",
        (
            "the same command repeats bit for bit with the same versions, threads and processor;"
            " elsewhere rounding may differ:"
        ),
    )
    threads = torch.get_num_threads()
    shared = (
        "nothing is split among threads"
        if threads == 1
        else "sums are split among them; OMP_NUM_THREADS=1 gives the bits of one thread"
    )
    yield "threads", f"{threads}: {shared}"
    yield (
        "kernels",
        (
            f"{torch.backends.cpu.get_cpu_capability()} ({_set('ATEN_CPU_CAPABILITY')}): another"
            " instruction set sums in another order"
        ),
    )
    yield "libraries", ", ".join(_libraries()) or "neither MKL nor oneDNN"
    if torch.cuda.is_available():
        yield (
            "gpu",
            (
                f"train makes cuDNN deterministic; {_set('CUBLAS_WORKSPACE_CONFIG')}; index_add and"
                " the like in a model of yours may vary"
            ),
        )
    yield "file locks", _locks(Path("runs") if Path("runs").is_dir() else Path())
    encoding = getattr(sys.stdout, "encoding", None) or "none"
    yield (
        "output",
        encoding
        + (
            ""
            if encoding.lower().startswith("utf")
            else ": signs that it lacks are spelled out (λ as lambda)"
        ),
    )
    if run is not None:
        yield "run", _compared(run)


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
    from metanudge.training.lock import NO_LOCKS

    try:
        import fcntl

        with tempfile.TemporaryFile(dir=folder) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        return "none on this system: two processes that write to one run would not notice"
    except OSError as error:
        if error.errno in NO_LOCKS:
            return (
                f"none in {folder.resolve()} ({error.strerror}): two processes that write to one"
                " run would not notice"
            )
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
    here = {
        name: value
        for name, value in environment(torch.device("cpu")).items()
        if name in recorded and name not in _OF_A_RUN
    }
    other = [
        f"{name} {recorded[name]}, here {value}"
        for name, value in here.items()
        if recorded[name] != value
    ]
    return f"{run} was trained with " + (
        "; ".join(other) + ": it goes on with other last bits" if other else "the same as here"
    )
