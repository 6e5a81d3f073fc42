"""An independent oracle: dense implicit differentiation with `torch.func`, for any split of the
parameters and any proximal term.

    truth = implicit(setup, lambda phi, theta, rho: 0.5 * (rho["all"].exp() * (phi - theta) **
    2).sum(), rho={"all": log_lam})

It shares nothing with the package: parameters are one flat vector, Newton's method finds φ*,
Hessians are dense.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev

from conformance import evaluate
from problems import Setup

Term = Callable[[Tensor, Tensor, dict[str, Tensor]], Tensor]
Hyper = tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]


class _Whole(nn.Module):
    """Model and loss as one module, so that `functional_call` reaches the model's parameters."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.model, self.loss = setup.model, setup.loss

    def forward(self, batch: object) -> Tensor:
        return evaluate(self.model, self.loss, batch)


def implicit(
    setup: Setup,
    term: Term,
    *,
    rho: dict[str, Tensor] | None = None,
    adapts: Callable[[str], bool] = lambda name: True,
) -> dict[str, Tensor]:
    """The mean over tasks of dF/dh, F = f(φ*(h), h), for h = θ, the shared parameters and ρ; keyed
    by name, ρ by its own keys.

    Args:
        term: R(φ, θ, ρ) of flat vectors over the parameters that adapt, in the model's order.
        rho: what else the term depends on.
        adapts: whether a parameter adapts.
    """
    whole = _Whole(setup)
    parameters = {
        n: p.detach().clone() for n, p in setup.model.named_parameters() if p.requires_grad
    }
    adapting = [n for n in parameters if adapts(n)]
    shapes = {n: parameters[n].shape for n in adapting}
    theta = torch.cat([parameters[n].flatten() for n in adapting])
    omega = {n: p for n, p in parameters.items() if n not in adapting}

    def split(vector: Tensor) -> dict[str, Tensor]:
        pieces = vector.split([shape.numel() for shape in shapes.values()])
        return {
            n: piece.view(shape) for (n, shape), piece in zip(shapes.items(), pieces, strict=True)
        }

    def loss(phi: Tensor, omega: dict[str, Tensor], batch: object) -> Tensor:
        return functional_call(
            whole, {f"model.{n}": p for n, p in (split(phi) | omega).items()}, (batch,)
        )

    sums: dict[str, Tensor] = {}
    for task in setup.tasks:
        hyper: Hyper = (theta, omega, rho or {})

        def g(phi: Tensor, hyper: Hyper, task=task) -> Tensor:
            return loss(phi, hyper[1], task.support) + term(phi, hyper[0], hyper[2])

        phi = theta.clone()
        for _ in range(100):
            slope = grad(g)(phi, hyper)
            if float(slope.norm()) < 1e-13:
                break
            phi = phi - torch.linalg.solve(hessian(g)(phi, hyper), slope)
        assert float(grad(g)(phi, hyper).norm()) < 1e-11, (
            "Newton's method has found the inner optimum"
        )
        v = torch.linalg.solve(hessian(g)(phi, hyper), grad(loss)(phi, omega, task.query))
        mixed = jacrev(lambda h, phi=phi, g=g: grad(g)(phi, h))(hyper)
        direct = (
            grad(lambda w, phi=phi, task=task: loss(phi, w, task.query))(omega) if omega else {}
        )
        found = split(-(v @ mixed[0]))
        found |= {n: direct[n] - torch.tensordot(v, mixed[1][n], dims=1) for n in omega}
        found |= {n: -torch.tensordot(v, mixed[2][n], dims=1) for n in hyper[2]}
        for n, leaf in found.items():
            sums[n] = sums.get(n, 0) + leaf / len(setup.tasks)
    order = [*parameters, *(rho or {})]
    return {n: sums[n] for n in order}


def squared_distance(lam: Tensor | float) -> Term:
    """½ Σ λ (φ − θ)²."""
    return lambda phi, theta, rho: 0.5 * (lam * (phi - theta) ** 2).sum()
