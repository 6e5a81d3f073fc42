"""The adaptation walked back: MAML's gradient from one step at a time.

With L = f(φ_K) and the derivatives of L by what step k leaves behind, the step's own
vector–Jacobian product (`metanudge.solvers.adjoint`) gives w_k = ∂L/∂g_k, the derivative by the
gradient that the step was made with, and the product H_k w_k how that gradient depends on φ_k. For
gradient descent with v = ∇f(φ_K) that is

    v ← v − α (H_k v + λ v),    k = K−1, …, 0;    θ gets v_0 + αλ Σ_k v_k.

All else that is learned falls out of the same w_k: ∂g_k/∂h · w_k for h = log λ, for shared layers
and for the centre of any other proximal term.
"""

from __future__ import annotations

import torch

from metanudge.engines import Inner
from metanudge.estimators.identity import query_gradient
from metanudge.estimators.products import Products
from metanudge.estimators.total import MetaGradient
from metanudge.params import Params, norm, zeros_like
from metanudge.solvers.adjoint import Adjoint, LinearUpdate, Update
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
) -> None:
    """Solve, and add d f(φ_K(h)) / dh by all meta-parameters h through the last so many steps;
    displacements before them count as constants.

    Cost: `steps` support gradients, one query gradient, and a product for each of the last steps.
    Memory: besides one gradient or product θ, the meta-gradient, the derivative that walks back and
    what `keep` keeps; one copy more where the update remembers something.
    """
    problem = inner.problem
    solution, way = solve(update, oracle, last=last, keep=keep)
    total.record_solution(inner, solution)
    q = query_gradient(total, inner, solution.displacement)
    del solution
    if problem.learns_theta:
        total.add(q, 1.0)
    adjoint = update.pull_back_result(q)
    del q
    for step, point in way.backwards():
        before, w, factor = update.pull_back(step, point, adjoint)
        hw = products(inner, point.d, w, step, update.batch_size)
        by_shared = {n: hw.pop(n) for n in problem.shared}
        quantity = f"Hessian product of inner step {step}, on the way back,"
        total.check(inner.places, quantity, norm(hw))
        if problem.learns_theta:
            total.add(hw, factor)
        if by_shared:
            total.add(by_shared, factor)
        hw = _through_the_term(total, inner, point.d, w, hw, factor)
        leaves = list(hw.values())
        torch._foreach_mul_(leaves, factor)
        torch._foreach_add_(leaves, [before.d[name] for name in hw])
        adjoint = Adjoint(hw, before.memory)
        del before, w, hw, by_shared  # or they would still be alive during the next product
    if isinstance(update, LinearUpdate) and update.by_strong_convexity is not None:
        _add_momentum(total, inner, update.by_strong_convexity)


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
