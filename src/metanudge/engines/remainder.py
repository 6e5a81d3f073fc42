"""A displacement d in a quarter of its size, while the module holds φ = θ + d: φ − θ is d already,
less what rounding φ has lost.

What is lost is at most half a unit in the last place of φ where φ and θ are alike. In steps of
|φ|ε/254 it fits into int8, and d comes back within 2⁻³² |φ| in float32 (2⁻⁶¹ |φ| in float64) and
its own rounding: φ itself is 256 times farther from θ + d. In inner steps that is less than what
the rounding of φ does to the gradient, unless α times the curvature is below about 1/256.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_MOST = 127  # of int8


def remainder(phi: Tensor, theta: Tensor, d: Tensor, *, most: int) -> Tensor:
    """What rounding φ = θ + d has lost of d, in int8; of φ, θ and d `most` entries are worked on at
    a time.

    Example:
        >>> theta, d = torch.tensor([1000.0]), torch.tensor([1.0001])
        >>> phi = theta + d
        >>> lost = remainder(phi, theta, d, most=1)
        >>> [round(float(x), 6) for x in (d, phi - theta, recovered(phi, theta, lost))]
        [1.0001, 1.000122, 1.0001]
    """
    lost = torch.empty_like(phi, dtype=torch.int8)
    unit = torch.finfo(phi.dtype).eps / (2 * _MOST)
    for part, at, centre, moved in pieces(lost, phi, theta, d, most=most):
        # Where φ is 0 this is 0/0, and whatever int8 makes of that is multiplied by φ again.
        part.copy_(
            torch.sub(at, centre)
            .sub_(moved)
            .div_(at)
            .mul_(-1 / unit)
            .round_()
            .clamp_(-_MOST, _MOST)
        )
    return lost


def recovered(phi: Tensor, theta: Tensor, lost: Tensor) -> Tensor:
    """d, from φ and θ as they were for `remainder`."""
    return torch.sub(phi, theta).addcmul_(phi, lost, value=torch.finfo(phi.dtype).eps / (2 * _MOST))


def pieces(*leaves: Tensor, most: int) -> Iterator[tuple[Tensor, ...]]:
    """Views of about `most` entries at most, cut alike out of tensors of one shape, along its
    longest axis.

    Example:
        >>> [tuple(piece.shape) for (piece,) in pieces(torch.zeros(2, 5), most=4)]
        [(2, 2), (2, 2), (2, 1)]
    """
    shape = leaves[0].shape
    axis = max(range(len(shape)), key=shape.__getitem__)
    length = max(1, most * shape[axis] // max(1, leaves[0].numel()))
    return zip(*(leaf.split(length, axis) for leaf in leaves), strict=True)
