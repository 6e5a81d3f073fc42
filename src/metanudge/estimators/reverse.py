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
from metanudge.solvers.trajectory import Trajectory


def walk_back(
    total: MetaGradient, inner: Inner, way: Trajectory, update: Update, products: Products
) -> None:
    """Add d f(φ_K(h)) / dh by all meta-parameters h through the steps that the trajectory has kept;
    displacements before them count as constants.

    Cost: one query gradient, and one product a step.
    """
    problem, proximal = inner.problem, inner.problem.proximal
    q = query_gradient(total, inner, way.solution.displacement)
    if problem.learns_theta:
        total.add(q, 1.0)
    adjoint = update.pull_back_result(q)
    del q
    for step, point in way.backwards():
        before, w = update.pull_back(step, point, adjoint)
        hw = products(inner, point.d, w, step, update.batch_size)
        by_shared = {n: hw.pop(n) for n in problem.shared}
        total.check(
            inner.places, f"Hessian product of inner step {step}, on the way back,", norm(hw)
        )
        if problem.learns_theta:
            total.add(hw, 1.0)
            _add_motion_of_the_centre(total, inner, point.d, w)
        if by_shared:
            total.add(by_shared, 1.0)
        proximal.accumulate(total.gradient, point.d, w, [1 / total.num_tasks])
        bent = proximal.add_curvature(hw, point.d, w, inner.theta)
        del hw
        adjoint = Adjoint({n: leaf + bent[n] for n, leaf in before.d.items()}, before.memory)
    if isinstance(update, LinearUpdate) and update.by_strong_convexity is not None:
        _add_momentum(total, inner, update.by_strong_convexity)


def _add_motion_of_the_centre(total: MetaGradient, inner: Inner, d: Params, w: Params) -> None:
    """How the force of the proximal term on φ = θ + d changes with θ at fixed d, times w: nothing
    where it depends on d alone.
    """
    proximal = inner.problem.proximal
    if not proximal.uses_theta:
        return
    total.add(proximal.add_curvature(zeros_like(d), d, w, inner.theta), 1.0)
    rows, scale = proximal.pull_along(d, w, inner.theta)
    total.add(rows, -1.0, scale)


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
