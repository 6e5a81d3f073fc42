"""Learned stiffness finds the best one: for hierarchical Gaussian tasks it is known.

y = Xw_i + σε with w_i ~ N(w̄, τ²I). The posterior mean of w_i given n examples minimises (1/n)‖y −
Xw‖² + ½λ‖w − w̄‖² with λ = 2σ²/(nτ²), and no other estimate has a smaller expected squared error on
new examples: the best meta-parameters are θ = w̄ and this λ.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import metanudge as mn

SIGMA, TAU, SUPPORT, QUERY, DIM, TASKS, STEPS = 1.0, 0.5, 5, 8, 3, 800, 90
BEST = 2 * SIGMA**2 / (SUPPORT * TAU**2)
MEAN = torch.tensor([2.0, -1.5, 0.5], dtype=torch.float64)


def draw(generator: torch.Generator) -> mn.TaskBatch:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    w = MEAN + TAU * normal(TASKS, DIM)

    def labelled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x @ w.unsqueeze(-1) + SIGMA * normal(*x.shape[:2], 1)

    # Support inputs with XᵀX = nI: one step of conjugate gradient then solves the inner problem
    # exactly, whatever λ is.
    orthogonal = SUPPORT**0.5 * torch.linalg.qr(normal(SUPPORT, DIM)).Q
    return mn.TaskBatch(
        labelled(orthogonal.expand(TASKS, -1, -1)), labelled(normal(TASKS, QUERY, DIM))
    )


@pytest.mark.parametrize("factor", [100.0, 0.01])
def test_learned_stiffness_lands_on_the_ratio_of_variances(factor: float):
    model = nn.Linear(DIM, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    learner = mn.MetaLearner(
        model,
        nn.functional.mse_loss,
        lam=factor * BEST,
        learn_lam="scalar",
        solver=mn.NewtonCG(steps=1, cg_steps=1),
        estimator=mn.FOBMAML(nu=0.1, nudge="gradient"),
        engine="stacked",
    )
    optimizer = torch.optim.Adam(learner.parameter_groups(lr=0.3, lam_lr=0.5), betas=(0.8, 0.99))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS, eta_min=1e-3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        stats = learner.backward(draw(generator), metrics=False)
        optimizer.step()
        schedule.step()
        assert stats.residual < 1e-6, "inner solves are converged, whatever λ is"
    (lam,) = learner.stiffness().values()
    assert abs(math.log(float(lam) / BEST)) < math.log(1.05)
    assert float((model.weight.detach() - MEAN).norm() / MEAN.norm()) < 0.05
