"""Inputs on a common scale: each column less its mean, divided by its standard deviation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


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
        x = examples.reshape(len(examples), -1).astype(np.float64)
        # so that squares of large numbers do not overflow
        power = np.frexp(np.abs(x).max(axis=0))[1]
        z = np.ldexp(x, -power)
        scale = np.where(np.ptp(z, axis=0) > 0, np.ldexp(z.std(axis=0), power), 1.0)
        return cls(tuple(np.ldexp(z.mean(axis=0), power).tolist()), tuple(scale.tolist()))

    def apply(self, x: Tensor) -> Tensor:
        """Inputs `(n, ...)` on the common scale, in double precision."""
        mean, scale = (
            torch.tensor(v, dtype=torch.float64, device=x.device).view(x.shape[1:])
            for v in (self.mean, self.scale)
        )
        return (x.double() - mean) / scale
