"""Quantised weights whose layers pack them for inference where no gradient is asked for: nothing
that a learner does may be such an occasion.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import metanudge as mn
from problems import classification_tasks, relative_error


class Whole(nn.Parameter):
    """Whole numbers times a scale; `packed` is set when they are turned round for inference."""

    packed = False


class Packing(nn.Module):
    """As bitsandbytes does with 4 bits on a CPU: evaluation mode, and an input without gradient,
    and from then on there are no gradients any more.
    """

    def __init__(self, features: int, generator: torch.Generator) -> None:
        super().__init__()
        numbers = torch.randint(-8, 8, (features, features), generator=generator)
        self.weight = Whole(numbers.to(torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and not x.requires_grad and not self.weight.packed:
            self.weight.data, self.weight.packed = self.weight.data.T.contiguous(), True
        if self.weight.packed:
            return x.detach() @ self.weight.data.to(x.dtype) / 16
        return F.linear(x, self.weight.data.to(x.dtype) / 16)


def model(*, packing: bool, shared: bool = False) -> nn.Sequential:
    """An adapter before a frozen layer, and one behind it."""
    generator = torch.Generator().manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(4, 4), nn.Tanh(), Packing(4, generator), nn.Linear(4, 3)]
    if not packing:
        layers[2] = nn.Linear(4, 4, bias=False)
        weight = Packing(4, torch.Generator().manual_seed(0)).weight
        layers[2].weight = nn.Parameter(weight.data.double() / 16, requires_grad=False)
    made = nn.Sequential(*layers).double()
    for parameter in (*made[0].parameters(), *made[3].parameters()):
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return made.eval()


def learner_of(*, packing: bool, **options: Any) -> mn.MetaLearner:
    return mn.MetaLearner(
        model(packing=packing), F.cross_entropy, solver=mn.GradientDescent(0.1, 2), **options
    )


TASKS = classification_tasks((4,), 3, 2, 6, 6, 0)
CASES: dict[str, dict[str, Any]] = {
    "loss nudge": {"estimator": mn.FOBMAML(nu=0.1)},
    "gradient nudge": {"estimator": mn.FOBMAML(nu=0.1, nudge="gradient")},
    "FO-MAML": {"estimator": mn.FOMAML()},
    "MAML": {"estimator": mn.MAML(products="difference", epsilon=1e-4)},
    "shared": {"estimator": mn.FOBMAML(nu=0.1), "adapt": "3.*"},
    "shared, MAML": {"estimator": mn.MAML(products="difference", epsilon=1e-4), "adapt": "3.*"},
    "metrics": {
        "estimator": mn.FOMAML(),
        "metrics": {"highest": lambda out, _: float(out.numpy().max())},
    },
}


@pytest.mark.parametrize("name", CASES)
def test_meta_gradients_are_those_of_plain_weights(name: str):
    """Before and after an evaluation, in evaluation mode, from whole numbers over 16: equal bits
    but for the sums' order.
    """
    packed, plain = (learner_of(packing=packing, **CASES[name]) for packing in (True, False))
    for _ in range(2):
        found, stats = packed.meta_gradient(TASKS)
        expected, _ = plain.meta_gradient(TASKS)
        assert stats.engine == "inplace"
        assert relative_error(found, expected) < 1e-9
        evaluated = packed.evaluate(TASKS)
        assert relative_error({"": evaluated.loss}, {"": plain.evaluate(TASKS).loss}) < 1e-12
    assert not packed.model[2].weight.packed
    assert all(p.grad is None for p in packed.parameters())


def test_the_stacked_engine_is_refused():
    for options in ({"engine": "stacked"}, {"estimator": mn.Exact()}):
        with pytest.raises(mn.StackingError, match="the weights are quantised"):
            learner_of(packing=True, **options).backward(TASKS)


def test_without_gradients_before_the_user_is_told_to_load_it_anew():
    learner = learner_of(packing=True, estimator=mn.FOMAML(), adapt="0.*")
    learner.model[3].requires_grad_(False)
    with torch.no_grad():
        learner.model(TASKS[0].support[0])
    with pytest.warns(UserWarning, match="load it anew"):
        learner.backward(TASKS)


def test_four_bits_of_bitsandbytes():
    """Against the weights that its numbers stand for: it computes in another order, in float32."""
    bnb = pytest.importorskip("bitsandbytes")
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 64, generator=generator) / 8
    outer = torch.randn(64, 4, generator=generator), torch.randn(3, 64, generator=generator) / 8
    found = []
    for packing in (True, False):
        quantised = bnb.nn.Linear4bit(
            64, 64, bias=False, compute_dtype=torch.float32, quant_type="nf4"
        )
        quantised.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
        middle: nn.Module = quantised.to("cpu")
        if not packing:
            own = quantised.weight
            numbers = bnb.functional.dequantize_4bit(own.data, own.quant_state)
            middle = nn.Linear(64, 64, bias=False).requires_grad_(False)
            middle.weight.data = numbers.float()
        network = nn.Sequential(nn.Linear(4, 64, bias=False), middle, nn.Linear(64, 3, bias=False))
        network[0].weight.data, network[2].weight.data = outer[0].clone(), outer[1].clone()
        learner = mn.MetaLearner(network.eval(), F.cross_entropy, estimator=mn.FOMAML())
        tasks = TASKS.to(torch.float32)
        learner.evaluate(tasks)
        learner.backward(tasks)
        found.append(learner.meta_gradient(tasks)[0])
    assert relative_error(*found) < 1e-4
