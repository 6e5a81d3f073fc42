"""Augmented training tasks: a function changes the inputs, by random numbers that follow from the
episode's number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from metanudge.task import Batch, TaskBatch
from metanudge.tasks.draws import Keys, fork

Augment = Callable[[Tensor, torch.Generator], Tensor]
"""A function of the inputs `(n, ...)` of one task and a seeded generator (on the CPU) that returns
inputs of the same shape and type.
"""
_FIRST_CHILD = 1 << 32  # of an episode's key; what draws tasks uses small ones


@dataclass(frozen=True)
class Changes:
    """The usual changes, each drawn anew for every example.

    Args:
        flip: mirror half of the pictures, left to right.
        shift: move pictures by up to so many pixels each way; their edges are continued.
        noise: standard deviation of normal numbers that are added.

    Example:
        >>> x = torch.arange(4.0).view(1, 1, 1, 4).expand(3, 1, 2, 4)
        >>> shifted = Changes(shift=1)(x, torch.Generator().manual_seed(1))
        >>> shifted[:, 0, 0].tolist()
        [[1.0, 2.0, 3.0, 3.0], [0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0]]
    """

    flip: bool = False
    shift: int = 0
    noise: float = 0.0

    def __post_init__(self) -> None:
        if self.shift < 0 or not 0 <= self.noise < float("inf"):
            raise ValueError(
                f"shift={self.shift} and noise={self.noise} cannot both be added. Use numbers from"
                " 0 on."
            )

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """The inputs, changed."""
        if (self.flip or self.shift) and x.ndim != 4:
            raise ValueError(
                f"flip and shift are for pictures, and inputs have shape {tuple(x.shape[1:])}. Use"
                " noise, or a function of your own."
            )
        n = len(x)
        if self.flip:
            mirrored = torch.rand(n, generator=generator) < 0.5
            x = torch.where(mirrored.to(x.device)[:, None, None, None], x.flip(-1), x)
        if self.shift:
            by = torch.randint(-self.shift, self.shift + 1, (2, n, 1), generator=generator)
            rows, columns = (
                (torch.arange(size) + one).clamp(0, size - 1).to(x.device)
                for size, one in zip(x.shape[2:], by, strict=True)
            )
            each, channels = torch.arange(n)[:, None, None, None], torch.arange(x.shape[1])
            x = x[each, channels[:, None, None], rows[:, None, :, None], columns[:, None, None]]
        if self.noise:
            drawn = torch.randn(x.shape, generator=generator, dtype=torch.float64)
            x = x + (self.noise * drawn).to(x)
        return x


def augmented(tasks: TaskBatch, keys: Keys, augment: Augment, *, query: bool) -> TaskBatch:
    """The same tasks with changed inputs in support (and query) sets; task i is changed by numbers
    that follow from key i.
    """
    sides = fork(keys[:, None], np.array([_FIRST_CHILD, _FIRST_CHILD + 1]))
    places = iter([stack.places for stack in tasks.stacks])

    def changed(support: Batch, other: Batch) -> tuple[Batch, Batch]:
        seeds = sides[list(next(places))]
        support = _changed(support, seeds[:, 0], augment)
        return support, _changed(other, seeds[:, 1], augment) if query else other

    return tasks.rearranged(changed)


def _changed(batch: Batch, seeds: Keys, augment: Augment) -> Batch:
    if not (isinstance(batch, tuple) and isinstance(batch[0], Tensor)):
        raise TypeError(
            f"augment changes inputs that are tensors, and these are a {type(batch).__name__}"
            f" of {type(batch[0]).__name__ if isinstance(batch, tuple) else 'several'}. Leave it"
            " out."
        )
    x, *rest = batch
    rows = []
    for row, seed in zip(x, seeds, strict=True):
        found = augment(row.clone(), torch.Generator().manual_seed(int(seed)))
        if not isinstance(found, Tensor) or (found.shape, found.dtype) != (row.shape, row.dtype):
            what = type(found).__name__
            if isinstance(found, Tensor):
                what = f"{tuple(found.shape)} of {found.dtype}"
            raise ValueError(
                f"augment made {what} of inputs {tuple(row.shape)} of {row.dtype}. Return a tensor"
                " of the same shape and type."
            )
        rows.append(found.to(row.device))
    return (torch.stack(rows), *rest)
