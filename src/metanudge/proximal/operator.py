"""½⟨d, A d⟩ with A any symmetric positive-definite operator: a vector or a matrix as stiffness
(paper, § 3.3).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from metanudge.params import Params, dot, norm
from metanudge.proximal.base import Force, Proximal, Pull
from metanudge.proximal.lanczos import extreme_eigenvalues, random_direction
from metanudge.proximal.rowwise import Rowwise
from metanudge.proximal.stiffness import Operator

PROBES = 3
FIX = "Give a symmetric positive-definite operator, e.g. v ↦ Lᵀ(L v) + εv, or numbers."


class Matrix(Proximal):
    """R = ½⟨d, A d⟩ for a user's product d ↦ A d on the dict of one task; checked on random
    directions when it is made.

    `smallest_curvature` is estimated with 25 products: at most a little too large.
    """

    def __init__(self, operator: Operator, parameters: Mapping[str, Tensor]) -> None:
        self._operator = operator
        self._shapes = _shapes(parameters)
        self._rows = Rowwise(self._product)
        self.smallest_curvature = self._probe(parameters)

    def product(self, v: Params) -> Params:
        """A v of every row."""
        with torch.no_grad():
            return self._rows(v)

    def add_force(self, g: Params, d: Params, theta: Params) -> None:
        """g += A d."""
        for name, leaf in self.product(d).items():
            g[name].add_(leaf)

    def energy(self, d: Params, theta: Params) -> Tensor:
        """½⟨d, A d⟩."""
        return 0.5 * dot(d, self.product(d))

    def add_curvature(self, hv: Params, d: Params, v: Params, theta: Params) -> Params:
        """hv + A v."""
        return {n: hv[n] + leaf for n, leaf in self.product(v).items()}

    def pull(self, d: Params, theta: Params, v: Params | None = None) -> Pull:
        """A d, or A v."""
        return self.product(d if v is None else v), None

    def bind(self, theta: Params, learned: Params) -> tuple[Force, float | Tensor]:
        """d ↦ A d."""
        return self._product, self.smallest_curvature

    def _product(self, v: Params) -> Params:
        """A v of one task, in the order and dtypes of v."""
        result = self._operator(v)
        got = _shapes(result) if isinstance(result, Mapping) else type(result).__name__
        if got != self._shapes:
            raise ValueError(
                "The operator given as lam must return a dict with the names and shapes it is"
                f" given ({self._shapes}), got {got}."
            )
        return {n: result[n].to(leaf.dtype) for n, leaf in v.items()}

    def _probe(self, parameters: Mapping[str, Tensor]) -> float:
        """Refuse what is not linear, symmetric and positive on random directions; returns the
        smallest eigenvalue, estimated.
        """
        with torch.no_grad():
            probes = [random_direction(parameters, seed) for seed in range(2 * PROBES)]
            images = [self.product(v) for v in probes]
            slack = max(torch.finfo(leaf.dtype).eps for leaf in probes[0].values()) ** 0.5
            if not all(bool(torch.isfinite(norm(image)).all()) for image in images):
                raise ValueError(f"The operator given as lam returns NaN or Inf. {FIX}")
            probed = list(zip(probes, images, strict=True))
            for (u, au), (v, av) in zip(probed[::2], probed[1::2], strict=True):
                size = float(norm(au) + norm(av))
                both = self.product({n: u[n] + 2 * v[n] for n in u})
                if float(norm({n: both[n] - au[n] - 2 * av[n] for n in u})) > slack * size:
                    raise ValueError(
                        "The operator given as lam is not linear: A(u + 2v) differs from Au + 2Av."
                        f" {FIX}"
                    )
                if abs(float(dot(u, av) - dot(au, v))) > slack * size:
                    raise ValueError(
                        "The operator given as lam is not symmetric: ⟨u, Av⟩ ="
                        f" {float(dot(u, av)):.6g} but ⟨Au, v⟩ = {float(dot(au, v)):.6g}. {FIX}"
                    )
            smallest, largest = extreme_eigenvalues(self.product, probes[0])
            if smallest <= slack**2 * abs(largest):
                raise ValueError(
                    "The operator given as lam is not positive definite: it has an eigenvalue of"
                    f" at most {smallest:.3g}, so that the inner problem may have no unique"
                    f" solution. {FIX}"
                )
        return smallest


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {n: tuple(t.shape) for n, t in tensors.items()}
