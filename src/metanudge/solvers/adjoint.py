"""A solver's update one step at a time, and its own vector–Jacobian product.

A step  d, s ← U(d, s, g)  from the displacement d, what the solver remembers s and the gradient g
acts entry by entry, so that its derivative needs no model: here it is autograd's, leaf by leaf, of
the same few operations that make the step. What does need the model is how g depends on d, and that
is the estimator's business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from metanudge.params import Params
from metanudge.rates import Rates
from metanudge.solvers.base import LinearSolver, Oracle
from metanudge.solvers.gradient_descent import GradientDescent
from metanudge.solvers.nesterov import Nesterov

Memory = tuple[Params, ...]
"""What a solver remembers between two steps: nothing, or one or more tensors for each parameter."""


@dataclass(frozen=True)
class Point:
    """Where a step begins.

    Attributes:
        d: the displacement.
        memory: what the solver remembers.
        g: the gradient there, where the update's derivative depends on it; else None.
    """

    d: Params
    memory: Memory
    g: Params | None = None


@dataclass(frozen=True)
class Adjoint:
    """Derivatives of the outer loss by the displacement and the memory between two steps."""

    d: Params
    memory: Memory

    def __add__(self, other: Adjoint) -> Adjoint:
        """Of the sum of two losses."""
        mine, others = (self.d, *self.memory), (other.d, *other.memory)
        d, *memory = (
            {n: leaf + b[n] for n, leaf in a.items()} for a, b in zip(mine, others, strict=True)
        )
        return Adjoint(d, tuple(memory))


@dataclass(frozen=True)
class PulledBack:
    """Derivatives by all that a step is made of. They may share tensors.

    Attributes:
        before: by its beginning, the gradient held fixed.
        by_gradient: by the gradient, to be multiplied by `factor`.
        by_rate: by the learning rates, summed over rows, where these are learned.
    """

    before: Adjoint
    by_gradient: Params
    factor: float = 1.0
    by_rate: Params = field(default_factory=dict)


class Update(ABC):
    """The steps of a solver of fixed length, as they run on one oracle.

    Attributes:
        steps: how many there are.
        batch_size: support examples per step; None for all of them.
        needs_gradient: whether the derivative of a step depends on where it is taken.
        rates: in place of the solver's learning rate, where they are learned.
    """

    steps: int
    batch_size: int | None
    needs_gradient: bool
    rates: Rates | None

    @abstractmethod
    def begin(self, d: Params) -> Memory:
        """What the solver remembers before the first step."""

    @abstractmethod
    def advance(self, step: int, d: Params, g: Params, memory: Memory) -> tuple[Params, Memory]:
        """One step, out of place; `g` may be overwritten unless its values are needed later."""

    @abstractmethod
    def result(self, d: Params, memory: Memory) -> Params:
        """The solution after the last step."""

    @abstractmethod
    def pull_back_result(self, v: Params) -> Adjoint:
        """What a derivative `v` by the solution is by what the last step left behind."""

    @abstractmethod
    def pull_back(self, step: int, point: Point, after: Adjoint) -> PulledBack:
        """What derivatives by the end of a step are by what it was made of."""


class LinearUpdate(Update):
    """The steps of `GradientDescent`, `Nesterov` and any other `LinearSolver`.

    Attributes:
        by_strong_convexity: the derivative by μ, summed up over steps and rows, where the momentum
            is made from a μ that is learned; else None.
    """

    def __init__(self, solver: LinearSolver, oracle: Oracle, rates: Rates | None = None) -> None:
        self._solver = solver
        self._mu = oracle.strong_convexity
        self.steps, self.batch_size, self.rates = solver.steps, solver.batch_size, rates
        self._remembers = bool(solver.memory({"": torch.zeros(1)}))
        # Of a linear step only the derivatives by its coefficients depend on the place.
        self._learns_mu = isinstance(self._mu, Tensor) and self._remembers
        self.needs_gradient = self._learns_mu or rates is not None
        self.by_strong_convexity: Tensor | None = None

    def begin(self, d: Params) -> Memory:
        """The solver's own."""
        memory = self._solver.memory(d)
        return (memory,) if memory else ()

    def advance(self, step: int, d: Params, g: Params, memory: Memory) -> tuple[Params, Memory]:
        """The solver's own step, on copies."""
        if self.rates is not None:
            g = {n: self._scaled(leaf, self.rates.of(n, step, leaf)) for n, leaf in g.items()}
        elif self.needs_gradient:
            g = copied(g)
        new, remembered = self._solver.update(
            copied(d),
            g,
            copied(memory[0]) if memory else {},
            mu=self._mu,
            inplace=True,
        )
        return new, (remembered,) if memory else ()

    def result(self, d: Params, memory: Memory) -> Params:
        """The solver's own."""
        return self._solver.result(d, memory[0] if memory else {})

    def pull_back_result(self, v: Params) -> Adjoint:
        """By d or by the memory, whichever the solution is made of."""
        by_d, by_memory = {}, {}
        for name, leaf in v.items():
            still = torch.zeros_like(leaf)
            by_d[name], by_memory[name] = pulled_back(
                lambda d, m: (self._solver.result({"": d}, {"": m})[""],), [still, still], [leaf]
            )
        return Adjoint(by_d, (by_memory,) if self._remembers else ())

    def pull_back(self, step: int, point: Point, after: Adjoint) -> PulledBack:
        """By autograd through the solver's own step; of gradient descent it is v and −α v."""
        if isinstance(self._solver, GradientDescent) and self.rates is None:
            return PulledBack(after, after.d, -self._solver.rate)
        by_d, by_g, by_memory, by_rate = {}, {}, {}, {}
        for name, d in point.d.items():
            # a linear step has the same derivative everywhere
            leaves = [d, d if point.g is None else point.g[name]]
            leaves += [remembered[name] for remembered in point.memory]
            if self.rates is not None:
                leaves.append(self.rates.of(name, step, d))
            ends = [after.d[name], *(remembered[name] for remembered in after.memory)]
            by_d[name], by_g[name], *rest = self._pull_back_leaf(leaves, ends)
            if self.rates is not None:
                by_rate[name] = rest.pop()
            if rest:
                (by_memory[name],) = rest
        before = Adjoint(by_d, (by_memory,) if by_memory else ())
        return PulledBack(before, by_g, by_rate=by_rate)

    def _pull_back_leaf(self, leaves: list[Tensor], ends: list[Tensor]) -> Sequence[Tensor]:
        def step(d: Tensor, g: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
            rest = list(more)
            mu = rest.pop() if self._learns_mu else self._mu
            if self.rates is not None:
                g = self._scaled(g, rest.pop())
            memory = {"": rest[0]} if rest else {}
            new, remembered = self._solver.update({"": d}, {"": g}, memory, mu=mu, inplace=False)
            return (new[""], remembered[""]) if rest else (new[""],)

        if not self._learns_mu:
            return pulled_back(step, leaves, ends)
        assert isinstance(self._mu, Tensor)
        *found, by_mu = pulled_back(step, [*leaves, self._mu], ends)
        before = self.by_strong_convexity
        self.by_strong_convexity = by_mu if before is None else before + by_mu
        return found

    def _scaled(self, g: Tensor, rate: Tensor) -> Tensor:
        """A gradient with which the solver's own learning rate α makes the step of another: α
        stands before gradients alone.
        """
        solver = self._solver
        assert isinstance(solver, GradientDescent | Nesterov)
        return g * (rate / (solver.rate if isinstance(solver, GradientDescent) else solver.lr))


def pulled_back(
    function: Callable[..., tuple[Tensor, ...]], at: Sequence[Tensor], along: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Derivatives of ⟨along, function(*at)⟩ by each of `at`.

    Example:
        >>> x = torch.tensor([1.0, 2.0])
        >>> pulled_back(lambda x, y: (x * y,), [x, 3 * x], [torch.ones(2)])
        (tensor([3., 6.]), tensor([1., 2.]))
    """
    with torch.enable_grad():
        leaves = [leaf.detach().requires_grad_() for leaf in at]
        return torch.autograd.grad(function(*leaves), leaves, along, materialize_grads=True)


def copied(a: Params) -> Params:
    """The same values in memory of their own: times one, in one kernel for many tensors."""
    return dict(zip(a, torch._foreach_mul(list(a.values()), 1.0), strict=True))
