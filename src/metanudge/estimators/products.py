"""H w, the Hessian of the support loss at a point of a solve times a vector: by autograd, or from
two plain gradients.
"""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from metanudge.engines.precision import Computed, Precision, precision_of
from metanudge.params import Params, joined, lengths, norm, per_row, zeros_like
from metanudge.solvers.base import check_positive

logger = logging.getLogger("metanudge")

RUNGS = 7
WORTH_HAVING = 0.3  # relative errors of a meta-gradient below this


class ProductsWarning(UserWarning):
    """No ε gives Hessian products by differences that are worth having."""


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


def ladder(problem: Computed) -> tuple[float, ...]:
    """The ε worth trying, for the precision that gradients have now."""
    tried = RANGES[precision_of(problem)]
    return tuple(tried.largest / tried.finer**rung for rung in range(RUNGS))


def usual_epsilon(problem: Computed) -> float:
    """An ε without a look at the model."""
    return RANGES[precision_of(problem)].usual


class Known(Computed, Protocol):
    """What knows of its second derivatives."""

    twice_differentiable: bool


class Curved(Protocol):
    """Support losses along a way: the `Inner` of an engine, or the steps of a live model."""

    @property
    def problem(self) -> Known:
        """Whose losses they are."""

    @property
    def theta(self) -> Params:
        """Where displacements start from."""

    def support_hvp(self, d: Params, v: Params, step: int, batch_size: int | None) -> Params:
        """See `metanudge.engines.Inner`."""

    def support_difference(
        self, d: Params, v: Params, epsilon: Tensor, step: int, batch_size: int | None
    ) -> Params:
        """See `metanudge.engines.Inner`."""


class Products(Protocol):
    """How ∂²f̂/∂φ² and, where layers are shared, ∂²f̂/∂ω∂φ are multiplied with a vector."""

    name: str

    def __call__(
        self, inner: Curved, d: Params, w: Params, step: int, batch_size: int | None
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
        self, inner: Curved, d: Params, w: Params, step: int, batch_size: int | None
    ) -> Params:
        """By `Inner.support_hvp`."""
        return inner.support_hvp(d, w, step, batch_size)


class Difference:
    """[∇f̂(φ + εw) − ∇f̂(φ − εw)] / 2ε on one walk back: two plain support gradients, nothing
    differentiated twice.

    Args:
        epsilon: ‖εw‖ as a multiple of 1 + ‖φ‖, with φ where the last step began. The error is of
            order ε² where f̂ is smooth, plus the gradients' rounding divided by ε.
    """

    name = "difference"

    def __init__(self, epsilon: float) -> None:
        self.epsilon = epsilon
        self._size: Tensor | None = None

    def __call__(
        self, inner: Curved, d: Params, w: Params, step: int, batch_size: int | None
    ) -> Params:
        """The two gradients side by side where the engine can."""
        if self._size is None:  # once a walk: steps change it by little
            self._size = 1 + _size(inner.theta, d)
        length = norm(w)
        # nothing to move along: the difference of equal gradients is zero for any length
        epsilon = (
            self.epsilon * self._size / torch.where(length > 0, length, torch.ones_like(length))
        )
        apart = inner.support_difference(d, w, epsilon, step, batch_size)
        if len(epsilon) == 1:
            torch._foreach_mul_(list(apart.values()), 0.5 / epsilon[0])
            return apart
        return {n: leaf.div_(per_row(2 * epsilon, leaf)) for n, leaf in apart.items()}


class Straight:
    """H w = 0: what differences tend to as ε grows, and the meta-gradient with them."""

    name = "none"

    def __call__(
        self, inner: Curved, d: Params, w: Params, step: int, batch_size: int | None
    ) -> Params:
        """Nothing by what adapts, and nothing said of what is shared."""
        return zeros_like(w)


class Either:
    """By autograd; by differences from the first product on that autograd has no second derivative
    or no memory for. The problem remembers it.
    """

    def __init__(self, epsilon: float) -> None:
        self._difference = Difference(epsilon)
        self.name = Autograd.name

    def __call__(
        self, inner: Curved, d: Params, w: Params, step: int, batch_size: int | None
    ) -> Params:
        """Whichever works."""
        if inner.problem.twice_differentiable:
            try:
                return Autograd()(inner, d, w, step, batch_size)
            except (NotImplementedError, RuntimeError) as error:
                take_differences(inner.problem, error)
        self.name = Difference.name
        return self._difference(inner, d, w, step, batch_size)


def take_differences(problem: Known, error: Exception) -> None:
    """From now on, and say why."""
    problem.twice_differentiable = False
    logger.warning(
        "products: Hessian products come from differences of gradients from now on, as autograd"
        " cannot make them: %s",
        error,
    )


def made(
    how: Literal["auto", "autograd", "difference", "unrolled"],
    epsilon: float | Literal["auto"],
    problem: Known,
) -> Products:
    """The products of this name."""
    if how == "autograd":
        return Autograd()
    epsilon = usual_epsilon(problem) if epsilon == "auto" else epsilon
    return Difference(epsilon) if how == "difference" else Either(epsilon)


def check_epsilon(epsilon: float | Literal["auto"]) -> None:
    """Raise where it is none."""
    if epsilon != "auto":
        check_positive(epsilon, "epsilon", "It is relative to the parameters' norm; or 'auto'.")


def _size(theta: Params, d: Params) -> Tensor:
    """‖θ + d‖ of each row, one tensor at a time."""
    return joined({n: lengths(theta[n] + leaf) for n, leaf in d.items()})


def warn_of_kinks(error: float, seen: str) -> None:
    """Say so where differences have this error at the best, and what of it was seen."""
    if not error >= WORTH_HAVING:  # NaN: nothing to differentiate
        return
    warnings.warn(
        f"Hessian products by differences are not worth having here: {seen}. ReLU and max-pooling"
        ' have kinks that differences in this precision cannot see past. Use products="autograd",'
        " smooth activations (GELU, Softplus, average pooling), float64, or FOBMAML().",
        ProductsWarning,
        stacklevel=2,
    )
