"""TensorBoard and Weights & Biases, where a run's metrics go as well when asked."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from metanudge.training.errors import UserError
from metanudge.training.metrics import Values


class Sink(Protocol):
    """Somewhere else that metrics go."""

    def write(self, step: int, values: Values) -> None:
        """Log the values of a meta-step."""

    def close(self) -> None:
        """Finish."""


def check_sink(name: str) -> None:
    """Raise `UserError` where a package that was asked for is not installed, before anything is
    written.
    """
    if importlib.util.find_spec(name) is None:
        raise UserError(
            f"--{name} needs the package {name}, which is not installed. Install it: pip install"
            f" 'metanudge[{name}]'"
        )


def open_sink(name: str, folder: Path, settings: Mapping[str, Any]) -> Sink:
    """Another place that a run sends metrics to."""
    kinds: dict[str, Callable[[Path, Mapping[str, Any]], Sink]] = {
        "tensorboard": _TensorBoard,
        "wandb": _Wandb,
    }
    return kinds[name](folder, settings)


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
