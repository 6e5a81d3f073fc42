"""λ by patterns of names."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import metanudge as mn
from problems import mlp, relative_error


def stiffness(**options: object) -> dict[str, float]:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    learner = mn.MetaLearner(model, F.mse_loss, **options)
    return {name: float(leaf.max()) for name, leaf in learner.stiffness().items()}


def test_exact_names_then_the_first_pattern():
    found = stiffness(lam={"*": 1.0, "0.*": 2.0, "1.bias": 3.0})
    assert found == {"0.weight": 1.0, "0.bias": 1.0, "1.weight": 1.0, "1.bias": 3.0}
    found = stiffness(lam={"*.bias": 5.0, "1.*": 2.0, "*": 1.0})
    assert found == {"0.weight": 1.0, "0.bias": 5.0, "1.weight": 2.0, "1.bias": 5.0}


def test_only_what_adapts_is_asked_for():
    assert stiffness(lam={"*": 1.0}, adapt="1.*") == {"1.weight": 1.0, "1.bias": 1.0}
    learned = stiffness(lam={"*.bias": 5.0, "*": 1.0}, learn_lam="tensor")
    assert learned == pytest.approx({"0.weight": 1, "0.bias": 5, "1.weight": 1, "1.bias": 5})


@pytest.mark.parametrize(
    ("lam", "message"),
    [
        ({"*": 1.0, "*lora_*": 5.0}, r"unknown: \*lora_\*\)"),
        ({"0.*": 1.0}, r"missing: 1.bias, 1.weight\)"),
        ({"0.*": 1.0, "nothing": 2.0}, r"unknown: nothing; missing: 1.bias, 1.weight"),
        ({"*": -1.0}, r"lam\['\*'\] must be positive"),
        ({"0.*": torch.ones(3), "*": 1.0}, r"lam\['0.\*'\] has shape \(3,\)"),
    ],
)
def test_what_fits_nothing_is_an_error(lam: dict[str, float], message: str):
    with pytest.raises(ValueError, match=message):
        stiffness(lam=lam)


def test_it_is_the_stiffness_written_out():
    setup = mlp(tasks=2)
    names = dict(setup.model.named_parameters())
    written = {name: 5.0 if name.endswith("bias") else 1.0 for name in names}
    one, other = (
        mn.MetaLearner(setup.model, setup.loss, lam=lam).meta_gradient(setup.tasks)[0]
        for lam in ({"*bias": 5.0, "*": 1.0}, written)
    )
    assert relative_error(one, other) == 0
