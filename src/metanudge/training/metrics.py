"""What a run writes down: one JSON line per meta-step, and TensorBoard or Weights & Biases beside
it when asked.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from metanudge.learner import MetaLearner
from metanudge.training.errors import UserError
from metanudge.training.files import open_to_append, parse_json, read_bytes, without_nan

Values = Mapping[str, float | int | str | None]


class MetricsLog:
    """A file of JSON lines that can be cut back to where a checkpoint left it.

    NaN and infinity become null, so every line is valid JSON. The same values give the same bytes.

    Args:
        file: is appended to.
        size: cut the file back to this many bytes first; lines after a checkpoint are written again
            by the resumed run.
    """

    def __init__(self, file: Path, *, size: int | None = None) -> None:
        self._path = file
        self._file = open_to_append(file)
        if size is not None and self._file.tell() >= size:
            self._file.truncate(size)
            self._file.seek(0, os.SEEK_END)
        self._digest = hashlib.sha256(read_bytes(file))

    @property
    def size(self) -> int:
        """Bytes so far."""
        return self._file.tell()

    @property
    def sha256(self) -> str:
        """Of the bytes so far, as they were written."""
        return self._digest.hexdigest()

    @property
    def in_place(self) -> bool:
        """Whether the file still has its name: a deleted or moved one can be written to, and nobody
        would see it.
        """
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
        except OSError:
            return False

    def write(self, values: Values) -> None:
        """Add a line and hand it to the operating system."""
        line = json.dumps(without_nan(values), allow_nan=False).encode() + b"\n"
        self._file.write(line)
        self._file.flush()
        self._digest.update(line)

    def sync(self) -> None:
        """Wait until everything is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def check_metrics(file: Path, *, size: int, sha256: str | None) -> None:
    """Refuse a metrics file that does not begin with what it held when a checkpoint was saved; one
    that is not there may be.
    """
    if not os.path.lexists(file):
        return
    try:
        data = read_bytes(file)
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}).") from error
    if len(data) < size or (
        sha256 is not None and hashlib.sha256(data[:size]).hexdigest() != sha256
    ):
        what = (
            f"has {len(data)} bytes, and had {size}"
            if len(data) < size
            else "does not match the sha256 that the checkpoint has of it"
        )
        raise UserError(
            f"{file} was changed since the checkpoint was saved: it {what}. Put it back, or move it"
            " away to go on without it."
        )


def read_metrics(
    file: Path, *, note: Callable[[str], None] = lambda text: None
) -> list[dict[str, Any]]:
    """All complete lines of a metrics file; those that something has damaged are left out, and
    `note` is told which.
    """
    if not os.path.lexists(file):
        return []
    # what follows the last newline was cut off by a crash
    lines = read_bytes(file).split(b"\n")[:-1]
    rows = [_row(line) for line in lines]
    damaged = [str(number) for number, row in enumerate(rows, 1) if row is None]
    if damaged:
        more = ", …" if len(damaged) > 5 else ""
        note(
            f"{file} has damaged lines, {len(damaged)} of {len(rows)}, which are left out here:"
            f" line {', '.join(damaged[:5])}{more}."
        )
    return [row for row in rows if row is not None]


def _row(line: bytes) -> dict[str, Any] | None:
    """A line as `MetricsLog` writes it; None for anything else."""
    try:
        row = parse_json(line)
    except ValueError:
        return None
    sound = (
        isinstance(row, dict)
        and type(row.get("step")) is int
        and all(v is None or type(v) in (int, float) for v in row.values())
    )
    return row if sound else None


class Timing:
    """`timing.jsonl`: when each meta-step was done, how long it took, and the memory then."""

    def __init__(self, file: Path) -> None:
        self._file = open_to_append(file)

    def write(self, step: int, seconds: float, memory: int | None) -> None:
        """Add a line."""
        line = {
            "step": step,
            "seconds": round(seconds, 6),
            "memory_bytes": memory,
            "time": round(time.time(), 3),
        }
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def stiffness(learner: MetaLearner) -> dict[str, float]:
    """λ where it is learned: `lam`, or `lam.NAME` for each tensor (the geometric mean of its
    entries); nothing where it is fixed.
    """
    if learner.log_lam is None:
        return {}
    named = dict(learner.log_lam.named_parameters())
    means = torch.stack([p.detach().double().mean() for p in named.values()]).exp().tolist()
    names = ["lam"] if learner.learn_lam == "scalar" else [f"lam.{name}" for name in named]
    return dict(zip(names, means, strict=True))


def inner_rates(learner: MetaLearner) -> dict[str, float]:
    """Inner rates where they are learned: `inner_lr`, or `inner_lr.NAME` for each tensor (the mean
    of its entries or steps, geometric where they are positive).
    """
    if learner.learned_rates is None:
        return {}
    what, named = learner.learned_rates.what, dict(learner.learned_rates.named_parameters())
    means = torch.stack([p.detach().double().mean() for p in named.values()])
    means = means.exp() if what.positive else means
    names = ["inner_lr"] if what.per == "scalar" else [f"inner_lr.{name}" for name in named]
    return dict(zip(names, means.tolist(), strict=True))


LEARNED = {"lam": "λ", "inner_lr": "inner lr"}  # as metrics and people call it


def describe_learned(values: Mapping[str, Any], key: str) -> str | None:
    """What is learned besides the model, among a meta-step's values, in a word; None where it is
    not.

    Example:
        >>> (describe_learned({"lam": 1.5}, "lam"),
        ...     describe_learned({"lam.0.weight": 0.5, "lam.0.bias": 3.25, "residual": 9.0}, "lam"))
        ('λ 1.5', 'λ 0.5–3.25')
    """
    found = [value for name, value in values.items() if name == key or name.startswith(f"{key}.")]
    if not found:
        return None
    low, high = f"{min(found):.3g}", f"{max(found):.3g}"
    return f"{LEARNED[key]} {low}" + ("" if low == high else f"–{high}")


class Sink(Protocol):
    """Somewhere else that metrics go."""

    def write(self, step: int, values: Values) -> None:
        """Log the values of a meta-step."""

    def close(self) -> None:
        """Finish."""


def check_sinks(names: Sequence[str]) -> None:
    """Raise `UserError` where a package that was asked for is not installed, before anything is
    written.
    """
    import importlib.util

    for name in names:
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"--{name} needs the package {name}, which is not installed. Install it: pip"
                f" install 'metanudge[{name}]'"
            )


def open_sinks(names: Sequence[str], folder: Path, settings: Mapping[str, Any]) -> list[Sink]:
    """The extra places that a run sends metrics to."""
    kinds: dict[str, Callable[[Path, Mapping[str, Any]], Sink]] = {
        "tensorboard": _TensorBoard,
        "wandb": _Wandb,
    }
    return [kinds[name](folder, settings) for name in names]


def _numbers(values: Values) -> dict[str, float]:
    return {
        k: float(v)
        for k, v in values.items()
        if k != "step" and isinstance(v, (int, float)) and math.isfinite(v)
    }


class _TensorBoard:
    def __init__(self, folder: Path, _: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def write(self, step: int, values: Values) -> None:
        for name, value in _numbers(values).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        wandb: Any = __import__("wandb")
        self._run = wandb.init(
            project="metanudge",
            name=folder.name,
            dir=str(folder),
            config=dict(settings),
            resume="allow",
        )

    def write(self, step: int, values: Values) -> None:
        self._run.log(_numbers(values), step=step)

    def close(self) -> None:
        self._run.finish()
