"""The two functions of a bilevel problem, their values and derivatives; solvers and estimators see nothing else of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from metanudge.bilevel.tree import Tree, wide
from metanudge.engines.randomness import Draws
from metanudge.params import Params
from metanudge.task import describe

Function = Callable[[Any, Any], Tensor]
Level = Literal["inner", "outer"]


@dataclass(frozen=True)
class Point:
    """One of the two functions at a point (x, φ).

    Attributes:
        value: the function's value.
        by_phi: its gradient in φ, with the row axis that solvers want: leaves `(1, *shape)`.
        by_x: its partial gradient in x, at fixed φ.
    """

    value: Tensor
    by_phi: Params
    by_x: Params


@dataclass
class Evaluations:
    """Backward passes through each function, and second backward passes."""

    inner_gradients: int = 0
    outer_gradients: int = 0
    hessian_products: int = 0


class Bilevel:
    """g(x, φ) and f(x, φ) at a fixed x, as functions of the displacement d = φ − init.

    Args:
        inner, outer: the user's functions of the whole structures.
        x, init: those structures.
        strong_convexity: a lower bound of g's curvature in φ, where the user knows one.
        seed: of random numbers drawn inside the functions; the same in every solve.
    """

    def __init__(self, inner: Function, outer: Function, x: Tree, init: Tree, *, strong_convexity: float | None, seed: int) -> None:
        self._functions: dict[str, Function] = {"inner": inner, "outer": outer}
        self._x_tree, self._phi_tree = x, init
        self.x, self.init = x.tensors, init.tensors
        self.strong_convexity = strong_convexity
        self.draws = Draws(seed, next(iter(self.init.values())).device)
        self.evaluations = Evaluations()
        self.depends_on_x = False

    def moved(self, x: Params) -> Bilevel:
        """The same problem at another x; evaluations go on the same account."""
        moved = copy.copy(self)
        moved.x = x
        return moved

    def zeros(self) -> Params:
        """The displacement of `init` itself; single numbers get an axis of their own, since rows have at least one entry axis."""
        return {n: torch.zeros((1, *(t.shape or (1,))), dtype=wide(t.dtype), device=t.device) for n, t in self.init.items()}

    def phi(self, d: Params) -> Params:
        """φ = init + d, without the row axis."""
        return {n: (t + d[n].reshape(t.shape)).to(t.dtype) for n, t in self.init.items()}

    def evaluate(self, level: Level, x: Params, phi: Params, step: int = 0) -> Tensor:
        """The value of one function, with whatever graph x and φ bring; `step` chooses its random numbers."""
        try:
            with self.draws.seeded(step, "support" if level == "inner" else "query"):
                value = self._functions[level](self._x_tree.build(x), self._phi_tree.build(phi))
        except Exception as error:
            error.add_note(f"It happened in {level}(x, phi) with {_shapes(x)} and {_shapes(phi)}.")
            raise
        if not isinstance(value, Tensor) or value.ndim != 0 or not value.is_floating_point():
            got = f"a tensor of {describe(value)}" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(
                f"{level}(x, phi) must return a floating scalar tensor, got {got}. "
                "Reduce it with .mean() or .sum(), and do not turn it into a number with float() or .item()."
            )
        return value

    def at(self, level: Level, d: Params) -> Point:
        """Value, gradient in φ and partial gradient in x, in one backward pass."""
        x, phi = _variables(self.x), _variables(self.phi(d))
        value = self.evaluate(level, x, phi)
        self._count(level)
        g = gradients(value, {**phi, **x})
        self._check_dependence(level, {n: g[n] for n in phi})
        self.depends_on_x = self.depends_on_x or any(g[n] is not None for n in x)
        by_x = {n: torch.zeros_like(t) if (leaf := g[n]) is None else leaf for n, t in self.x.items()}
        return Point(value.detach(), self._rows({n: g[n] for n in phi}, d), by_x)

    def gradient(self, level: Level, d: Params, step: int = 0) -> tuple[Tensor, Params]:
        """Value and gradient in φ; the gradient has a row axis."""
        phi = _variables(self.phi(d))
        value = self.evaluate(level, self.x, phi, step)
        self._count(level)
        g = gradients(value, phi)
        self._check_dependence(level, g)
        # Leaves that enter as a sum share one gradient tensor, and solvers may overwrite what they are given.
        return value.detach(), {n: leaf.clone() for n, leaf in self._rows(g, d).items()}

    def differentiable_gradient(self, x: Params, d: Params, step: int = 0) -> tuple[Tensor, Params]:
        """Value of g, and its gradient in φ with the graph that leads back to x and d; for backpropagation through a solver."""
        phi = {n: t if t.requires_grad else t.requires_grad_() for n, t in self.phi(d).items()}
        value, g = self._graph("inner", x, phi, step)
        return value.detach(), self._rows(g, d)

    def hvp(self, level: Level, d: Params, v: Params, step: int = 0) -> tuple[Tensor, Params, Params]:
        """Value, gradient in φ, and Hessian in φ times v; both with a row axis."""
        phi = _variables(self.phi(d))
        value, g = self._graph(level, self.x, phi, step)
        hv = self._second(g, v, phi)
        return value.detach(), self._rows({n: None if t is None else t.detach() for n, t in g.items()}, d), self._rows(hv, d)

    def mixed(self, d: Params, v: Params) -> Params:
        """∂_x ⟨∂_φ g, v⟩, which is the derivative of ∂_x g along v in φ."""
        x, phi = _variables(self.x), _variables(self.phi(d))
        _, g = self._graph("inner", x, phi, 0)
        product = self._second(g, v, x)
        return {n: torch.zeros_like(t) if (leaf := product[n]) is None else leaf for n, t in self.x.items()}

    def hessian(self, d: Params) -> Tensor:
        """The dense Hessian of g in φ, all leaves end to end."""
        phi = _variables(self.phi(d))
        _, g = self._graph("inner", self.x, phi, 0)
        entries = torch.cat([t.flatten().to(d[n].dtype) for n, t in g.items() if t is not None])
        rows = []
        for entry in entries:
            self.evaluations.hessian_products += 1
            with second_derivatives():
                row = self._rows(gradients(entry, phi, retain_graph=True), d)
            rows.append(torch.cat([leaf.flatten() for leaf in row.values()]))
        return torch.stack(rows)

    def _graph(self, level: Level, x: Params, phi: Params, step: int) -> tuple[Tensor, dict[str, Tensor | None]]:
        value = self.evaluate(level, x, phi, step)
        self._count(level)
        g = gradients(value, phi, create_graph=True)
        self._check_dependence(level, g)
        return value, g

    def _second(self, g: dict[str, Tensor | None], v: Params, by: Params) -> dict[str, Tensor | None]:
        self.evaluations.hessian_products += 1
        product = torch.stack([(t * v[n].reshape(t.shape)).sum() for n, t in g.items() if t is not None]).sum()
        with second_derivatives():
            return gradients(product, by)

    def _rows(self, g: dict[str, Tensor | None], d: Params) -> Params:
        return {n: torch.zeros_like(d[n]) if (leaf := g[n]) is None else leaf.to(d[n].dtype).reshape(d[n].shape).contiguous() for n in d}

    def _count(self, level: Level) -> None:
        if level == "inner":
            self.evaluations.inner_gradients += 1
        else:
            self.evaluations.outer_gradients += 1

    def _check_dependence(self, level: Level, g: dict[str, Tensor | None]) -> None:
        unused = [n for n, leaf in g.items() if leaf is None]
        if level == "inner" and unused:
            raise ValueError(
                f"inner(x, phi) does not depend on {', '.join(unused)}, so nothing determines the solution there. "
                "Use it in inner (and look for .detach(), torch.no_grad() or .item() on the way), or leave it out of init."
            )
        if level == "outer" and len(unused) == len(g):
            raise ValueError(
                "outer(x, phi) does not depend on phi, so the inner problem plays no part and the hypergradient is the plain "
                "gradient of outer in x. Use phi in outer (and look for .detach(), torch.no_grad() or .item() on the way), "
                "or call outer(x, phi).backward() without a bilevel solve."
            )


@contextmanager
def second_derivatives() -> Iterator[None]:
    """Say, where torch cannot take a second derivative, who does without."""
    try:
        yield
    except RuntimeError as error:
        error.add_note(
            "A second derivative was needed. FOBMAML with a finite difference, e.g. stencil='symmetric', needs first derivatives only, "
            "and so do all solvers but NewtonCG."
        )
        raise


def _variables(tensors: Params) -> Params:
    return {n: t.detach().requires_grad_() for n, t in tensors.items()}


def gradients(value: Tensor, by: Params, *, create_graph: bool = False, retain_graph: bool | None = None) -> dict[str, Tensor | None]:
    """Gradients of a scalar; None where it does not depend on a tensor."""
    if not value.requires_grad:
        return dict.fromkeys(by)
    found = torch.autograd.grad(value, list(by.values()), create_graph=create_graph, retain_graph=retain_graph, allow_unused=True)
    return dict(zip(by, found, strict=True))


def _shapes(tensors: Params) -> str:
    return ", ".join(f"{n}: {describe(t)}" for n, t in tensors.items())
