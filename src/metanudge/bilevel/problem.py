"""The two functions of a bilevel problem as estimators know them: φ adapts, x is shared, and there
is no proximal term.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from metanudge.bilevel.tree import Tree
from metanudge.engines.randomness import Draws
from metanudge.params import Params, wide
from metanudge.proximal import Absent, Proximal
from metanudge.task import describe

Function = Callable[[Any, Any], Tensor]
Level = Literal["inner", "outer"]


class Bilevel:
    """g(x, φ) and f(x, φ) at a fixed x, as functions of the displacement d = φ − init; see
    `metanudge.problem.TwoLevels`.

    Args:
        inner, outer: the user's functions of the whole structures.
        x, init: those structures.
        strong_convexity: a lower bound of g's curvature in φ, where the user knows one.
        seed: of random numbers drawn inside the functions; the same in every solve.
    """

    learns_theta = False
    twice_differentiable = True
    rates = None

    def __init__(
        self,
        inner: Function,
        outer: Function,
        x: Tree,
        init: Tree,
        *,
        strong_convexity: float | None,
        seed: int,
    ) -> None:
        self._functions: dict[str, Function] = {"inner": inner, "outer": outer}
        self._x_tree, self._phi_tree = x, init
        self.shared, self.parameters = x.tensors, init.tensors
        self.proximal: Proximal = Absent(math.nan if strong_convexity is None else strong_convexity)
        self.smallest_lam = self.proximal.smallest_curvature

        self.device = next(iter(self.parameters.values())).device
        self.draws = Draws(seed, self.device)

    def moved(self, shift: Params) -> Bilevel:
        """The same problem at another x; the shift has a row axis."""
        moved = copy.copy(self)
        moved.shared = {n: (t + shift[n][0]).to(t.dtype) for n, t in self.shared.items()}
        return moved

    def zero_gradient(self) -> Params:
        """A hypergradient of zero, in float32 at least."""
        return {n: torch.zeros_like(t, dtype=wide(t.dtype)) for n, t in self.shared.items()}

    def phi(self, d: Params) -> Params:
        """φ = init + d, without the row axis."""
        return {n: (t + d[n][0]).to(t.dtype) for n, t in self.parameters.items()}

    def evaluate(self, level: Level, x: Params, phi: Params, step: int = 0) -> Tensor:
        """The value of one function, with whatever graph x and φ bring; `step` chooses its random
        numbers.
        """
        function = self._functions[level]
        with self.draws.seeded(step, "support" if level == "inner" else "query"):
            return scalar_of(
                f"{level}(x, phi)",
                lambda: function(self._x_tree.build(x), self._phi_tree.build(phi)),
                lambda: f" with {_shapes(x)} and {_shapes(phi)}",
            )


def scalar_of(call: str, run: Callable[[], Any], where: Callable[[], str]) -> Tensor:
    """What a function of the user's returns, which must be a scalar; should it raise, the error
    says where.
    """
    try:
        value = run()
    except Exception as error:
        error.add_note(f"It happened in {call}{where()}.")
        raise
    if not isinstance(value, Tensor) or value.ndim != 0 or not value.is_floating_point():
        tensor = isinstance(value, Tensor)
        got = f"a tensor of shape {describe(value)}" if tensor else type(value).__name__
        raise TypeError(
            f"{call} must return a floating scalar tensor, got {got}. Reduce it with .mean() or"
            " .sum(), and do not turn it into a number with float() or .item()."
        )
    return value


def _shapes(tensors: Params) -> str:
    return ", ".join(f"{n}: {describe(t)}" for n, t in tensors.items())
