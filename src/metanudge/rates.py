"""Learning rates of the inner steps that are meta-learned: Meta-SGD (Li et al. 2017), and one per
step and tensor (LSLR of MAML++, Antoniou et al. 2019).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from metanudge.names import check_known
from metanudge.params import Params, wide
from metanudge.proximal.learned import ALL, register
from metanudge.spread import is_spread, present

RatePer = Literal["scalar", "tensor", "parameter", "step"]


@dataclass(frozen=True)
class InnerRates:
    """Which inner learning rates r are learned: d ← d − r ⊙ direction, in place of the solver's lr,
    where they start.

    Args:
        per: `"scalar"`, one for all parameters; `"tensor"`, one each; `"parameter"`, one per entry
            (Meta-SGD); `"step"`, one per tensor and step (LSLR of MAML++), of which the last one
            goes on where more steps are taken than the learner was made with.
        positive: learn log r, so that r stays positive; otherwise r itself, whatever its sign, with
            steps of an outer optimizer that are small beside r (`parameter_groups(rate_lr=…)`).

    The momentum that `Nesterov` makes from λ stays that of the solver's own lr.

    Example:
        >>> import metanudge as mn
        >>> learner = mn.MetaLearner(nn.Linear(2, 1), nn.functional.mse_loss,
        ...     learn_lr=InnerRates("step"), estimator=mn.MAML())
        >>> {name: tuple(rate.shape) for name, rate in learner.rates().items()}
        {'weight': (5,), 'bias': (5,)}
        >>> [name for name, _ in learner.named_parameters()][2:]
        ['log_lr.weight', 'log_lr.bias']
    """

    per: RatePer
    positive: bool = True

    def __post_init__(self) -> None:
        more = "; leave it out for the solver's own lr"
        check_known("learn_lr", self.per, get_args(RatePer), more)


class LearnedRates(nn.Module):
    """r or log r: one for all parameters, or one tensor under the name of each.

    Args:
        what: which.
        lr: where they start.
        steps: of the solver, for rates per step.
        parameters: those that adapt.

    Attributes:
        what: as given.
    """

    def __init__(
        self, what: InnerRates, lr: float, steps: int, parameters: Mapping[str, Tensor]
    ) -> None:
        super().__init__()
        if what.per == "parameter" and any(map(is_spread, parameters.values())):
            raise ValueError(
                'learn_lr="parameter" is not served where the parameters are sharded over several'
                ' ranks. Use learn_lr="tensor", "scalar" or "step".'
            )
        self.what = what
        for name, p in parameters.items():
            shape = {"parameter": p.shape, "step": (steps,)}.get(what.per, ())
            start = math.log(lr) if what.positive else lr
            rate = torch.full(shape, start, dtype=wide(p.dtype), device=p.device)
            if what.per == "scalar":
                self.register_parameter(ALL, nn.Parameter(rate))
                break
            register(self, name, nn.Parameter(rate))

    @property
    def learned(self) -> dict[str, nn.Parameter]:
        """What requires grad, keyed like the learner's `named_parameters()`."""
        found = ((self._key(name), p) for name, p in self.named_parameters())
        return {key: p for key, p in found if p.requires_grad}

    def now(self) -> Rates:
        """As they are, on the device."""
        with torch.no_grad():
            named = {self._key(name): p.detach() for name, p in self.named_parameters()}
            return Rates(self, {k: p.exp() if self.what.positive else p for k, p in named.items()})

    def key(self, parameter: str) -> str:
        """Which rate belongs to one of the model's parameters."""
        return self._key(ALL if self.what.per == "scalar" else parameter)

    def _key(self, name: str) -> str:
        return f"{'log_lr' if self.what.positive else 'lr'}.{name}"


class Rates:
    """Learned rates as they are in one solve."""

    def __init__(self, learned: LearnedRates, values: Params) -> None:
        self._learned = learned
        self._values = values

    def whole(self, name: str) -> Tensor:
        """The rate of a parameter: 0-d, of its shape, or one per step."""
        found = self._values.get(self._learned.key(name))
        if found is None:
            raise ValueError(
                f"No inner rate is learned for {name}, which did not adapt when the learner was"
                " made. Make a new MetaLearner."
            )
        return found

    def of(self, name: str, step: int, like: Tensor) -> Tensor:
        """The rate of a parameter in a step, 0-d or of its shape."""
        return self._at(step, self.whole(name)).to(like)

    def accumulate(self, gradient: Params, step: int, by_rate: Params, weight: float) -> None:
        """Add derivatives by the rates of a step to those of what is learned."""
        spread = present()
        for name, leaf in by_rate.items():
            if spread is not None:
                leaf = spread.sum({name: leaf})
            if (whole := gradient.get(self._learned.key(name))) is not None:
                target = self._at(step, whole)
                # ∂/∂log r = r ∂/∂r
                inner = self.of(name, step, target) if self._learned.what.positive else 1.0
                target.add_(leaf.to(target) * inner, alpha=weight)

    def _at(self, step: int, values: Tensor) -> Tensor:
        """Beyond the last rate that one goes on."""
        return values[min(step, len(values) - 1)] if self._learned.what.per == "step" else values
