"""`pytest --perturb` reaches what the numerical tests start from, and changes it by an ulp."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import perturbation
from bilevel_problems import ridge
from problems import conv_net, logistic_regression, mlp, quadratic, transformer

PROBLEMS = {
    "logistic_regression": lambda: parameters(logistic_regression()),
    "mlp": lambda: parameters(mlp()),
    "conv_net": lambda: parameters(conv_net()),
    "transformer": lambda: parameters(transformer()),
    "quadratic": lambda: parameters(quadratic()),
    "bilevel": lambda: [ridge().x, ridge().init],
}


def parameters(setup) -> list[Tensor]:
    return [p.detach() for p in setup.model.parameters()]


@pytest.mark.parametrize("problem", PROBLEMS)
def test_it_changes_parameters_by_an_ulp(problem, monkeypatch):
    monkeypatch.setenv(perturbation.VARIABLE, "0")  # put back at the end, like the two below
    monkeypatch.setattr(perturbation, "_seed", None)
    for name in ("uniform_", "normal_"):
        monkeypatch.setattr(Tensor, name, getattr(torch._C.TensorBase, name))
    plain = PROBLEMS[problem]()
    found = []
    for seed in (1, 1, 2):
        perturbation.start(seed)
        found.append(torch.cat([x.flatten() for x in PROBLEMS[problem]()]))
        for name in ("uniform_", "normal_"):
            monkeypatch.setattr(Tensor, name, getattr(torch._C.TensorBase, name))
    before = torch.cat([x.flatten() for x in plain])
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    changed = (found[0] - before).abs() / before.abs().clamp(min=1e-30)
    assert float((changed > 0).double().mean()) > 0.2, (
        "of u = −1, 0, 1 two are a change; constants of normalisation stay"
    )
    assert float(changed.max()) <= 2 * torch.finfo(torch.float32).eps, "layers draw in float32"
