"""What estimators add up: a meta-gradient, and the statistics of how it was made.

One identity serves everything that is meta-learned: ∇F(h) = d/dν ∂_h[g + ν f](h, φ_ν) at ν = 0, ∂_h
at fixed φ. It completes the paper's General Discussion. g is the inner objective, f the outer one,
h any of: θ, the centre of the proximal term; its learned stiffness; layers that all tasks share, on
which f̂ and f depend directly. Estimators differ in how they take d/dν: by a difference of solutions
(`add_partials`) or along the response dφ/dν (`add_response`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from metanudge.engines import Cost, Inner, Measured
from metanudge.engines.packed import Packed, PackedParams, add
from metanudge.html_table import html_table
from metanudge.params import Params, combined, condensed, joined, norm, tiled
from metanudge.problem import TwoLevels
from metanudge.solvers.base import Solution

_EXTRA = "extra: "


class NonFiniteError(FloatingPointError):
    """An inner solve produced NaN or Inf; nothing has reached `.grad`."""


@dataclass(frozen=True, kw_only=True)
class Stats:
    """What one meta-gradient cost and how good it is, averaged over the tasks.

    Attributes:
        query_loss_before, query_accuracy_before: on the query set at θ.
        query_loss, query_accuracy: after adaptation; for symmetric loss nudges in the middle of
            the nudged solutions, which differs from the un-nudged one by O(ν²). Accuracy is NaN
            where the task is no classification.
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
        path: how the stacked engine took gradients, and why not faster; in place empty, or over how
            many ranks the parameters are spread.
        products: how `MAML` multiplied with Hessians; None for other estimators.
        nudged: whether query loss and accuracy are means over nudged solutions, since these were
            solved for one by one (in place), and no other was.
        extra: the numbers that a loss of the form `(loss, dict)` reports of the query set after
            adaptation, and the learner's metrics.
    """

    query_loss_before: float = math.nan
    query_accuracy_before: float = math.nan
    query_loss: float = math.nan
    query_accuracy: float = math.nan
    residual_start: float = math.nan
    residual: float = math.nan
    delta: float = math.nan
    nu: float | None
    error: float | None
    gradient_norm: float
    support_gradients: float
    query_gradients: float
    hessian_products: float
    tasks: int
    engine: str
    path: str = ""
    products: str | None = None
    nudged: bool = False
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def diverged(self) -> bool:
        """Whether the inner residual grew: the inner learning rate is too large for the curvature
        met.
        """
        return self.residual > self.residual_start

    def _facts(self) -> dict[str, str]:
        loss = "query loss" + (" (nudged)" if self.nudged else "")
        facts = {loss: f"{self.query_loss_before:.4g} → {self.query_loss:.4g}"}
        if not math.isnan(self.query_accuracy):
            facts["accuracy"] = f"{self.query_accuracy_before:.1%} → {self.query_accuracy:.1%}"
        grew = " (grew: try a smaller lr)" if self.diverged else ""
        facts["inner residual"] = f"{self.residual_start:.3g} → {self.residual:.3g}{grew}"
        facts |= {name: f"{value:.4g}" for name, value in self.extra.items()}
        if self.nu is not None:
            facts["ν"] = f"{self.nu:.3g}"
        if self.products is not None:
            error = "" if self.error is None else f" (error about {self.error:.1g})"
            facts["products"] = self.products + error
        return facts | {"|meta-gradient|": f"{self.gradient_norm:.3g}"}

    def __str__(self) -> str:
        parts = [f"{name} {value}" for name, value in self._facts().items()]
        where = (f"{self.tasks} tasks", self.engine, self.path)
        return ", ".join((*parts, *filter(None, where)))

    def _repr_html_(self) -> str:
        where = {"tasks": str(self.tasks), "engine": self.engine, "path": self.path}
        return html_table((name, value) for name, value in (self._facts() | where).items() if value)


@dataclass(frozen=True)
class _Check:
    """Values that must be finite: `(steps, rows)`, or `(rows,)` for something outside the inner
    steps; and what to say besides where they are not.
    """

    places: tuple[int, ...]
    quantity: str
    values: Tensor
    hint: str

    @property
    def in_steps(self) -> bool:
        return self.values.ndim == 2

    def find_first_bad(self) -> tuple[int, int]:
        step, row = torch.nonzero(~torch.isfinite(torch.atleast_2d(self.values)))[0].tolist()
        return step, row


class MetaGradient:
    """A meta-gradient being summed up over groups of tasks, with what is known about the solves."""

    def __init__(
        self,
        problem: TwoLevels,
        num_tasks: int,
        *,
        metrics: bool,
        seed: int = 0,
        gradient: Params | None = None,
    ) -> None:
        self.gradient = problem.zero_gradient() if gradient is None else gradient
        self.num_tasks = num_tasks
        self.metrics = metrics
        self.seed = seed
        self.nu: float | None = None
        self.cost = Cost()
        self.paths: dict[str, None] = {}  # that the groups of tasks took, in their order
        self.products: str | None = None
        self.nudged = False
        self._sums: dict[str, Tensor] = {}
        self._checks: list[_Check] = []
        self._sealed: Tensor

    def add(
        self, rows: Params, weights: float | Sequence[float], scale: Params | None = None
    ) -> None:
        """gradient += scale ⊙ Σ_r w_r rows_r / num_tasks; one weight for all rows or one per nudge
        (rows are nudge by nudge).
        """
        if not rows:
            return
        with torch.no_grad():
            rows, weights = condensed(rows, weights)
            alone = weights if isinstance(weights, (int, float)) else weights[0]
            rows = self._add_packed(rows, alone / self.num_tasks, scale)
            if rows and scale is None and all(leaf.shape[0] == 1 for leaf in rows.values()):
                targets, own = [self.gradient[n] for n in rows], [leaf[0] for leaf in rows.values()]
                torch._foreach_add_(targets, own, alpha=alone / self.num_tasks)
                return
            for name, leaf in rows.items():
                # the in-place engine: no temporary of the size of the model
                row, weight = (leaf[0], alone) if len(leaf) == 1 else (combined(leaf, weights), 1.0)
                if scale is None:
                    self.gradient[name].add_(row, alpha=weight / self.num_tasks)
                else:
                    self.gradient[name].addcmul_(row, scale[name], value=weight / self.num_tasks)

    def _add_packed(self, rows: Params, weight: float, scale: Params | None) -> Params:
        """The same where the sum is packed; the rows that are left."""
        if not isinstance(self.gradient, PackedParams):
            return rows
        given = rows.packed if isinstance(rows, PackedParams) else {}
        left = {}
        for name in rows:
            total = self.gradient.packed.get(name)
            if total is None:
                left[name] = rows[name]
            else:
                row: Tensor | Packed = given[name] if name in given else rows[name][0]
                add(total, row, weight, None if scale is None else scale[name])
        return left

    def add_partials(
        self,
        inner: Inner,
        d: Params,
        weights: Sequence[float],
        *,
        offsets: Sequence[float] | None,
        scale: Params | None,
    ) -> None:
        """Add Σ_j w_j ∂_h[g + ν_j f](φ_j) of a group of tasks.

        Args:
            d: the displacements φ_j − θ, nudge by nudge.
            weights: w_j, one per nudge.
            offsets: ν_j, where the nudge is the loss f; without, f is not evaluated.
            scale: in place of λ.
        """
        proximal = inner.problem.proximal
        rows, lam = proximal.pull(d, inner.theta)
        self.add(rows, [-w for w in weights], lam if scale is None else scale)
        halves = [0.5 * w / self.num_tasks for w in weights]
        proximal.accumulate(self.gradient, d, d, halves, scale)
        if inner.problem.shared:
            each = {"nu": next(iter(d.values())).new_ones(inner.tasks)}
            nu = None if offsets is None else tiled(each, offsets)["nu"]
            self.add(inner.shared_gradient(d, nu, weights), 1.0)

    def add_response(
        self, inner: Inner, d: Params, v: Params, sign: float, scale: Params | None = None
    ) -> None:
        """Add ∂²_hφ g · (± v), how ∂_h g changes as φ moves from θ + d along ± v; the direct term
        ∂_h f is `query_gradient`'s.
        """
        proximal = inner.problem.proximal
        rows, lam = proximal.pull(d, inner.theta, v)
        self.add(rows, -sign, lam if scale is None else scale)
        proximal.accumulate(self.gradient, d, v, [sign / self.num_tasks], scale)
        if inner.problem.shared:
            self.add(inner.shared_hvp(d, v), sign)

    def query_gradient(
        self, inner: Inner, d: Params, *, direct: bool = True, weight: float = 1.0
    ) -> Params:
        """∇f(θ + d) by the parameters that adapt; by the shared ones it is the direct term, which
        is added from the same evaluation, times a weight.
        """
        shared = inner.problem.shared if direct else {}
        g = inner.query_gradient(d, shared=bool(shared))
        if shared:
            self.add({n: g.pop(n) for n in shared}, weight)
        self.check(inner.places, "query gradient", norm(g))
        return g

    def check(self, places: tuple[int, ...], quantity: str, values: Tensor, hint: str = "") -> None:
        """Remember values that must be finite: `(steps, rows)`, or `(rows,)` for something outside
        the inner steps. The hint is for the message, should they not be.
        """
        self._checks.append(_Check(places, quantity, values, hint))

    def record(self, inner: Inner, solution: Solution, *, share: float = 1.0) -> None:
        """Note a solve's residuals; `share` is its weight where one task is solved several
        times.
        """
        self.check(
            inner.places, "support loss" if self.nu is None else "nudged loss", solution.losses
        )
        self.check(inner.places, "gradient", solution.residuals)
        share = share * inner.tasks / len(solution.residual)
        self._add_to_mean("residual_start", solution.residuals[0], share)
        self._add_to_mean("residual", solution.residual, share)
        self._add_to_mean("delta", solution.delta, share)

    def record_start(self, inner: Inner) -> None:
        """Note the query loss at θ, where it is wanted."""
        if self.metrics:
            self.record_query(inner.measure_query(None), None, tasks=inner.tasks)

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
        self._add_to_mean("error", combined(forces, [abs(w) for w in weights]), 1.0)

    @property
    def error(self) -> Tensor | None:
        """What `record_error` has summed up; None where there was no difference."""
        return self._sums.get("error")

    def record_query(
        self, before: Measured | None, after: Measured | None, *, tasks: int, share: float = 1.0
    ) -> None:
        """Note query loss and accuracy before and after adaptation; what else there is, after."""
        for measured, suffix in ((before, "_before"), (after, "")):
            if measured is not None:
                weight = share * tasks / measured.loss.shape[0]
                self._add_to_mean("query_loss" + suffix, measured.loss, weight)
                self._add_to_mean("query_accuracy" + suffix, measured.accuracy, weight)
                for name, values in measured.extra.items() if not suffix else ():
                    self._add_to_mean(_EXTRA + name, values, weight)

    def seal(self) -> None:
        """Nothing more will be added: have the device put together what `finish` wants to know."""
        leaves = self.gradient.values()
        norms: Sequence[Tensor] = (
            [torch.linalg.vector_norm(leaf) for leaf in leaves]
            if isinstance(self.gradient, PackedParams)
            else torch._foreach_norm(list(leaves))
        )
        self._sums["gradient_norm"] = joined(dict(zip(self.gradient, norms, strict=True))).double()
        fine = [torch.isfinite(check.values).all().double() for check in self._checks]
        self._sealed = torch.stack([*fine, *self._sums.values()])

    def finish(self, engine: str, advice: Callable[[], str]) -> Stats:
        """Check that everything was finite and sum the statistics up; waits for the device once.
        `advice` is for what was not.
        """
        sealed = self._sealed.tolist()
        self._raise_where_not_finite(sealed[: len(self._checks)], advice)
        values = dict(zip(self._sums, sealed[len(self._checks) :], strict=True))
        size = values["gradient_norm"]
        if not math.isfinite(size):
            raise NonFiniteError(
                "The meta-gradient is not finite although every inner solve was; the nudge or the"
                " query loss overflowed. Use a smaller lr or a larger nu. Nothing was written to"
                " .grad."
            )
        error, cost = values.pop("error", None), self.cost
        extra = {key: values.pop(key) for key in list(values) if key.startswith(_EXTRA)}
        return Stats(
            **values,
            nu=self.nu,
            error=None if error is None or size == 0 else error / size,
            support_gradients=cost.support_gradients / self.num_tasks,
            query_gradients=cost.query_gradients / self.num_tasks,
            hessian_products=cost.hessian_products / self.num_tasks,
            tasks=self.num_tasks,
            engine=engine,
            path=" and ".join(filter(None, self.paths)),
            products=self.products,
            nudged=self.nudged,
            extra={key.removeprefix(_EXTRA): value for key, value in extra.items()},
        )

    def _add_to_mean(self, key: str, values: Tensor, share: float) -> None:
        total = values.detach().double().sum() * (share / self.num_tasks)
        self._sums[key] = self._sums[key] + total if key in self._sums else total

    def _raise_where_not_finite(self, fine: list[float], advice: Callable[[], str]) -> None:
        if all(fine):
            return
        # Checks come in the order of the computation, a solve's losses right before its gradients:
        # of these two the earlier step counts.
        first = fine.index(0.0)
        bad = [self._checks[i] for i in (first, first + 1) if i < len(fine) and not fine[i]]
        check = bad[0]
        if all(each.in_steps for each in bad):
            check = min(bad, key=lambda each: each.find_first_bad()[0])
        step, row = check.find_first_bad()
        task = check.places[row % len(check.places)]
        when = f"at inner step {step}" if check.in_steps else "after the inner steps"
        raise NonFiniteError(
            f"The {check.quantity} of task {task} became NaN or Inf {when}. Usually the inner steps"
            f" diverge: {advice()}.{check.hint} If it is step 0, look for NaN in the data or the"
            " model's parameters. Nothing was written to .grad."
        )
