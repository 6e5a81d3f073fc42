"""½‖φ − θ‖²_λ with one λ for all parameters, per tensor, or per parameter."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from metanudge.params import Params, dot
from metanudge.proximal.base import Force, Proximal, Pull


class Diagonal(Proximal):
    """R = ½ Σ λ d².

    Attributes:
        lam: λ of each parameter, 0-d or of the parameter's shape; the tensors stay the same from
            step to step.
        smallest_curvature: the smallest λ; with `smallest`, values change from step to step.
    """

    def __init__(self, lam: Params, smallest: Tensor | None = None) -> None:
        self.lam = lam
        self._fixed = smallest is None
        self.smallest_curvature = (
            min(float(value.min()) for value in lam.values()) if smallest is None else smallest
        )

    @cached_property
    def common(self) -> Tensor | None:
        """The one λ of all parameters, where there is one."""
        first = next(iter(self.lam.values()))
        same = all(
            value is first
            or (self._fixed and value.dtype == first.dtype and torch.equal(value, first))
            for value in self.lam.values()
        )
        return first if same and first.ndim == 0 else None

    def add_force(self, g: Params, d: Params, theta: Params) -> None:
        """g += λ d."""
        alpha = self.smallest_curvature
        if isinstance(alpha, float) and self.common is not None:  # then it is the common one
            torch._foreach_add_(list(g.values()), [d[n] for n in g], alpha=alpha)
            return
        for name, leaf in g.items():
            leaf.addcmul_(d[name], self.lam[name])

    def energy(self, d: Params, theta: Params) -> Tensor:
        """½ Σ λ d²."""
        return 0.5 * dot(d, {n: self.lam[n] * leaf for n, leaf in d.items()})

    def add_curvature(self, hv: Params, d: Params, v: Params, theta: Params) -> Params:
        """hv + λ v."""
        return {n: torch.addcmul(leaf, v[n], self.lam[n]) for n, leaf in hv.items()}

    def pull(self, d: Params, theta: Params, v: Params | None = None) -> Pull:
        """λ d, or λ v."""
        return d if v is None else v, self.lam

    def bind(self, theta: Params, learned: Params) -> tuple[Force, float | Tensor]:
        """d ↦ λ d."""
        return multiply_by(self.lam), self.smallest_curvature


def multiply_by(lam: Params) -> Force:
    """d ↦ λ d."""
    return lambda d: {n: lam[n] * leaf for n, leaf in d.items()}
