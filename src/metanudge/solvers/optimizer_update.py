"""The steps of SGD, Adam and AdamW as functions of numbers, one entry at a time, so that they can
be differentiated: what `TorchOptimizer` does with torch's own, foreach, fused or not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metanudge.params import Params, num_rows, per_row, zeros_like
from metanudge.rates import Rates
from metanudge.solvers.adjoint import Adjoint, Memory, Point, PulledBack, Update, pulled_back
from metanudge.solvers.torch_optimizer import TorchOptimizer
from metanudge.spread import present

# In units of the gradient's precision and its largest entry: what sums leave where a gradient is
# zero by symmetry.
_ROUNDINGS = 16.0
_KNOWN = "SGD, Adam and AdamW"
_WHY = "MAML differentiates the solver's steps, and"
_INSTEAD = " or GradientDescent or Nesterov, or an estimator that needs no steps (FOBMAML, IMAML)"


class At(NamedTuple):
    """Which step is taken.

    Attributes:
        step: its number, from 0.
        lr: its learning rate.
        floor: where the optimizer divides by less than this, the step counts as constant; for its
            derivative only.
    """

    step: int
    lr: float | Tensor
    floor: Tensor | None = None


class Rule(ABC):
    """How an optimizer moves one entry.

    Attributes:
        lr: its learning rate.
        linear: whether it does the same to all gradients.
    """

    lr: float
    linear: bool

    @property
    @abstractmethod
    def remembers(self) -> int:
        """How many numbers it remembers."""

    @abstractmethod
    def move(self, at: At, d: Tensor, g: Tensor, *memory: Tensor) -> tuple[Tensor, ...]:
        """The new d and memory after a step."""


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

    def move(self, at: At, d: Tensor, g: Tensor, *memory: Tensor) -> tuple[Tensor, ...]:
        """b ← βb + (1 − τ)g, in the first step g;  d ← d − αb."""
        if self.weight_decay:
            g = torch.add(g, d, alpha=self.weight_decay)
        if not memory:
            return (_down(d, g, at.lr),)
        buffer = torch.add(memory[0] * self.momentum, g, alpha=1 - self.dampening) if at.step else g
        along = torch.add(g, buffer, alpha=self.momentum) if self.nesterov else buffer
        return _down(d, along, at.lr), buffer


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
    remembers = 2  # the two moments

    def move(self, at: At, d: Tensor, g: Tensor, *memory: Tensor) -> tuple[Tensor, ...]:
        """m ← β₁m + (1 − β₁)g,  v ← β₂v + (1 − β₂)g²,  d ← d − α m̂/(√v̂ + eps)."""
        lr, floor = at.lr, at.floor
        first, second = (1 - beta ** (at.step + 1) for beta in self.betas)
        if self.weight_decay and self.decoupled:
            d = d * (1 - lr * self.weight_decay)
        elif self.weight_decay:
            g = torch.add(g, d, alpha=self.weight_decay)
        m = torch.lerp(memory[0], g, 1 - self.betas[0])
        v = torch.addcmul(memory[1] * self.betas[1], g, g, value=1 - self.betas[1])
        if floor is None:
            return _down(d, m / self._root(v, second), lr / first), m, v
        counts = v > second * floor * floor
        root = self._root(torch.where(counts, v, torch.ones_like(v)), second)
        return _down(d, torch.where(counts, m / root, torch.zeros_like(m)), lr / first), m, v

    def _root(self, v: Tensor, correction: float) -> Tensor:
        return v.sqrt() / correction**0.5 + self.eps


def _down(d: Tensor, along: Tensor, lr: float | Tensor) -> Tensor:
    """d − lr · along."""
    if isinstance(lr, Tensor):
        return torch.addcmul(d, along, lr, value=-1)
    return torch.add(d, along, alpha=-lr)


@dataclass(frozen=True)
class Still(Rule):
    """What an optimizer does to a parameter without a gradient: nothing."""

    lr = 0.0
    linear = True
    remembers = 0

    def move(self, at: At, d: Tensor, g: Tensor, *memory: Tensor) -> tuple[Tensor, ...]:
        """As it is."""
        return d, *memory


class OptimizerUpdate(Update):
    """The steps of a `TorchOptimizer`, whose groups of parameters may have options of their own."""

    def __init__(self, solver: TorchOptimizer, rates: Rates | None = None) -> None:
        self._solver = solver
        self._rules: dict[str, Rule] = {}
        self._remembers = 0
        self.steps, self.batch_size, self.rates = solver.steps, solver.batch_size, rates
        self.needs_gradient = not rule_of(solver).linear or rates is not None

    def begin(self, d: Params) -> Memory:
        """Zeros; also looks at how the optimizer groups these parameters."""
        leaves = {n: leaf[0].detach() for n, leaf in d.items()}
        optimizer, names = (
            self._solver.build([*leaves.values()]),
            {id(t): n for n, t in leaves.items()},
        )
        found = rules_of(optimizer, _WHY, _INSTEAD)
        if self.rates is not None and len({rule.lr for rule in found}) > 1:
            raise ValueError(
                "learn_lr starts at the solver's lr, but its optimizer's groups have several. Give"
                " them one, or leave learn_lr out."
            )
        self._rules = dict.fromkeys(d, Still()) | {
            names[id(p)]: rule
            for rule, group in zip(found, optimizer.param_groups, strict=True)
            for p in group["params"]
        }
        self._remembers = max(rule.remembers for rule in found)
        return self._zeros(d)

    def _zeros(self, like: Params) -> Memory:
        return tuple(zeros_like(like) for _ in range(self._remembers))

    def advance(self, step: int, d: Params, g: Params, memory: Memory) -> tuple[Params, Memory]:
        """Entry by entry."""
        with torch.no_grad():
            moved = {
                n: self._rules[n].move(
                    At(step, self._rate(step, n, leaf)), leaf, g[n], *(part[n] for part in memory)
                )
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
        return Adjoint(v, self._zeros(v))

    def pull_back(self, step: int, point: Point, after: Adjoint) -> PulledBack:
        """By autograd through the step, entry by entry."""
        rules = {n: (self._rules[n], step) for n in point.d}
        return pulled_through(rules, point, after, partial(self._rate, step))

    def _rate(self, step: int, name: str, like: Tensor) -> float | Tensor:
        return self._rules[name].lr if self.rates is None else self.rates.of(name, step, like)


def pulled_through(
    rules: Mapping[str, tuple[Rule, int]],
    point: Point,
    after: Adjoint,
    rate_of: Callable[[str, Tensor], float | Tensor] | None = None,
) -> PulledBack:
    """What derivatives by the end of a step are by what it was made of; with a rule for each
    parameter, and how many steps it has made before.

    Args:
        rate_of: the learning rate of a parameter, a tensor where it is learned; the rule's own by
            default.
    """
    linear = all(rule.linear for rule, _ in rules.values())
    floor = None if linear or point.g is None else _rounding_of(point.g)
    found: dict[str, Sequence[Tensor]] = {}
    by_rate: Params = {}
    for name, d in point.d.items():
        rule, time = rules[name]
        # a linear step has the same derivative everywhere
        g = d if point.g is None else point.g[name]
        low = None if floor is None else per_row(floor, d)
        leaves = [d, g, *(part[name] for part in point.memory)]
        ends = [after.d[name], *(part[name] for part in after.memory)]
        rate = rule.lr if rate_of is None else rate_of(name, d)
        if isinstance(rate, Tensor):
            by_rate[name], *found[name] = pulled_back(
                lambda lr, *of, rule=rule, time=time, low=low: rule.move(At(time, lr, low), *of),
                [rate, *leaves],
                ends,
            )
        else:
            move = partial(rule.move, At(time, rate, low))
            found[name] = pulled_back(move, leaves, ends)
    by_d, by_g, *by_memory = (
        {n: ends[i] for n, ends in found.items()} for i in range(2 + len(point.memory))
    )
    return PulledBack(Adjoint(by_d, tuple(by_memory)), by_g, by_rate=by_rate)


def _rounding_of(g: Params) -> Tensor:
    """How large an entry of each row's gradient may be by rounding alone, `(rows,)`."""
    largest = [leaf.abs().reshape(len(leaf), -1).amax(1) for leaf in g.values() if leaf[0].numel()]
    none = next(iter(g.values())).new_zeros(num_rows(g))
    most = torch.stack([none, *largest]).amax(0)
    spread = present()
    unit = max(torch.finfo(leaf.dtype).eps for leaf in g.values())
    return _ROUNDINGS * unit * (most if spread is None else spread.largest(most))


def rule_of(solver: TorchOptimizer) -> Rule:
    """The rule of an optimizer's first group; raises, by name, where none is known."""
    return rules_of(solver.build([torch.zeros(1, 1)]), _WHY, _INSTEAD)[0]


def rules_of(optimizer: torch.optim.Optimizer, why: str, instead: str = "") -> list[Rule]:
    """The rule of each of an optimizer's groups, with its present options; raises, by name, where
    none is known.
    """
    kind = type(optimizer)
    for options in optimizer.param_groups:
        refused = [name for name in ("amsgrad", "maximize") if options.get(name)]
        if kind not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW) or refused:
            unknown = kind.__name__ + (f"({refused[0]}=True)" if refused else "")
            raise TypeError(
                f"{why} of torch's optimizers it knows those of {_KNOWN}, but not of {unknown}. Use"
                f" one of these{instead}."
            )
    return [_rule(kind, options) for options in optimizer.param_groups]


def _rule(kind: type[torch.optim.Optimizer], options: dict[str, Any]) -> Rule:
    if kind is torch.optim.SGD:
        return Momentum(
            float(options["lr"]),
            options["momentum"],
            # without momentum torch's has no meaning
            options["dampening"] if options["momentum"] else 0.0,
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
