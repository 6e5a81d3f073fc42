"""The steps of SGD, Adam and AdamW as functions of numbers, one entry at a time, so that they can
be differentiated: what `TorchOptimizer` does with torch's own, foreach, fused or not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from metanudge.params import Params, num_rows, per_row, zeros_like
from metanudge.solvers.adjoint import Adjoint, Memory, Point, Update, pulled_back
from metanudge.solvers.torch_optimizer import TorchOptimizer
from metanudge.spread import present

# In units of the gradient's precision and its largest entry: what sums leave where a gradient is
# zero by symmetry.
_ROUNDINGS = 16.0
_KNOWN = "SGD, Adam and AdamW"


class Rule(ABC):
    """How an optimizer moves one entry.

    Attributes:
        linear: whether it does the same to all gradients.
    """

    linear: bool

    @property
    @abstractmethod
    def remembers(self) -> int:
        """How many numbers it remembers."""

    @abstractmethod
    def move(
        self, step: int, d: Tensor, g: Tensor, *memory: Tensor, floor: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """The new d and memory after step `step` (from 0).

        With `floor` only for its derivative: where the optimizer divides by less than this, the
        step counts as constant.
        """


@dataclass(frozen=True)
class Momentum(Rule):
    """`torch.optim.SGD`."""

    lr: float
    momentum: float
    dampening: float
    weight_decay: float
    nesterov: bool
    linear = True

    @property
    def remembers(self) -> int:
        """The momentum buffer, where there is one."""
        return 1 if self.momentum else 0

    def move(
        self, step: int, d: Tensor, g: Tensor, *memory: Tensor, floor: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """b ← βb + (1 − τ)g, in the first step g;  d ← d − αb."""
        if self.weight_decay:
            g = torch.add(g, d, alpha=self.weight_decay)
        if not memory:
            return (torch.add(d, g, alpha=-self.lr),)
        buffer = torch.add(memory[0] * self.momentum, g, alpha=1 - self.dampening) if step else g
        along = torch.add(g, buffer, alpha=self.momentum) if self.nesterov else buffer
        return torch.add(d, along, alpha=-self.lr), buffer


@dataclass(frozen=True)
class Adaptive(Rule):
    """`torch.optim.Adam` and `torch.optim.AdamW`.

    The derivative of m̂/(√v̂ + eps) is about 1/eps where v̂ = 0, as for dead units, and as wild where
    v̂ is what rounding has left of a zero, as for a bias before BatchNorm. There it is defined as
    zero: the step is a constant.
    """

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool
    linear = False

    @property
    def remembers(self) -> int:
        """The two moments."""
        return 2

    def move(
        self, step: int, d: Tensor, g: Tensor, *memory: Tensor, floor: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """m ← β₁m + (1 − β₁)g,  v ← β₂v + (1 − β₂)g²,  d ← d − α m̂/(√v̂ + eps)."""
        first, second = (1 - beta ** (step + 1) for beta in self.betas)
        if self.weight_decay and self.decoupled:
            d = d * (1 - self.lr * self.weight_decay)
        elif self.weight_decay:
            g = torch.add(g, d, alpha=self.weight_decay)
        m = torch.lerp(memory[0], g, 1 - self.betas[0])
        v = torch.addcmul(memory[1] * self.betas[1], g, g, value=1 - self.betas[1])
        if floor is None:
            return torch.addcdiv(d, m, self._root(v, second), value=-self.lr / first), m, v
        counts = v > second * floor * floor
        root = self._root(torch.where(counts, v, torch.ones_like(v)), second)
        return d - torch.where(counts, m / root, torch.zeros_like(m)) * (self.lr / first), m, v

    def _root(self, v: Tensor, correction: float) -> Tensor:
        return v.sqrt() / correction**0.5 + self.eps


class OptimizerUpdate(Update):
    """The steps of a `TorchOptimizer`."""

    def __init__(self, solver: TorchOptimizer) -> None:
        self._rule = rule_of(solver)
        self.steps, self.batch_size = solver.steps, solver.batch_size
        self.needs_gradient = not self._rule.linear

    def begin(self, d: Params) -> Memory:
        """Zeros."""
        return tuple(zeros_like(d) for _ in range(self._rule.remembers))

    def advance(self, step: int, d: Params, g: Params, memory: Memory) -> tuple[Params, Memory]:
        """Entry by entry."""
        with torch.no_grad():
            moved = {
                n: self._rule.move(step, leaf, g[n], *(part[n] for part in memory))
                for n, leaf in d.items()
            }
        new, *remembered = (
            {n: ends[i] for n, ends in moved.items()} for i in range(1 + len(memory))
        )
        return new, tuple(remembered)

    def result(self, d: Params, memory: Memory) -> Params:
        """The last iterate."""
        return d

    def pull_back_result(self, v: Params) -> Adjoint:
        """All by d."""
        return Adjoint(v, tuple(zeros_like(v) for _ in range(self._rule.remembers)))

    def pull_back(self, step: int, point: Point, after: Adjoint) -> tuple[Adjoint, Params, float]:
        """By autograd through the step, entry by entry."""
        floor = None if point.g is None else _rounding_of(point.g)
        found = {}
        for name, d in point.d.items():
            g = d if point.g is None else point.g[name]
            least = None if floor is None else per_row(floor, d)
            found[name] = pulled_back(
                lambda *leaves, least=least: self._rule.move(step, *leaves, floor=least),
                [d, g, *(part[name] for part in point.memory)],
                [after.d[name], *(part[name] for part in after.memory)],
            )
        by_d, by_g, *by_memory = (
            {n: ends[i] for n, ends in found.items()} for i in range(2 + len(point.memory))
        )
        return Adjoint(by_d, tuple(by_memory)), by_g, 1.0


def _rounding_of(g: Params) -> Tensor:
    """How large an entry of each row's gradient may be by rounding alone, `(rows,)`."""
    largest = [leaf.abs().flatten(1).amax(1) for leaf in g.values() if leaf[0].numel()]
    none = next(iter(g.values())).new_zeros(num_rows(g))
    most = torch.stack([none, *largest]).amax(0)
    spread = present()
    unit = max(torch.finfo(leaf.dtype).eps for leaf in g.values())
    return _ROUNDINGS * unit * (most if spread is None else spread.largest(most))


def rule_of(solver: TorchOptimizer) -> Rule:
    """The rule of a solver's optimizer; raises, by name, where none is known."""
    optimizer = solver.build([torch.zeros(1, 1)])
    kind, groups = type(optimizer), optimizer.param_groups
    options: dict[str, Any] = groups[0]
    refused = [name for name in ("amsgrad", "maximize") if options.get(name)]
    if kind not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW) or refused:
        unknown = kind.__name__ + (f"({refused[0]}=True)" if refused else "")
        raise TypeError(
            f"MAML differentiates the solver's steps, and of torch's optimizers it knows those of"
            f" {_KNOWN}, but not of {unknown}. Use one of these or GradientDescent or Nesterov, or"
            " an estimator that needs no steps (FOBMAML, IMAML)."
        )
    if kind is torch.optim.SGD:
        return Momentum(
            float(options["lr"]),
            options["momentum"],
            options["dampening"],
            float(options["weight_decay"]),
            options["nesterov"],
        )
    return Adaptive(
        float(options["lr"]),
        (float(options["betas"][0]), float(options["betas"][1])),
        options["eps"],
        options["weight_decay"],
        bool(options["decoupled_weight_decay"]),
    )
