"""Activations with a border of zeros around them, where the next convolution wants one."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Padded(NamedTuple):
    """An activation `(rows, examples, *spatial, channels)` as a view of a larger tensor whose
    border is zero.
    """

    whole: Tensor
    inside: Tensor


def padded(like: Tensor, shape: tuple[int, ...], border: tuple[int, ...]) -> Padded:
    """Memory for an activation of this shape; its inside holds anything."""
    rows, examples, *spatial, channels = shape
    whole = inside = like.new_empty(
        rows, examples, *(n + 2 * p for n, p in zip(spatial, border, strict=True)), channels
    )
    for axis, (size, p) in enumerate(zip(spatial, border, strict=True), 2):
        if p:
            inside.narrow(axis, 0, p).zero_()
            inside.narrow(axis, p + size, p).zero_()
            inside = inside.narrow(axis, p, size)
    return Padded(whole, inside)
