"""What estimators add up: a meta-gradient, and the statistics of how it was made."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from metanudge.engines import Cost, Inner, Measured
from metanudge.params import Flat, Params
from metanudge.problem import TwoLevels
from metanudge.solvers.base import Solution


class NonFiniteError(FloatingPointError):
    """An inner solve produced NaN or Inf; nothing has reached `.grad`."""


@dataclass(frozen=True)
class Stats:
    """What one meta-gradient cost and how good it is, averaged over the tasks.

    Attributes:
        query_loss_before, query_accuracy_before: on the query set at θ.
        query_loss, query_accuracy: after adaptation (for symmetric loss nudges: the mean over the
            nudged solutions, which differs from the un-nudged one by O(ν²)). Accuracy is NaN where
            the task is no classification.
        residual_start, residual: ‖∇g‖ of the inner problem at the first and the last gradient
            evaluation.
        delta: estimated precision δ of the inner solutions.
        nu: nudge used; None for estimators without one.
        error: estimated error of the finite difference from unconverged solves, ‖λδ/ν‖ summed over
            the stencil, relative to the meta-gradient's norm; for `MAML` by differences how far
            neighbouring ε were apart when ε was chosen. None for estimators without a difference.
        gradient_norm: norm of the meta-gradient.
        support_gradients, query_gradients, hessian_products: evaluations per task.
        tasks: number of tasks.
        engine: where it ran.
        products: how `MAML` multiplied with Hessians; None for other estimators.
    """

    query_loss_before: float
    query_accuracy_before: float
    query_loss: float
    query_accuracy: float
    residual_start: float
    residual: float
    delta: float
    nu: float | None
    error: float | None
    gradient_norm: float
    support_gradients: float
    query_gradients: float
    hessian_products: float
    tasks: int
    engine: str
    products: str | None = None

    @property
    def diverged(self) -> bool:
        """Whether the inner residual grew: the inner learning rate is too large for the curvature
        met.
        """
        return self.residual > self.residual_start

    def __str__(self) -> str:
        parts = [f"query loss {self.query_loss_before:.4g} → {self.query_loss:.4g}"]
        if not math.isnan(self.query_accuracy):
            parts.append(f"accuracy {self.query_accuracy_before:.1%} → {self.query_accuracy:.1%}")
        parts.append(f"inner residual {self.residual_start:.3g} → {self.residual:.3g}")
        if self.diverged:
            parts[-1] += " (grew: try a smaller lr)"
        if self.nu is not None:
            parts.append(f"ν {self.nu:.3g}")
        parts.append(f"|meta-gradient| {self.gradient_norm:.3g}, {self.tasks} tasks, {self.engine}")
        return ", ".join(parts)


@dataclass(frozen=True)
class _Check:
    """Values that must be finite, `(steps, rows)`; outside the inner steps there is one step."""

    places: tuple[int, ...]
    quantity: str
    values: Tensor
    in_steps: bool

    @property
    def first_bad(self) -> tuple[int, int]:
        step, row = torch.nonzero(~torch.isfinite(self.values))[0].tolist()
        return step, row


class MetaGradient:
    """A meta-gradient being summed up over groups of tasks, with what is known about the solves."""

    def __init__(self, problem: TwoLevels, num_tasks: int, *, metrics: bool, seed: int = 0) -> None:
        self.gradient = problem.zero_gradient()
        self.num_tasks = num_tasks
        self.metrics = metrics
        self.seed = seed
        self.nu: float | None = None
        self.products: str | None = None
        self._sums: dict[str, Tensor] = {}
        self._checks: list[_Check] = []
        self._sealed: Tensor
        self._flat: Tensor | None = None

    def add(
        self, rows: Params, weights: float | list[float], scale: Mapping[str, Tensor] | None = None
    ) -> None:
        """gradient += scale ⊙ Σ_r w_r rows_r / num_tasks; one weight for all rows or one per nudge
        (rows are nudge by nudge).
        """
        with torch.no_grad():
            if isinstance(rows, Flat):
                rows, weights = rows.like(_combined(rows.matrix, weights).unsqueeze(0)), 1.0
            for name, leaf in rows.items():
                factor = None if scale is None else scale[name]
                if leaf.shape[0] == 1:  # the in-place engine: no temporary of the size of the model
                    weight = weights if isinstance(weights, (int, float)) else weights[0]
                    _add_scaled(self.gradient[name], leaf[0], weight / self.num_tasks, factor)
                else:
                    _add_scaled(
                        self.gradient[name], _combined(leaf, weights), 1 / self.num_tasks, factor
                    )

    def check(self, places: tuple[int, ...], quantity: str, values: Tensor) -> None:
        """Remember values that must be finite: `(steps, rows)`, or `(rows,)` for something outside
        the inner steps.
        """
        self._checks.append(
            _Check(
                places,
                quantity,
                values if values.ndim == 2 else values.unsqueeze(0),
                values.ndim == 2,
            )
        )

    def record(self, inner: Inner, solution: Solution, *, share: float = 1.0) -> None:
        """Note a solve's residuals; `share` is its weight where one task is solved several
        times.
        """
        self.check(
            inner.places, "support loss" if self.nu is None else "nudged loss", solution.losses
        )
        self.check(inner.places, "gradient", solution.residuals)
        nudges = solution.residual.shape[0] // inner.tasks
        self._mean("residual_start", solution.residuals[0], share / nudges)
        self._mean("residual", solution.residual, share / nudges)
        self._mean("delta", solution.delta, share / nudges)

    def record_solution(self, inner: Inner, solution: Solution, *, share: float = 1.0) -> None:
        """Note the un-nudged solve, and what it did to the query loss."""
        self.record(inner, solution, share=share)
        inner.settle(solution)
        if self.metrics:
            self.record_query(None, inner.measure_query(solution.displacement), tasks=inner.tasks)

    def record_error(self, forces: Tensor, weights: list[float]) -> None:
        """Note the part of the difference's error that unconverged solves may cause: Σ_j |c_j| λ
        δ_j, with `forces` λ δ of each row.
        """
        by_nudge = forces.unflatten(0, (len(weights), -1)).sum(1)
        self._mean("error", _combined(by_nudge, [abs(w) for w in weights]).reshape(1), 1.0)

    @property
    def error(self) -> Tensor | None:
        """What `record_error` has summed up; None where there was no difference."""
        return self._sums.get("error")

    def record_query(
        self, before: Measured | None, after: Measured | None, *, tasks: int, share: float = 1.0
    ) -> None:
        """Note query loss and accuracy before and after adaptation."""
        for measured, suffix in ((before, "_before"), (after, "")):
            if measured is not None:
                weight = share * tasks / measured.loss.shape[0]
                self._mean("query_loss" + suffix, measured.loss, weight)
                self._mean("query_accuracy" + suffix, measured.accuracy, weight)

    def seal(self, *, flat: bool = False) -> None:
        """Nothing more will be added: have the device put together what `finish` wants to know,
        with `flat` also what `copy` does.
        """
        if flat:
            self._flat = torch.cat([g.flatten() for g in self.gradient.values()])
        norms = (
            torch._foreach_norm(list(self.gradient.values()))
            if self._flat is None
            else [torch.linalg.vector_norm(self._flat)]
        )
        self._sums["gradient_norm"] = torch.linalg.vector_norm(torch.stack(norms)).double()
        fine = [torch.isfinite(check.values).all().double() for check in self._checks]
        self._sealed = torch.stack([*fine, *self._sums.values()])

    def copy(self) -> Params:
        """The gradient, out of reach of the next replay of a recording."""
        assert self._flat is not None
        pieces = self._flat.clone().split([g.numel() for g in self.gradient.values()])
        return {
            n: piece.view(g.shape).to(g.dtype)
            for (n, g), piece in zip(self.gradient.items(), pieces, strict=True)
        }

    def finish(self, cost: Cost, engine: str, advice: Callable[[], str]) -> Stats:
        """Check that everything was finite and sum the statistics up; waits for the device once.
        `advice` is for what was not.
        """
        sealed = self._sealed.tolist()
        self._raise_where_not_finite(sealed[: len(self._checks)], advice)
        values = dict(zip(self._sums, sealed[len(self._checks) :], strict=True))
        norm = values["gradient_norm"]
        if not math.isfinite(norm):
            raise NonFiniteError(
                "The meta-gradient is not finite although every inner solve was; the nudge or the"
                " query loss overflowed. Use a smaller lr or a larger nu. Nothing was written to"
                " .grad."
            )
        error = values["error"] / norm if "error" in values and norm > 0 else None
        nan = math.nan
        return Stats(
            query_loss_before=values.get("query_loss_before", nan),
            query_accuracy_before=values.get("query_accuracy_before", nan),
            query_loss=values.get("query_loss", nan),
            query_accuracy=values.get("query_accuracy", nan),
            residual_start=values.get("residual_start", nan),
            residual=values.get("residual", nan),
            delta=values.get("delta", nan),
            nu=self.nu,
            error=error,
            gradient_norm=norm,
            support_gradients=cost.support_gradients / self.num_tasks,
            query_gradients=cost.query_gradients / self.num_tasks,
            hessian_products=cost.hessian_products / self.num_tasks,
            tasks=self.num_tasks,
            engine=engine,
            products=self.products,
        )

    def _mean(self, key: str, values: Tensor, share: float) -> None:
        total = values.detach().double().sum() * (share / self.num_tasks)
        self._sums[key] = self._sums[key] + total if key in self._sums else total

    def _raise_where_not_finite(self, fine: list[float], advice: Callable[[], str]) -> None:
        if all(fine):
            return
        first = fine.index(0.0)
        # Checks come in the order of the computation, a solve's losses right before its gradients:
        # of these two the earlier step counts.
        candidates = [self._checks[first]]
        if (
            first + 1 < len(self._checks)
            and not fine[first + 1]
            and self._checks[first].in_steps
            and self._checks[first + 1].in_steps
        ):
            candidates.append(self._checks[first + 1])
        check = min(candidates, key=lambda c: c.first_bad[0])
        step, row = check.first_bad
        quantity, places = check.quantity, check.places
        when = f"at inner step {step}" if check.in_steps else "after the inner steps"
        alone = "of the nudged problem" in quantity  # the un-nudged one was solved before
        more = (
            ' Without the nudge all was finite: a smaller nu or start="theta" may do, too.'
            if alone
            else ""
        )
        raise NonFiniteError(
            f"The {quantity} of task {places[row % len(places)]} became NaN or Inf {when}. Usually"
            f" the inner steps diverge: {advice()}.{more} If it is step 0, look for NaN in the data"
            " or the model's parameters. Nothing was written to .grad."
        )


def _combined(rows: Tensor, weights: float | list[float]) -> Tensor:
    """Σ_r w_r rows_r, with one weight for all rows or one per nudge."""
    if isinstance(weights, (int, float)):
        return rows.sum(0) * weights
    first, *others = rows.unflatten(0, (len(weights), -1)).sum(1)
    total = first * weights[0]
    for weight, row in zip(weights[1:], others, strict=True):
        total.add_(row, alpha=weight)
    return total


def _add_scaled(target: Tensor, value: Tensor, weight: float, scale: Tensor | None) -> None:
    if scale is None:
        target.add_(value, alpha=weight)
    else:
        target.addcmul_(value, scale, value=weight)
