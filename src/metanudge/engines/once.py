"""Functions that can be differentiated once only, found before their second derivative is taken for
zero.

What `torch.autograd.function.once_differentiable` marks raises in a second backward pass that comes
along. But `torch.autograd.grad` passes it by, as nothing leads on from there to a parameter; and
where its own output has a constant derivative (a loss that is one such function), there is nothing
to come along.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

_MARK = once_differentiable(lambda ctx: None).__code__


class NoSecondDerivative(RuntimeError):
    """Autograd has no second derivative of a loss."""


def refuse_once_differentiable(value: Tensor, by: Iterable[Tensor]) -> None:
    """Raise where a function that can be differentiated once stands between `value` and `by`.

    Example:
        >>> import torch
        >>> class Double(torch.autograd.Function):
        ...     forward = staticmethod(lambda ctx, x: 2 * x)
        ...     backward = staticmethod(once_differentiable(lambda ctx, g: 2 * g))
        >>> x, y = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
        >>> refuse_once_differentiable(Double.apply(x).sum() + y.sum(), [y])
        >>> refuse_once_differentiable(Double.apply(x).sum() + y.sum(), [x])
        Traceback (most recent call last):
            ...
        metanudge.engines.once.NoSecondDerivative: Double is marked with @once_differentiable, ...
    """
    ends = {get_gradient_edge(leaf).node for leaf in by if leaf.requires_grad}
    for node in _behind(value.grad_fn, ends):
        function = getattr(node, "_forward_cls", None)
        if getattr(getattr(function, "backward", None), "__code__", None) is not _MARK:
            continue
        if any(reached in ends for reached in _behind(node, ends)):
            raise NoSecondDerivative(
                f"{getattr(function, '__name__', function)} is marked with @once_differentiable, so"
                " that autograd would take its second derivative for zero. Use differences of"
                " gradients, e.g. products='difference', or FOBMAML, or write its backward with"
                " operations that autograd can differentiate."
            )


def _behind(start: Any, ends: set[Any]) -> Iterator[Any]:
    """All nodes of the graph from `start` on, up to `ends`."""
    seen, waiting = set(), [start]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        if node not in ends:
            waiting.extend(after for after, _ in node.next_functions)
