"""What takes part: a way to compute the meta-gradient of a workload."""

from __future__ import annotations

import fnmatch
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from metanudge.names import near
from metanudge.training.errors import UserError
from metanudge_lab.bench.workload import Workload

Gradient = Mapping[str, Tensor]


@dataclass(frozen=True)
class Work:
    """What a method must evaluate, per task. A Hessian product is counted on top of a gradient at
    the same place.
    """

    support_gradients: float
    query_gradients: float
    hessian_products: float = 0.0

    @property
    def gradients(self) -> float:
        """Gradient evaluations, on whichever data."""
        return self.support_gradients + self.query_gradients


@dataclass(frozen=True)
class ReadyContender:
    """A contender that is ready to go.

    Attributes:
        step: one meta-step: the mean meta-gradient, keyed like the model's parameters.
        work: what a step evaluates; known after the first one.
        engine: how it runs, in a word or two; known after the first step.
    """

    step: Callable[[], Gradient]
    work: Callable[[], Work]
    engine: Callable[[], str] = lambda: ""


@dataclass(frozen=True)
class Contender:
    """One way to compute a meta-gradient.

    Attributes:
        name: on the command line.
        label: for people.
        package: who computes; ours is "metanudge".
        method: what is computed: contenders of the same method give the same numbers.
        prepare: get ready for a workload; raises where it cannot be done.
        module: package that must be installed, and the command that installs it.
        cuda_only: needs a CUDA device.
    """

    name: str
    label: str
    package: str
    method: str
    prepare: Callable[[Workload], ReadyContender]
    module: str | None = None
    install: str = ""
    cuda_only: bool = False

    @property
    def ours(self) -> bool:
        """Whether it is metanudge's."""
        return self.package == "metanudge"

    def absence(self, device: torch.device) -> str | None:
        """Why it cannot take part here, and what would help; None if it can."""
        if self.module is not None and importlib.util.find_spec(self.module) is None:
            return f"not installed: {self.install}"
        if self.cuda_only and device.type != "cuda":
            return "needs a CUDA device"
        return None


def choose(contenders: Sequence[Contender], patterns: Sequence[str]) -> list[Contender]:
    """The contenders whose name matches one of the patterns, all for none.

    Example:
        >>> make = lambda name: Contender(name, name, "metanudge", "MAML", prepare=None)
        >>> three = [make("maml"), make("fomaml"), make("higher-maml")]
        >>> [c.name for c in choose(three, ["maml", "higher*"])]
        ['maml', 'higher-maml']
    """
    names = [contender.name for contender in contenders]
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise UserError(
                f"No contender is called {pattern!r}.{near(pattern, names)} The contenders are"
                f" {', '.join(names)}; * stands for anything."
            )
    return [
        c
        for c in contenders
        if not patterns or any(fnmatch.fnmatchcase(c.name, pattern) for pattern in patterns)
    ]
