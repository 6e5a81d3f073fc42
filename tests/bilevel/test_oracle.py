"""What solvers see of a nudged bilevel problem: value, gradient and Hessian belong together."""

from __future__ import annotations

import math

import pytest
import torch

from bilevel_problems import logistic
from metanudge.bilevel.inner import BilevelInner
from metanudge.bilevel.problem import Bilevel
from metanudge.bilevel.tree import Tree
from metanudge.engines import Cost


@pytest.mark.parametrize(
    ("nu", "with_force"),
    [(0.0, False), (0.3, False), (-0.3, False), (0.3, True)],
    ids=["plain", "loss", "minus", "gradient"],
)
def test_derivatives_against_autograd(nu, with_force):
    known = logistic(direct=True)
    problem = Bilevel(
        known.inner,
        known.outer,
        Tree(known.x, "x"),
        Tree(known.init, "phi"),
        strong_convexity=None,
        seed=0,
    )
    force = torch.linspace(-1, 1, 4, dtype=torch.float64)
    nudge = "gradient" if with_force else "loss" if nu else None
    oracle = BilevelInner(problem, Cost()).oracle(
        offsets=[nu], nudge=nudge, force={"phi": force.unsqueeze(0)} if with_force else None
    )

    def objective(d: torch.Tensor) -> torch.Tensor:
        phi = known.init + d
        return known.inner(known.x, phi) + nu * (
            force @ d if with_force else known.outer(known.x, phi)
        )

    d, v = (
        torch.randn(4, generator=torch.Generator().manual_seed(s), dtype=torch.float64)
        for s in (1, 2)
    )
    rows, direction = {"phi": d.unsqueeze(0)}, {"phi": v.unsqueeze(0)}
    loss, gradient = oracle.gradient(rows)
    torch.testing.assert_close(oracle.value(rows), objective(d).reshape(1))
    torch.testing.assert_close(oracle.objective(loss, rows), objective(d).reshape(1))
    torch.testing.assert_close(gradient["phi"][0], torch.func.grad(objective)(d))
    torch.testing.assert_close(
        oracle.hvp(rows, direction)["phi"][0], torch.autograd.functional.hessian(objective, d) @ v
    )
    assert torch.equal(oracle.zeros()["phi"], torch.zeros_like(rows["phi"]))
    assert oracle.split() == [oracle]
    assert math.isnan(oracle.strong_convexity)
