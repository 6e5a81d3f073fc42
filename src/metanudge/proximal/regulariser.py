"""Any differentiable R(φ; θ) a user writes down, in place of the squared distance."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import grad, vjp

from metanudge.params import Params, norm, wide, zeros_like
from metanudge.proximal.base import Force, Proximal, Pull
from metanudge.proximal.lanczos import extreme_eigenvalues, random_direction
from metanudge.proximal.rowwise import Rowwise
from metanudge.proximal.stiffness import Regulariser
from metanudge.task import kind_of


class Custom(Proximal):
    """R(φ; θ) given as a function of two dicts of one task's tensors; its derivatives are
    autograd's.

    `smallest_curvature` is that of R at φ = θ when this was made, estimated with up to 25
    Hessian-vector products; NaN where R has no second derivative or is flat there.
    """

    uses_theta = True

    def __init__(self, regulariser: Regulariser, parameters: Mapping[str, Tensor]) -> None:
        own = regulariser.parameters() if isinstance(regulariser, nn.Module) else ()
        if any(p.requires_grad for p in own):
            raise ValueError(
                "The regulariser has parameters that require grad, but only θ is learned through"
                " it. Call regulariser.requires_grad_(False), or learn a stiffness with learn_lam."
            )
        self._regulariser = regulariser
        self._value = Rowwise(lambda phi, theta: {"value": regulariser(phi, theta)})
        self._on_phi = Rowwise(grad(regulariser))
        self._on_theta = Rowwise(grad(regulariser, argnums=1))
        self._hvp = Rowwise(
            lambda phi, theta, v: vjp(lambda p: grad(regulariser)(p, theta), phi)[1](v)[0]
        )
        self._mixed = Rowwise(
            lambda phi, theta, v: vjp(lambda t: grad(regulariser)(phi, t), theta)[1](v)[0]
        )
        theta = {n: p.detach().to(wide(p.dtype)) for n, p in parameters.items()}
        self._check(theta)
        self.smallest_curvature = self._curvature_at(theta)

    def add_force(self, g: Params, d: Params, theta: Params) -> None:
        """g += ∂_φ R."""
        for name, leaf in self._call(self._on_phi, d, theta).items():
            g[name].add_(leaf)

    def energy(self, d: Params, theta: Params) -> Tensor:
        """R."""
        return self._call(self._value, d, theta)["value"]

    def add_curvature(self, hv: Params, d: Params, v: Params, theta: Params) -> Params:
        """hv + ∂²_φφ R · v."""
        return {n: hv[n] + leaf for n, leaf in self._call(self._hvp, d, theta, v).items()}

    def pull(self, d: Params, theta: Params, v: Params | None = None) -> Pull:
        """−∂_θ R, or −∂²_θφ R · v."""
        if v is None:
            push = self._call(self._on_theta, d, theta)
        else:
            push = self._call(self._mixed, d, theta, v)
        return {n: -leaf for n, leaf in push.items()}, None

    def bind(self, theta: Params, learned: Params) -> tuple[Force, float | Tensor]:
        """d ↦ ∂_φ R(θ + d; θ)."""

        def force(d: Params) -> Params:
            return grad(self._regulariser)({n: theta[n] + leaf for n, leaf in d.items()}, theta)

        return force, self.smallest_curvature

    def _call(self, function: Rowwise, d: Params, theta: Params, *more: Params) -> Params:
        theta = {n: theta[n].to(leaf.dtype).expand_as(leaf) for n, leaf in d.items()}
        # what the function closes over is constant; `grad` inside works all the same
        with torch.no_grad():
            return function({n: theta[n] + leaf for n, leaf in d.items()}, theta, *more)

    def _check(self, theta: Params) -> None:
        value = self._regulariser({n: t.clone() for n, t in theta.items()}, theta)
        if not isinstance(value, Tensor) or value.ndim != 0:
            raise ValueError(
                f"The regulariser must return a scalar tensor, got {kind_of(value)}. Sum it over"
                " all parameters."
            )
        row = {n: t.unsqueeze(0) for n, t in theta.items()}
        force = self._on_phi(row, row)
        if not bool(torch.isfinite(value)) or not bool(torch.isfinite(norm(force)).all()):
            raise ValueError(
                "The regulariser or its gradient is not finite at φ = θ, where every solve starts"
                " (a norm without its square has no gradient there). Make it smooth, e.g."
                " sqrt(distance² + ε)."
            )

    def _curvature_at(self, theta: Params) -> float:
        start = random_direction(theta, seed=0)
        still = zeros_like(start)
        try:
            smallest, _ = extreme_eigenvalues(
                lambda v: self._call(self._hvp, still, theta, v), start
            )
        except (RuntimeError, NotImplementedError):
            return math.nan
        return smallest if smallest > 0 else math.nan
