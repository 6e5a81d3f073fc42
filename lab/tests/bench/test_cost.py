"""The cost model against torch's own count of operations, and by hand."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from metanudge_lab.bench.cases import CASES
from metanudge_lab.bench.contender import Work
from metanudge_lab.bench.cost import CostModel, Multiplication, cost_model
from metanudge_lab.bench.peaks import Peaks, measure_peaks

LAYER = Multiplication("mm", flops=1000, operands=((40, True), (60, True)), result=20)
FIRST = Multiplication("mm", flops=1000, operands=((40, False), (60, True)), result=20)


def products(layers: list[list]) -> int:
    return sum(product.flops for layer in layers for product in layer)


@pytest.mark.parametrize("case", CASES)
def test_a_gradient_has_the_operations_that_torch_counts(case: str) -> None:
    workload = CASES[case].make(quick=True)
    model = cost_model(workload)
    for layers, (x, y) in ((model.support, workload.support), (model.query, workload.query)):
        module = copy.deepcopy(workload.model)
        with FlopCounterMode(display=False) as counter:
            workload.loss(module(x[0]), y[0]).backward()
        assert products([layer.gradient() for layer in layers]) == counter.get_total_flops() > 0


@pytest.mark.parametrize("case", ["sinusoid", "transformer"])
def test_a_hessian_product_has_the_operations_that_torch_counts(case: str) -> None:
    """Matrix products only: torch's double backward of a convolution is not the least that does
    it.
    """
    workload = CASES[case].make(quick=True)
    expected = products([layer.hessian_product() for layer in cost_model(workload).support])
    module = copy.deepcopy(workload.model)
    loss = workload.loss(module(workload.support[0][0]), workload.support[1][0])
    gradients = torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(
            gradients, list(module.parameters()), [torch.ones_like(g) for g in gradients]
        )
    assert counter.get_total_flops() == expected


def test_counting_leaves_the_model_as_it_is() -> None:
    workload = CASES["mnist1d"].make(quick=True)
    before = {name: value.clone() for name, value in workload.model.state_dict().items()}
    cost_model(workload)
    assert all(
        torch.equal(value, before[name]) for name, value in workload.model.state_dict().items()
    )


def test_products_of_a_layer_by_hand() -> None:
    """y = ab: three products with three tensors each; a Hessian product doubles what needs a
    tangent.
    """
    assert [(p.flops, p.bytes) for p in LAYER.gradient()] == [(1000, 120)] * 3
    assert [(p.flops, p.bytes) for p in FIRST.gradient()] == [(1000, 120)] * 2
    # ȧb + aḃ reads a, b, ȧ, ḃ; ġb + gḃ reads g, ġ, b, ḃ; ġa + gȧ reads g, ġ, a, ȧ.
    assert [(p.flops, p.bytes) for p in LAYER.hessian_product()] == [
        (2000, 220),
        (2000, 200),
        (2000, 180),
    ]
    # No tangent and no gradient of a: aḃ reads a and ḃ, beside b that is there; ġa reads ġ and a.
    assert [p.flops for p in FIRST.hessian_product()] == [1000, 1000]


def test_the_bound_is_the_slower_of_arithmetic_and_traffic() -> None:
    model, work = CostModel((LAYER,), (FIRST,), tasks=2), Work(3, 1)
    fast_memory, fast_arithmetic = Peaks(1e3, ((1, math.inf),)), Peaks(math.inf, ((1, 10.0),))
    flops, moved = 2 * (3 * 3000 + 2000), 2 * (3 * 360 + 240)
    for peaks, seconds in ((fast_memory, flops / 1e3), (fast_arithmetic, moved / 10)):
        total = model.total(work, peaks)
        assert (total.flops, total.bytes, total.seconds) == (flops, moved, pytest.approx(seconds))
    with_hessian = model.total(Work(3, 1, 5), fast_memory)
    assert with_hessian.flops - flops == 2 * 5 * 6000


def test_peaks_are_measured() -> None:
    peaks = measure_peaks(torch.device("cpu"), quick=True)
    assert 1e7 < peaks.flops < 1e15
    assert all(1e6 < rate < 1e14 for _, rate in peaks.bandwidth)
