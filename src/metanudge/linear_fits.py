"""Linear maps fitted to the examples of a task, of many tasks at once: ridge regression in closed
form, logistic regression by accelerated gradient steps preconditioned with a bound of its Hessian
(Böhning 1992), the nearest class mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

_STEPS, _TOLERANCE = 500, 1e-4  # of logistic regression; the latter for each entry of the gradient


@dataclass(frozen=True)
class Linear:
    """Affine maps of inputs, one for each leading index: `(x − centre) @ weight + offset`."""

    weight: Tensor  # (..., features, outputs)
    offset: Tensor  # (..., 1, outputs)
    centre: Tensor  # (..., 1, features)

    def __call__(self, x: Tensor) -> Tensor:
        """Outputs `(..., n, outputs)` for inputs `(..., n, features)`."""
        return (x - self.centre) @ self.weight + self.offset


def ridge(x: Tensor, y: Tensor, penalty: float) -> Linear:
    """Minimises `mean ‖z w + b − y‖² + penalty ‖w‖²` over w and b, z the centred and scaled inputs.

    Args:
        x: inputs `(..., n, features)`.
        y: targets `(..., n, targets)`.
        penalty: 0 or more.

    Example:
        >>> x = torch.tensor([[0.0], [1.0], [2.0]]).double()
        >>> fit = ridge(x, 3 * x + 1, penalty=0.0)
        >>> round(float(fit(torch.tensor([[10.0]]).double())), 6)
        31.0
    """
    axes = _Axes.of(x)
    offset = y.mean(-2, keepdim=True)
    along = axes.z.mT @ (y - offset) / y.shape[-2]
    denominator = axes.variance + penalty
    # no penalty and no spread: nothing is known along this axis
    w = along / denominator.where(denominator > 0, 1.0)[..., None]
    return Linear(axes.back @ w, offset, axes.centre)


def logistic(x: Tensor, labels: Tensor, classes: int, penalty: float) -> Linear:
    """Minimises the mean cross-entropy `+ ½ penalty (‖w‖² + ‖b‖²)` of `z w + b` over w and b.

    Args:
        x: inputs `(..., n, features)`.
        labels: class numbers `(..., n)`.
        classes: how many there are.
        penalty: positive.
    """
    axes, n = _Axes.of(x), x.shape[-2]
    # z is centred, so the constant is orthogonal to it and the bound of the Hessian diagonal
    z = torch.cat([axes.z, torch.ones_like(axes.z[..., :1])], -1)
    variance = torch.cat([axes.variance, torch.ones_like(axes.variance[..., :1])], -1)
    bound = (0.5 * variance + penalty)[..., None]
    root = (penalty / bound.amax(-2, keepdim=True)).sqrt()
    momentum = (1 - root) / (1 + root)
    wanted = one_hot(labels, classes).to(x)
    w = ahead = x.new_zeros(*z.shape[:-2], z.shape[-1], classes)
    for step in range(_STEPS):
        gradient = z.mT @ ((z @ ahead).softmax(-1) - wanted) / n + penalty * ahead
        if step % 10 == 9 and bool(gradient.abs().amax() <= _TOLERANCE):
            break
        before, w = w, ahead - gradient / bound
        ahead = w + momentum * (w - before)
    return Linear(axes.back @ ahead[..., :-1, :], ahead[..., -1:, :], axes.centre)


@dataclass(frozen=True)
class _Axes:
    """Inputs along the axes on which they vary independently."""

    z: Tensor  # (..., n, axes), columns orthogonal, mean squared length 1
    variance: Tensor  # (..., axes), of the columns
    back: Tensor  # (..., features, axes): z = (x − centre) @ back
    centre: Tensor  # (..., 1, features)

    @classmethod
    def of(cls, x: Tensor) -> _Axes:
        n, features = x.shape[-2:]
        centre = x.mean(-2, keepdim=True)
        spread = x - centre
        if features <= n:
            variance, back = torch.linalg.eigh(spread.mT @ spread / n)
            variance = variance.clamp(min=0)
        else:
            variance, rows = torch.linalg.eigh(spread @ spread.mT / n)
            variance = variance.clamp(min=0)
            # below this an axis is the rounding of the products
            there = variance > 1e-12 * variance.amax(-1, keepdim=True)
            variance = variance * there
            length = (n * variance).sqrt().where(there, 1.0)
            back = spread.mT @ rows * (there / length)[..., None, :]
        total = variance.sum(-1, keepdim=True)
        total = total.where(total > 0, 1.0)
        back = back / total.sqrt()[..., None]
        return cls(spread @ back, variance / total, back, centre)


def centroids(x: Tensor, labels: Tensor, classes: int) -> Callable[[Tensor], Tensor]:
    """Scores by distance to the mean of each class: the nearest has the highest; classes without
    examples have none.
    """
    members = one_hot(labels, classes).to(x)
    counts = members.sum(-2)
    means = members.mT @ x / counts.clamp(min=1)[..., None]
    absent = (counts == 0)[..., None, :]

    def score(query: Tensor) -> Tensor:
        distance = means.square().sum(-1)[..., None, :] - 2 * query @ means.mT
        return (-distance).masked_fill(absent, -torch.inf)

    return score
