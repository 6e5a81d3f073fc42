"""Where numbers come from: commit, versions, machine."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy
import torch

import metanudge
from metanudge.training.device import cpu_model
from metanudge.version import __version__

COMMIT_VARIABLE = "METANUDGE_COMMIT"


def provenance(device: torch.device) -> dict[str, Any]:
    """Commit, versions, device, CPU and threads of this process, and the date, as JSON values."""
    commit, dirty = commit_of(Path(__file__).parent, Path(metanudge.__file__).parent)
    return {
        "commit": commit,
        "dirty": dirty,
        "metanudge": __version__,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "cpu": cpu_model(),
        "cores": (
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        ),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.release()}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def same_machine(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Whether two records differ in nothing but the date."""
    return {**first, "date": None} == {**second, "date": None}


def commit_of(*packages: Path) -> tuple[str | None, bool | None]:
    """The commit that the packages come from, and whether they differ from it; None for what git
    does not tell.

    On a machine with a copy of the files but not of the history, the variable METANUDGE_COMMIT
    tells; append "+dirty" to it if the copy differs from that commit.
    """
    if told := os.environ.get(COMMIT_VARIABLE):
        return told.removesuffix("+dirty"), told.endswith("+dirty")
    commit = _git(packages[0], "rev-parse", "HEAD")
    if not commit:
        return None, None
    # Only what computes counts: notes and results lying about change no number.
    changes = _git(packages[0], "status", "--porcelain", "--", *map(str, packages))
    return commit, None if changes is None else bool(changes)


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
