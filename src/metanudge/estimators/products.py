"""H w, the Hessian of the support loss at a point of a solve times a vector: by autograd, or from
two plain gradients.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

import torch

from metanudge.engines import Inner
from metanudge.engines.precision import Precision, precision_of
from metanudge.params import Params, norm, per_row
from metanudge.problem import TwoLevels

logger = logging.getLogger("metanudge")

RUNGS = 7


@dataclass(frozen=True)
class Range:
    """The ε worth trying in one precision.

    Attributes:
        usual: without a look at the model.
        largest: the first one tried.
        finer: how many times smaller each one is than the one before.
    """

    usual: float
    largest: float
    finer: float


# Usual ones: the best on a small perceptron, convolutions and a Transformer, smooth, within a
# factor of three (TF32: between its neighbours). In float64 kinks leave room far below.
RANGES = {
    Precision.DOUBLE: Range(1e-6, 1e-3, 10.0),
    Precision.SINGLE: Range(5e-4, 3e-2, 10**0.5),
    Precision.TENSOR_FLOAT: Range(3e-3, 1e-1, 10**0.5),
    Precision.AUTOCAST: Range(2e-2, 1e-1, 10**0.5),
    Precision.HALF: Range(2e-2, 3e-1, 10**0.5),
}


def ladder(problem: TwoLevels) -> tuple[float, ...]:
    """The ε worth trying, for the precision that gradients have now."""
    tried = RANGES[precision_of(problem)]
    return tuple(tried.largest / tried.finer**rung for rung in range(RUNGS))


def usual_epsilon(problem: TwoLevels) -> float:
    """An ε without a look at the model."""
    return RANGES[precision_of(problem)].usual


class Products(Protocol):
    """How ∂²f̂/∂φ² and, where layers are shared, ∂²f̂/∂ω∂φ are multiplied with a vector."""

    name: str

    def __call__(
        self, inner: Inner, d: Params, w: Params, step: int, batch_size: int | None
    ) -> Params:
        """How the gradient of f̂ at θ + d, by all it depends on, changes as φ moves along w; with
        the data and the random numbers of an inner step.
        """


class Autograd:
    """Exact, by one double backward: the activations of one step with their graph, and one support
    gradient and one Hessian-vector product each.
    """

    name = "autograd"

    def __call__(
        self, inner: Inner, d: Params, w: Params, step: int, batch_size: int | None
    ) -> Params:
        """By `Inner.support_hvp`."""
        return inner.support_hvp(d, w, step, batch_size)


class Difference:
    """[∇f̂(φ + εw) − ∇f̂(φ − εw)] / 2ε: two plain support gradients, nothing differentiated twice.

    Args:
        epsilon: ‖εw‖ as a multiple of 1 + ‖φ‖. The error is of order ε² where f̂ is smooth, plus
            the gradients' rounding divided by ε.
    """

    name = "difference"

    def __init__(self, epsilon: float) -> None:
        self.epsilon = epsilon

    def __call__(
        self, inner: Inner, d: Params, w: Params, step: int, batch_size: int | None
    ) -> Params:
        """The two gradients side by side where the engine can."""
        size = 1 + inner.lengths(d)
        length = norm(w)
        # nothing to move along: the difference of equal gradients is zero for any length
        epsilon = self.epsilon * size / torch.where(length > 0, length, torch.ones_like(length))
        apart = inner.support_difference(d, w, epsilon, step, batch_size)
        if len(epsilon) == 1:
            torch._foreach_mul_(list(apart.values()), 0.5 / epsilon[0])
            return apart
        return {n: leaf.div_(per_row(2 * epsilon, leaf)) for n, leaf in apart.items()}


class Either:
    """By autograd; by differences from the first product on that autograd has no second derivative
    or no memory for. The problem remembers it.
    """

    def __init__(self, epsilon: float) -> None:
        self._difference = Difference(epsilon)
        self.name = Autograd.name

    def __call__(
        self, inner: Inner, d: Params, w: Params, step: int, batch_size: int | None
    ) -> Params:
        """Whichever works."""
        if inner.problem.twice_differentiable:
            try:
                return Autograd()(inner, d, w, step, batch_size)
            except (NotImplementedError, RuntimeError) as error:
                inner.problem.twice_differentiable = False
                logger.warning(
                    "products: MAML takes Hessian products from differences of gradients from now"
                    " on, as autograd cannot: %s",
                    error,
                )
        self.name = Difference.name
        return self._difference(inner, d, w, step, batch_size)
