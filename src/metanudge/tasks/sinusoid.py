"""Sinusoid regression: every task is a sine wave of its own amplitude and phase (Finn, Abbeel,
Levine 2017, §5.1).
"""

from __future__ import annotations

from typing import ClassVar, Literal, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metanudge.task import Batch
from metanudge.tasks.counts import Count
from metanudge.tasks.draws import Keys, fork, normal, uniform
from metanudge.tasks.episodes import About, Episodes, Split, Stream


class Sinusoid(Episodes):
    """Regression tasks y = a·sin(x − p) with a ~ U[0.1, 5], p ~ U[0, π] and x ~ U[−5, 5].

    Inputs and targets have shape `(n, 1)`. The splits are streams of their own from the same
    distribution.

    Args:
        shots, queries: support and query points per task.
        noise: standard deviation of Gaussian noise on the targets of both sets.
        amplitude, phase, domain: the ranges that a, p and x are drawn from.
        stream: seed, device and dtype; see `Episodes`.

    Example:
        >>> task = Sinusoid(shots=10, queries=10, seed=0).task(0)
        >>> x, y = task.support
        >>> x.shape, y.shape, bool(y.abs().max() <= 5)
        (torch.Size([10, 1]), torch.Size([10, 1]), True)
    """

    kind: ClassVar[Literal["classification", "regression"]] = "regression"
    about = About(
        "regression: sine waves of random amplitude and phase",
        cite="Finn, Abbeel, Levine (2017), MAML, ICML",
    )

    def __init__(
        self,
        shots: Count = 10,
        queries: int = 10,
        *,
        noise: float = 0.0,
        amplitude: tuple[float, float] = (0.1, 5.0),
        phase: tuple[float, float] = (0.0, np.pi),
        domain: tuple[float, float] = (-5.0, 5.0),
        **stream: Unpack[Stream],
    ) -> None:
        super().__init__(ways=1, shots=shots, queries=queries, **stream)
        if not 0 <= noise < np.inf:
            raise ValueError(
                f"noise={noise} is not a standard deviation. Use 0 for none, or a positive number."
            )
        for name, (low, high) in (("amplitude", amplitude), ("phase", phase), ("domain", domain)):
            if not -np.inf < low <= high < np.inf:
                raise ValueError(
                    f"{name}=({low}, {high}) is not a range. Give two finite numbers, smaller"
                    " first."
                )
        self.noise = noise
        self.amplitude = amplitude
        self.phase = phase
        self.domain = domain

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one example's input: `(1,)`."""
        return (1,)

    def draw(self, keys: Keys, split: Split) -> tuple[Batch, Batch]:
        """One task per key."""
        points = self.shots + self.queries
        wave = uniform(keys, 2)
        amplitude, phase = _between(self.amplitude, wave[:, :1]), _between(self.phase, wave[:, 1:])
        x = _between(self.domain, uniform(fork(keys, np.array([0])), points))
        y = amplitude * np.sin(x - phase)
        if self.noise:
            y += self.noise * normal(fork(keys, np.array([1])), points)
        both = self._tensor(x), self._tensor(y)
        return tuple(t[:, : self.shots] for t in both), tuple(t[:, self.shots :] for t in both)

    def _tensor(self, values: NDArray[np.float64]) -> Tensor:
        return torch.from_numpy(values)[..., None].to(self.dtype).to(self.device)


def _between(bounds: tuple[float, float], u: NDArray[np.float64]) -> NDArray[np.float64]:
    low, high = bounds
    return low + (high - low) * u
