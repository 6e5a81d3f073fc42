"""What `check_gradient` has found, in numbers and in words."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from metanudge.estimators.products import WORTH_HAVING
from metanudge.html_table import html_table


@dataclass(frozen=True)
class Quality:
    """How one estimator compares with the exact meta-gradients; NaN where a target could not be
    had.

    Attributes:
        estimator: its name and options.
        nu: its nudge, if it has one.
        cosine_implicit, error_implicit: against the implicit gradient at the inner optimum (what
            FO-B-MAML and iMAML aim at).
        cosine_adaptation, error_adaptation: against the gradient of the K-step adaptation (what
            MAML computes).
    """

    estimator: str
    nu: float | None
    cosine_implicit: float
    error_implicit: float
    cosine_adaptation: float
    error_adaptation: float


@dataclass(frozen=True)
class GradientReport:
    """The rows of a `check_gradient`, printable as a table.

    Attributes:
        rows: one per estimator and ν.
        parameters, tasks: size of the problem that was checked.
        optimum_residual: ‖∇g‖ at the point taken for the inner optimum; the implicit target is only
            as good as this is small.
        agreement: cosine between the two exact answers; far from 1 means K steps do not come close
            to the optimum.
        residual_growth: ‖∇g‖ after the solver's steps over that at θ; above 1 the inner loop is
            unstable, and no estimator can be expected to resemble the exact gradient of the
            adaptation.
        advice: what to change where it is above 1.
        notes: what could not be computed, and why.
        differences: `MAML(products="difference")` in the model's own precision, against the same
            answers; None where estimators were named, or it cannot run.
    """

    rows: tuple[Quality, ...]
    parameters: int
    tasks: int
    optimum_residual: float
    agreement: float
    residual_growth: float
    advice: str
    notes: tuple[str, ...]
    differences: Quality | None = None

    @property
    def verdict(self) -> str:
        """Which estimator is closest to each exact answer, and whether differences of gradients are
        worth having on this model, in words.
        """
        told = [
            self._closest("error_implicit", "cosine_implicit", "implicit gradient"),
            self._closest("error_adaptation", "cosine_adaptation", "K-step adaptation"),
        ]
        if self.differences is not None and not math.isnan(self.differences.error_adaptation):
            own = self.differences
            how = (
                f"{own.estimator} has cosine {own.cosine_adaptation:.4f} and relative error"
                f" {own.error_adaptation:.2g} against the K-step adaptation"
            )
            told.append(
                f"Differences of gradients are meaningful here: {how}."
                if own.error_adaptation < WORTH_HAVING
                else f"Differences of gradients are not to be trusted here: {how}. Kinks (ReLU,"
                ' max-pooling) do that: use MAML(products="autograd"), or smooth activations.'
            )
        return " ".join(filter(None, told))

    def _closest(self, error: str, cosine: str, target: str) -> str:
        known = [row for row in self.rows if not math.isnan(getattr(row, error))]
        if not known:
            return ""
        best = min(known, key=lambda row: float(getattr(row, error)))
        nu = "" if best.nu is None else f" at ν {best.nu:.3g}"
        far = "" if getattr(best, error) < WORTH_HAVING else ", and not close"
        return (
            f"Closest to the {target}: {best.estimator}{nu}{far} (cosine"
            f" {getattr(best, cosine):.4f}, relative error {getattr(best, error):.2g})."
        )

    def as_dicts(self) -> list[dict[str, Any]]:
        """The rows as plain dicts."""
        return [asdict(row) for row in self.rows]

    def __str__(self) -> str:
        width = max(len("estimator"), *(len(row.estimator) for row in self.rows))
        pair = f"{'cosine':>8}  {'relative error':>14}"
        lines = [
            f"{self.parameters} parameters, {self.tasks} tasks, float64",
            f"{'':{width}}         against the implicit gradient   against the K-step adaptation",
            f"{'estimator':{width}}  {'ν':>6}  {pair}     {pair}",
        ]
        for row in self.rows:
            nu = "–" if row.nu is None else f"{row.nu:.3g}"
            implicit = _pair(row.cosine_implicit, row.error_implicit)
            adaptation = _pair(row.cosine_adaptation, row.error_adaptation)
            lines.append(f"{row.estimator:{width}}  {nu:>6}  {implicit}     {adaptation}")
        return "\n".join((*lines, *self._remarks()))

    def _remarks(self) -> list[str]:
        """What the table says, and can be believed for."""
        first = (
            f"cosine of the two exact gradients {_number(self.agreement, '.4f')}, residual at the"
            f" optimum {self.optimum_residual:.1g}, inner residual after the steps"
            f" ×{self.residual_growth:.3g}"
        )
        remarks = [first]
        if self.residual_growth > 1:
            remarks.append(
                "The inner residual grows: lr is above the stable 2/(curvature + lam). To mend it,"
                f" {self.advice}."
            )
        return [*remarks, *filter(None, [self.verdict]), *self.notes]

    def _repr_html_(self) -> str:
        head = (
            f"{self.parameters} parameters, {self.tasks} tasks",
            "ν",
            *("cosine, implicit", "error", "cosine, K steps", "error"),
        )
        rows = [
            (
                row.estimator,
                "–" if row.nu is None else f"{row.nu:.3g}",
                *_pair(row.cosine_implicit, row.error_implicit).split(),
                *_pair(row.cosine_adaptation, row.error_adaptation).split(),
            )
            for row in self.rows
        ]
        return html_table(rows, head=head, notes=self._remarks())


def _pair(cosine: float, error: float) -> str:
    return f"{_number(cosine, '.4f'):>8}  {_number(error, '.3g'):>14}"


def _number(value: float, spec: str) -> str:
    return "–" if math.isnan(value) else format(value, spec)
