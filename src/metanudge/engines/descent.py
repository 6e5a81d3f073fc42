"""A step of gradient descent that takes every parameter's gradient as soon as autograd has it, and never holds a whole one.

Support and query gradient come one after the other, and the first is gone when the second arrives; the norm of their sum is what d
has moved since the step began, divided by α. The module still holds φ = θ + d of that moment, up to the rounding of φ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from metanudge.params import Params

Complete = Callable[[Params, Params], None]


class Descent:
    """d ← d − α ∇g(d), for one row, while backward passes run at φ = θ + d.

    Args:
        parameters: the module's own, holding φ; they must not change until `finish`.
        theta: θ.
        d: the displacement, `(1, ...)` each; overwritten.
        lr: α.
        complete: adds what the data do not give (proximal term, linear nudge) to a parameter's gradient, in place, given the old d.

    Cost: nothing but the gradients themselves, each until autograd has the whole of it; parameters below float32 keep theirs in `.grad`.
    """

    def __init__(self, parameters: Mapping[str, Tensor], theta: Params, d: Params, lr: float, complete: Complete) -> None:
        self._parameters = parameters
        self._theta = theta
        self._d = d
        self._lr = lr
        self._complete = complete
        self._norms: Params = {}  # of what came first, with the proximal term
        self._again: list[str] = []  # names of which more has come since
        self._corrections: Params = {}

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take gradients as they come."""
        handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._take, name))
            for name, parameter in self._parameters.items()
            if parameter.dtype == self._d[name].dtype
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def between(self) -> None:
        """To be called between two passes: what rounding adds to the motion measured so far will be left out of the residual."""
        names = [n for n in self._norms if n not in self._again and self._d[n].dtype != torch.float64]
        moved = self._moved(names)
        self._corrections = {n: self._norms[n].square() - m.square() for n, m in zip(names, moved, strict=True)}

    def finish(self) -> Tensor:
        """Step also where no gradient came; ‖∇g‖ at the old d, a scalar."""
        for name, parameter in self._parameters.items():
            if name not in self._norms:
                g = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = None
                self._step(name, g)
        for name, moved in zip(self._again, self._moved(self._again), strict=True):
            if name in self._corrections:
                least = torch.finfo(moved.dtype).eps * self._norms[name].square()  # less would be rounding
                moved = torch.maximum(moved.square() + self._corrections[name], least).sqrt()
            self._norms[name] = moved
        return torch.linalg.vector_norm(torch.stack(list(self._norms.values())))

    def _take(self, name: str, parameter: Tensor) -> None:
        g = parameter.grad
        if g is None:  # a hook of the user's was here before
            return
        parameter.grad = None
        if name not in self._norms:
            self._step(name, g)
            return
        self._d[name].add_(g, alpha=-self._lr)
        if name not in self._again:
            self._again.append(name)

    def _step(self, name: str, g: Tensor) -> None:
        d = self._d[name]
        g = g.to(d.dtype).unsqueeze(0)
        self._complete({name: g}, self._d)
        self._norms[name] = torch.linalg.vector_norm(g)
        d.add_(g, alpha=-self._lr)

    def _moved(self, names: list[str]) -> list[Tensor]:
        """‖φ − θ − d‖ / α of these parameters."""
        if not names:
            return []
        moved = torch._foreach_sub([self._parameters[n].detach() for n in names], [self._theta[n] for n in names])
        torch._foreach_sub_(moved, [self._d[n][0] for n in names])
        return [norm / self._lr for norm in torch._foreach_norm(moved)]
