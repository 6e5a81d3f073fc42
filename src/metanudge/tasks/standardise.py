"""Inputs on a common scale: each column less its mean, divided by its standard deviation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_AT_ONCE = 1 << 23  # numbers


@dataclass(frozen=True)
class Standardisation:
    """The mean and scale that are taken from inputs; made from the training examples, applied to
    all.

    Example:
        >>> found = Standardisation.of(np.array([[1e4, 7.0], [3e4, 7.0]]))
        >>> found
        Standardisation(mean=(20000.0, 7.0), scale=(10000.0, 1.0))
        >>> found.apply(torch.tensor([[1e4, 8.0]]))
        tensor([[-1.,  1.]], dtype=torch.float64)
    """

    mean: tuple[float, ...]  # one per column; inputs of more axes are flattened
    scale: tuple[float, ...]

    @classmethod
    def of(cls, examples: NDArray[np.floating]) -> Self:
        """The columns' means and standard deviations over the examples `(n, ...)`; a constant
        column has scale 1.
        """
        return cls.over(len(examples), examples[0].size, lambda rows: examples[rows])

    @classmethod
    def over(cls, count: int, width: int, read: Callable[[slice], NDArray[np.floating]]) -> Self:
        """The same of examples that are read a few at a time, three times over: `count` of them
        with `width` numbers each. The bits do not depend on where they are kept.
        """
        step = max(1, _AT_ONCE // max(1, width))

        def parts() -> Iterator[NDArray[np.float64]]:
            for first in range(0, count, step):
                part = read(slice(first, min(first + step, count)))
                yield part.reshape(len(part), -1).astype(np.float64)

        extremes = [(part.min(axis=0), part.max(axis=0)) for part in parts()]
        low = np.min([one for one, _ in extremes], axis=0)
        high = np.max([one for _, one in extremes], axis=0)
        # so that squares of large numbers do not overflow
        power = np.frexp(np.maximum(np.abs(low), np.abs(high)))[1]
        mean = sum(np.ldexp(part, -power).sum(axis=0) for part in parts()) / count
        squares = sum(np.square(np.ldexp(part, -power) - mean).sum(axis=0) for part in parts())
        varied = np.ldexp(high, -power) > np.ldexp(low, -power)
        scale = np.where(varied, np.ldexp(np.sqrt(squares / count), power), 1.0)
        return cls(tuple(np.ldexp(mean, power).tolist()), tuple(scale.tolist()))

    def apply(self, x: Tensor) -> Tensor:
        """Inputs `(n, ...)` on the common scale, in double precision."""
        mean, scale = (
            torch.tensor(v, dtype=torch.float64, device=x.device).view(x.shape[1:])
            for v in (self.mean, self.scale)
        )
        return (x.double() - mean) / scale
