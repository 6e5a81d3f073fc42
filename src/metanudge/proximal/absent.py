"""No proximal term: what solves start from is a constant, and the inner function is all there
is.
"""

from __future__ import annotations

from torch import Tensor

from metanudge.params import Params
from metanudge.proximal.base import Force, Proximal


class Absent(Proximal):
    """R = 0; `smallest_curvature` is what is known of the inner function's own."""

    def __init__(self, smallest_curvature: float) -> None:
        self.smallest_curvature = smallest_curvature

    def add_force(self, g: Params, d: Params, theta: Params) -> None:
        """g as it is."""

    def energy(self, d: Params, theta: Params) -> Tensor:
        """0."""
        return next(iter(d.values())).new_zeros(())

    def add_curvature(self, hv: Params, d: Params, v: Params, theta: Params) -> Params:
        """hv as it is."""
        return hv

    def pull(
        self, d: Params, theta: Params, v: Params | None = None
    ) -> tuple[Params, Params | None]:
        """There is no θ to pull on."""
        return {}, None

    def bind(self, theta: Params, learned: Params) -> tuple[Force, float | Tensor]:
        """d ↦ 0."""
        return lambda d: {n: leaf.new_zeros(()) for n, leaf in d.items()}, self.smallest_curvature
