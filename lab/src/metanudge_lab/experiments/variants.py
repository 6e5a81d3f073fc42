"""The ways to make an estimate, as values of cells and rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import metanudge as mn
from metanudge.estimators import Estimator
from metanudge_lab.experiments.base import Cell, Result, Row
from metanudge_lab.experiments.spread import Mean, Spread

POINTS = ("untrained", "trained")
DATA = {
    "mnist1d": "MNIST-1D",
    "omniglot": "Omniglot",
    "sinusoid": "sinusoids",
    "overshoot": "sinusoids with large steps",
}
# After the name of the data: as many gradients as the default takes; learning rates of one's own.
AT_EQUAL_COST = ", equal cost"
AT_OWN_RATES = ", own rates"
SEARCH = ", search"  # of those rates
# Not part of a config: more may be added without measuring anew what there is.
OTHERS: dict[str, Estimator] = {
    "FO-MAML": mn.FOMAML(),
    "MAML, autograd products": mn.MAML(products="autograd"),
    "MAML by differences": mn.MAML(products="difference"),
}
Options = Mapping[str, Sequence[str]]  # for each of nudge, start, stencil, nu


@dataclass(frozen=True)
class Variant:
    """One way to make the estimate; `nu` as text, "auto" or "" for the tangent, which has none."""

    nudge: str
    start: str
    stencil: str
    nu: str

    @classmethod
    def default(cls) -> Variant:
        """The library's."""
        estimator = mn.FOBMAML()
        nu = f"{estimator.nu:g}" if isinstance(estimator.nu, float) else "auto"
        return cls(estimator.nudge, estimator.start, estimator.stencil, nu)

    @classmethod
    def paper(cls) -> Variant:
        """The paper's."""
        return cls("loss", "theta", "symmetric", "0.1")

    @classmethod
    def of(cls, cell: Cell | Row) -> Variant:
        """That of a cell or row."""
        return cls(*(str(cell[key]) for key in ("nudge", "start", "stencil", "nu")))

    @property
    def keys(self) -> dict[str, str]:
        """As in cells and rows."""
        return {"nudge": self.nudge, "start": self.start, "stencil": self.stencil, "nu": self.nu}

    @property
    def estimator(self) -> mn.FOBMAML:
        """What it stands for."""
        nu: Any = "auto" if self.nu in ("", "auto") else float(self.nu)
        options: dict[str, Any] = {
            "nudge": self.nudge,
            "start": self.start,
            "stencil": self.stencil,
        }
        return mn.FOBMAML(nu=nu, **options)

    def changed(self, dimension: str, value: str) -> Variant:
        """With another value in one dimension; the tangent has no ν.

        Example:
            >>> print(Variant("loss", "theta", "symmetric", "0.1").changed("stencil", "tangent"))
            loss, theta, tangent
        """
        other = replace(self, **{dimension: value})
        return replace(other, nu="") if other.stencil == "tangent" else other

    def __str__(self) -> str:
        nu = f", ν = {self.nu}" if self.nu and self.nu != "auto" else ", ν auto" if self.nu else ""
        return f"{self.nudge}, {self.start}, {self.stencil}{nu}"


@dataclass(frozen=True)
class Other:
    """An estimator that nudges nothing, by its name in `OTHERS`."""

    name: str

    @property
    def keys(self) -> dict[str, str]:
        """As in cells and rows."""
        return {"method": self.name}

    @property
    def estimator(self) -> Estimator:
        """What it stands for."""
        return OTHERS[self.name]

    def __str__(self) -> str:
        return self.name


Choice = Variant | Other


def choice_of(cell: Cell | Row) -> Choice:
    """That of a cell or row."""
    return Other(str(cell["method"])) if "method" in cell else Variant.of(cell)


def all_variants(options: Options) -> list[Variant]:
    """Every nudge, start, stencil and ν."""
    made = (Variant(*chosen) for chosen in itertools.product(*options.values()))
    return list(dict.fromkeys(variant.changed("stencil", variant.stencil) for variant in made))


def trained_variants(options: Options) -> list[Variant]:
    """Both nudges from θ and from the shifted centre, with every ν and every stencil; from the
    solution as the paper is otherwise.

    Start and ν act together: the shifted start is ν∇f/λ away from θ. Stencils are compared at the
    paper's ν.
    """
    found = []
    for nudge, start in itertools.product(options["nudge"], options["start"]):
        base = Variant.paper().changed("nudge", nudge).changed("start", start)
        found += (
            [base]
            if start == "solution"
            else [base.changed(key, value) for key in ("nu", "stencil") for value in options[key]]
        )
    return list(dict.fromkeys(found))


def trained_choices(options: Options) -> list[Choice]:
    """All that are trained for equally many meta-steps."""
    return [*trained_variants(options), *map(Other, OTHERS)]


def equal_cost_choices(options: Options) -> list[Choice]:
    """Those that are also trained with as many gradients as the default takes: what is one choice
    away from it, and the others.
    """
    default, known = Variant.default(), trained_variants(options)
    near = [
        default.changed(key, value)
        for key in ("nudge", "start", "stencil")
        for value in options[key]
    ]
    return [*(one for one in near if one in known and one != default), *map(Other, OTHERS)]


def own_rates_choices() -> list[Choice]:
    """Those that also look for learning rates of their own: the default, and the others."""
    return [Variant.default(), *map(Other, OTHERS)]


def accuracy(result: Result[Any], part: str, variant: Choice, key: str = "accuracy") -> Mean | None:
    """Mean over the seeds with its interval, that over the tasks where there is one seed; `key` may
    be "accuracy_more". The default costs as much as itself.
    """
    if variant == Variant.default():
        part = part.removesuffix(AT_EQUAL_COST)
    found = result.values(key, part=part, **variant.keys)
    if len(found) == 1:
        return Mean(
            found[0], result.values(key.replace("accuracy", "ci95"), part=part, **variant.keys)[0]
        )
    return Mean.of(found) if found else None


def cosine(result: Result[Any], key: str, point: str, steps: int, variant: Variant) -> float:
    """Median over the seeds of the cosine with a target."""
    found = result.values(f"cosine_{key}", part="error", point=point, steps=steps, **variant.keys)
    return Spread.of(found).median if found else math.nan


def compared(result: Result[Any], view: str = "") -> list[tuple[str, str]]:
    """By what choices are compared: data, and accuracy with as many steps as in training or with
    more; after equally many meta-steps, or `AT_EQUAL_COST`, or `AT_OWN_RATES`.
    """
    return [
        (part + view, key)
        for part in DATA
        if result.rows(part=part + view)
        for key in ("accuracy", "accuracy_more")
    ]


def data_of(part: str) -> str:
    """The data set of a part of the rows.

    Example:
        >>> data_of("mnist1d, equal cost"), data_of("omniglot")
        ('mnist1d', 'omniglot')
    """
    return part.partition(",")[0]


def name_of(result: Result[Any], part: str, key: str) -> str:
    """What is compared, in words."""
    data = data_of(part)
    more = "" if key == "accuracy" else f", {result.config.more_steps} steps"
    return DATA[data] + part.removeprefix(data) + more
