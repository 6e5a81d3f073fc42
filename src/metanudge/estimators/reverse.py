"""The adaptation walked back: MAML's gradient from one step at a time.

With L = f(φ_K) and the derivatives of L by what step k leaves behind, the step's own
vector–Jacobian product (`metanudge.solvers.adjoint`) gives w_k = ∂L/∂g_k, the derivative by the
gradient that the step was made with, and the product H_k w_k how that gradient depends on φ_k. For
gradient descent with v = ∇f(φ_K) that is

    v ← v − α (H_k v + λ v),    k = K−1, …, 0;    θ gets v_0 + αλ Σ_k v_k.

With L = Σ_k w_k f(φ_k) the others' w_k ∇f(φ_k) join v where φ_k is passed.

All else that is learned falls out of the same w_k: ∂g_k/∂h · w_k for h = log λ, for shared layers
and for the centre of any other proximal term. Learned rates are part of the steps themselves, and
so of their own products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from metanudge.engines import Inner
from metanudge.estimators.products import Products
from metanudge.estimators.total import MetaGradient
from metanudge.params import Params, norm, zeros_like
from metanudge.solvers.adjoint import Adjoint, LinearUpdate, Point, PulledBack, Update
from metanudge.solvers.base import Oracle
from metanudge.solvers.trajectory import Keep, solve


def there_and_back(
    total: MetaGradient,
    inner: Inner,
    oracle: Oracle,
    update: Update,
    products: Products,
    *,
    last: int,
    keep: Keep,
    weights: Sequence[float] | None = None,
) -> None:
    """Solve, and add d f(φ_K(h)) / dh by all meta-parameters h through the last so many steps;
    displacements before them count as constants. With weights of φ_1, …, φ_K the same for Σ_k w_k
    f(φ_k); those before the first kept φ are left out.

    Cost: `steps` support gradients, one query gradient for each weight that is not zero, and a
    product for each of the last steps.
    Memory: besides one gradient or product θ, the meta-gradient, the derivative that walks back and
    what `keep` keeps; one copy more where the update remembers something.
    """
    problem = inner.problem
    weights = [0.0] * (update.steps - 1) + [1.0] if weights is None else weights
    solution, way = solve(update, oracle, last=last, keep=keep)
    total.record_solution(inner, solution)
    q = _query_part(total, inner, solution.displacement, weights[-1])
    del solution
    adjoint = update.pull_back_result(q)
    del q

    def bend(step: int, point: Point, back: PulledBack) -> Params:
        w, factor = back.by_gradient, back.factor
        if update.rates is not None:
            update.rates.accumulate(total.gradient, step, back.by_rate, 1 / total.num_tasks)
        hw = products(inner, point.d, w, step, update.batch_size)
        by_shared = {n: hw.pop(n) for n in problem.shared if n in hw}
        quantity = f"Hessian product of inner step {step}, on the way back,"
        total.check(inner.places, quantity, norm(hw))
        if problem.learns_theta:
            total.add(hw, factor)
        if by_shared:
            total.add(by_shared, factor)
        return _through_the_term(total, inner, point.d, w, hw, factor)

    def join(step: int, point: Point) -> Adjoint | None:
        if not step or not weights[step - 1]:
            return None
        d = update.result(point.d, point.memory)
        return update.pull_back_result(_query_part(total, inner, d, weights[step - 1]))

    walk_back(way.backwards(), update.pull_back, adjoint, bend, join)
    if isinstance(update, LinearUpdate) and update.by_strong_convexity is not None:
        _add_momentum(total, inner, update.by_strong_convexity)


def walk_back(
    way: Iterable[tuple[int, Point]],
    pull_back: Callable[[int, Point, Adjoint], PulledBack],
    adjoint: Adjoint,
    bend: Callable[[int, Point, PulledBack], Params],
    join: Callable[[int, Point], Adjoint | None] | None = None,
) -> None:
    """From the last step to the first: what a derivative by the end of a step is by its beginning.

    Args:
        pull_back: the step's own vector–Jacobian product, see `Update.pull_back`.
        bend: how the gradient that the step was made with changes along w = ∂L/∂g, by what it
            started from; without the factor that w is to be multiplied by.
        join: derivatives of further losses at the beginning of a step, where there are some.
    """
    for step, point in way:
        back = pull_back(step, point, adjoint)
        before, hw = back.before, bend(step, point, back)
        leaves = list(hw.values())
        torch._foreach_mul_(leaves, back.factor)
        torch._foreach_add_(leaves, [before.d[name] for name in hw])
        adjoint = Adjoint(hw, before.memory)
        del before, back, hw  # or they would still be alive during the next product
        if join is not None and (more := join(step, point)) is not None:
            adjoint += more
        del point  # or it would still be there while the one after the next is fetched


def _query_part(total: MetaGradient, inner: Inner, d: Params, weight: float) -> Params:
    """w ∇f(θ + d), of which θ and shared layers get theirs."""
    q = total.query_gradient(inner, d, weight=weight)
    if inner.problem.learns_theta:
        total.add(q, weight)
    return q if weight == 1.0 else {n: leaf * weight for n, leaf in q.items()}


def _through_the_term(
    total: MetaGradient, inner: Inner, d: Params, w: Params, hw: Params, factor: float
) -> Params:
    """Add what the force of the proximal term says about θ and what it learns; returns hw and the
    term's own curvature times w.
    """
    proximal = inner.problem.proximal
    proximal.accumulate(total.gradient, d, w, [factor / total.num_tasks], None)
    if not proximal.uses_theta:
        # a force that is linear in d = φ − θ alone: it is its own derivative, and θ moves nothing
        proximal.add_force(hw, w, inner.theta)
        return hw
    total.add(proximal.add_curvature(zeros_like(d), d, w, inner.theta), factor)
    rows, scale = proximal.pull(d, inner.theta, w)
    total.add(rows, -factor, scale)
    return proximal.add_curvature(hw, d, w, inner.theta)


def _add_momentum(total: MetaGradient, inner: Inner, by_mu: torch.Tensor) -> None:
    """The derivative by a momentum that is made from the smallest λ, which is learned."""
    proximal = inner.problem.proximal
    with torch.enable_grad():
        learned = {n: p.detach().requires_grad_() for n, p in proximal.learned.items()}
        _, mu = proximal.bind(inner.theta, learned)
        assert isinstance(mu, torch.Tensor)
        found = torch.autograd.grad(mu, list(learned.values()), by_mu, materialize_grads=True)
    for name, leaf in zip(learned, found, strict=True):
        total.gradient[name].add_(leaf.to(total.gradient[name]), alpha=1 / total.num_tasks)
