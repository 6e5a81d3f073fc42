"""Gradient descent that takes every parameter's gradient as soon as autograd has it, and never holds a whole one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from metanudge.params import Params

Take = Callable[[str, Tensor], None]
Complete = Callable[[Params, Params], None]
_LEFT = 0.05


class Listener:
    """Hears of every parameter whose gradient is there, from the first use until `close`.

    Left out are the smallest parameters, a twentieth of all entries, which would cost more time than memory; and those below float32.
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self._parameters = parameters
        self._handles: list[RemovableHandle] = []
        self._take: Take | None = None

    @contextmanager
    def handing_to(self, take: Take) -> Iterator[None]:
        """Within, backward passes hand over names and parameters as soon as their `.grad` has all that the pass adds to it."""
        if not self._handles:
            names = _all_but_the_smallest(self._parameters)
            self._handles = [self._parameters[n].register_post_accumulate_grad_hook(partial(self._hear, n)) for n in names]
        self._take = take
        try:
            yield
        finally:
            self._take = None

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

    def _hear(self, name: str, parameter: Tensor) -> None:
        if self._take is not None:
            self._take(name, parameter)


class Descent:
    """One step d ← d − α ∇g(d), for one row, while backward passes run at φ = θ + d.

    A gradient that comes in several parts (support and query set) is gone when the next part arrives. The norm of their sum is what d
    has moved by, divided by α: the module still holds the φ at which the step began, so the old d is φ − θ, up to the rounding of φ.

    Args:
        parameters: the module's own, holding φ.
        theta: θ.
        d: the displacement, `(1, ...)` each; overwritten.
        lr: α.
        complete: adds what the data do not give (proximal term, linear nudge) to leaves of a gradient at d, in place.
        parts: how many backward passes there will be.

    Cost: the gradient by the parameter that autograd is at, and by those that nobody hands over.
    """

    def __init__(self, parameters: Mapping[str, Tensor], theta: Params, d: Params, lr: float, complete: Complete, *, parts: int) -> None:
        self._parameters = parameters
        self._theta = theta
        self._d = d
        self._lr = lr
        self._complete = complete
        self._parts = parts
        self._norms: dict[str, Tensor | None] = {}  # None where the motion will tell

    def take(self, name: str, parameter: Tensor) -> None:
        """Take a parameter's gradient, or one more part of it, and step."""
        g, d = parameter.grad, self._d[name]
        if g is None:  # a hook of the user's was here before
            return
        parameter.grad = None
        if name in self._norms:
            self._norms[name] = None
        else:
            g = g.unsqueeze(0)
            self._complete({name: g}, self._d)
            self._norms[name] = torch.linalg.vector_norm(g) if self._parts == 1 else None
        d.add_(g, alpha=-self._lr)

    def finish(self) -> Tensor:
        """Step where nothing was handed over, too; ‖∇g‖ at the old d, `(1,)`. What the parameters hold then means nothing."""
        rest = {n: row(take_gradient(p)) for n, p in self._parameters.items() if n not in self._norms}
        norms = [norm for norm in self._norms.values() if norm is not None]
        norms += self._motions([name for name, norm in self._norms.items() if norm is None])
        if rest:
            self._complete(rest, self._d)
            leaves = list(rest.values())
            norms += torch._foreach_norm(leaves)
            torch._foreach_add_([self._d[n] for n in rest], leaves, alpha=-self._lr)
        return torch.linalg.vector_norm(torch.stack(norms)).reshape(1)

    def _motions(self, names: list[str]) -> list[Tensor]:
        """‖φ − θ − d‖ / α of these parameters; overwrites φ, which saves a copy."""
        if not names:
            return []
        phi = [self._parameters[n].data for n in names]
        torch._foreach_sub_(phi, [self._theta[n] for n in names])
        torch._foreach_sub_(phi, [self._d[n][0] for n in names])
        motions = list(torch._foreach_norm(phi))
        torch._foreach_mul_(motions, 1 / self._lr)
        return motions


def take_gradient(parameter: Tensor) -> Tensor:
    """A parameter's gradient, taken out of it; zeros where there is none."""
    g = parameter.grad
    if g is None:
        return torch.zeros_like(parameter, requires_grad=False)
    parameter.grad = None
    return g


def row(g: Tensor) -> Tensor:
    """A gradient with a row axis, in the dtype of displacements."""
    return (g if g.dtype.itemsize >= 4 else g.float()).unsqueeze(0)


def _all_but_the_smallest(parameters: Mapping[str, Tensor]) -> list[str]:
    sizes = {n: p.numel() for n, p in parameters.items() if p.dtype.itemsize >= 4}
    left = _LEFT * sum(sizes.values())
    for name in sorted(sizes, key=sizes.__getitem__):
        left -= sizes[name]
        if left < 0:
            break
        del sizes[name]
    return list(sizes)
