"""½‖φ − θ‖²_λ with one λ for all parameters, per tensor, or per parameter."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from metanudge.params import Params, dot
from metanudge.proximal.base import Force, Proximal


class Diagonal(Proximal):
    """R = ½ Σ λ d².

    Attributes:
        lam: λ of each parameter, 0-d or of the parameter's shape; the tensors stay the same from
            step to step.
    """

    _fixed = True

    def __init__(self, lam: Params) -> None:
        self.lam = lam

    @cached_property
    def _smallest(self) -> float:
        return min(float(value.min()) for value in self.lam.values())

    @property
    def smallest_curvature(self) -> float | Tensor:
        """The smallest λ."""
        return self._smallest

    @cached_property
    def common(self) -> Tensor | None:
        """The one λ of all parameters, where there is one."""
        first = next(iter(self.lam.values()))
        if first.ndim or any(value.ndim for value in self.lam.values()):
            return None
        return (
            first
            if all(
                value is first
                or (value.dtype == first.dtype and self._fixed and bool(value == first))
                for value in self.lam.values()
            )
            else None
        )

    def add_force(self, g: Params, d: Params, theta: Params) -> None:
        """g += λ d."""
        for name, leaf in g.items():
            leaf.addcmul_(d[name], self.lam[name])

    def energy(self, d: Params, theta: Params) -> Tensor:
        """½ Σ λ d²."""
        return 0.5 * dot(d, {n: self.lam[n] * leaf for n, leaf in d.items()})

    def add_curvature(self, hv: Params, d: Params, v: Params, theta: Params) -> Params:
        """hv + λ v."""
        return {n: torch.addcmul(leaf, v[n], self.lam[n]) for n, leaf in hv.items()}

    def pull(self, d: Params, theta: Params) -> tuple[Params, Params | None]:
        """λ d."""
        return d, self.lam

    def pull_along(self, d: Params, v: Params, theta: Params) -> tuple[Params, Params | None]:
        """λ v."""
        return v, self.lam

    def bind(self, theta: Params, learned: Params) -> tuple[Force, float | Tensor]:
        """d ↦ λ d."""
        return multiply_by(self.lam), self.smallest_curvature


def multiply_by(lam: Params) -> Force:
    """d ↦ λ d."""
    return lambda d: {n: lam[n] * leaf for n, leaf in d.items()}
