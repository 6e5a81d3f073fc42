"""What the rest of the package asks of a proximal term: its force on φ, its energy, and what it
says about θ and about itself. The usual one, ½‖φ − θ‖²_λ with one λ for all parameters, per tensor,
or per parameter; and no term at all, which answers with zeros.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from metanudge.params import Params, dot

Force = Callable[[Params], Params]
Pull = tuple[Params, Params | None]
"""Rows, and a factor that all of them share (None for 1)."""


class Proximal(ABC):
    """R(φ; θ), the term that ties a task's φ = θ + d to the meta-parameters.

    Displacements `d`, directions `v` and results have a row axis, θ has none (or has one, where
    each row has a θ of its own).

    Attributes:
        uses_theta: whether θ itself matters, and not only d = φ − θ.
        smallest_curvature: the strong convexity that the term guarantees by itself, NaN where
            nothing is known; a 0-d tensor on the device where it changes from step to step.
    """

    uses_theta = False
    smallest_curvature: float | Tensor

    @property
    def learned(self) -> dict[str, nn.Parameter]:
        """Parameters of the term that are meta-learned, keyed like the learner's
        `named_parameters()`.
        """
        return {}

    def refresh(self) -> None:  # noqa: B027 (most terms are what they are)
        """Take over new values of the learned parameters; called once when a meta-step, an
        evaluation or an adaptation begins.
        """

    @abstractmethod
    def add_force(self, g: Params, d: Params, theta: Params) -> None:
        """g += ∂_φ R, in place."""

    @abstractmethod
    def energy(self, d: Params, theta: Params) -> Tensor:
        """R itself, `(rows,)`."""

    @abstractmethod
    def add_curvature(self, hv: Params, d: Params, v: Params, theta: Params) -> Params:
        """hv + ∂²_φφ R · v, out of place."""

    @abstractmethod
    def pull(self, d: Params, theta: Params, v: Params | None = None) -> Pull:
        """−∂_θ R at fixed φ, or its derivative as φ moves along v, −∂²_θφ R · v."""

    def accumulate(  # noqa: B027 (most terms learn nothing)
        self, gradient: Params, a: Params, b: Params, weights: Sequence[float], scale: Params | None
    ) -> None:
        """gradient += Σ_r w_r λ a_r b_r of each learned parameter, λ replaced by `scale` where
        given; sums over the parameters that share a λ.

        Rows are nudge by nudge, with one weight per nudge.

        With a = b = d and weights ½w this is w ∂_{log λ} R; with a = d, b = v its derivative as φ
        moves along v.
        """

    @abstractmethod
    def bind(self, theta: Params, learned: Params) -> tuple[Force, float | Tensor]:
        """∂_φ R as a function of one task's d (no row axis) that autograd follows into θ and the
        learned parameters; and its μ.
        """


class Absent(Proximal):
    """R = 0: what solves start from is a constant, and the inner function is all there is;
    `smallest_curvature` is what is known of its own.
    """

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

    def pull(self, d: Params, theta: Params, v: Params | None = None) -> Pull:
        """There is no θ to pull on."""
        return {}, None

    def bind(self, theta: Params, learned: Params) -> tuple[Force, float | Tensor]:
        """d ↦ 0."""
        return lambda d: {n: leaf.new_zeros(()) for n, leaf in d.items()}, self.smallest_curvature


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
