"""`Unrolled` against autograd through functional steps, in float64 and from an optimizer that
remembers.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import metanudge as mn
from metanudge.estimators.products import ProductsWarning
from metanudge.testing.memory import peak_memory, trainable_bytes
from once import OnceModule
from problems import relative_error, seeded
from unrolling import OPTIMIZERS, Problem, leaves
from walks import APART, EXACT

PRODUCTS: dict[str, tuple[dict[str, Any], float]] = {
    "autograd": ({"products": "autograd"}, EXACT),
    "difference": ({"products": "difference", "epsilon": 1e-5}, APART),
}


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


def compare(make: Any, steps: int, *, warm: int = 3) -> None:
    """Both kinds of products, each on a fresh problem."""
    for products, (options, tolerance) in PRODUCTS.items():
        problem = make()
        problem.warm_up(warm)
        torch.manual_seed(7)
        expected = flat(problem.hypergradient(problem.batches(steps)))
        for leaf in leaves(problem.upper):
            leaf.grad = torch.ones_like(leaf)  # which is added to
        torch.manual_seed(7)
        loop = problem.loop(steps, **options)
        stats = loop.step(problem.batches(steps), problem.validation)
        found = flat([leaf.grad - 1 for leaf in leaves(problem.upper)])
        assert relative_error(found, expected) < tolerance, products
        each, second = (3, 0) if products == "difference" else (2, 1)
        assert (stats.lower_gradients, stats.upper_gradients) == (each * steps, 1)
        assert (stats.products, stats.hessian_products) == (products, second * steps)
        assert stats.gradient_norm == pytest.approx(float(expected.norm()), rel=1e-5)
        assert len(stats.losses) == steps


@pytest.mark.parametrize("model", ["MLP", "conv", "LSTM"])
@pytest.mark.parametrize(
    ("optimizer", "steps"),
    [*((o, 5) for o in OPTIMIZERS), *((o, k) for o in ("momentum", "AdamW") for k in (1, 20))],
)
def test_every_optimizer(optimizer: str, steps: int, model: str):
    compare(lambda: Problem(model, optimizer), steps)


@pytest.mark.parametrize("optimizer", ["momentum", "AdamW"])
@pytest.mark.parametrize("upper", ["penalties", "network"])
def test_every_upper_level(upper: str, optimizer: str):
    compare(lambda: Problem("MLP", optimizer, upper), 5)


@pytest.mark.parametrize("optimizer", ["SGD", "momentum", "Adam"])
def test_dropout_and_the_first_step_ever(optimizer: str):
    """Every product sees the masks of its step."""
    compare(lambda: Problem("dropout", optimizer), 4, warm=0)


class Growing(nn.Module):
    """The smaller the batch, the more layers it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[: 7 - len(x)]:
            x = torch.tanh(layer(x))
        return x


class GrowingProblem(Problem):
    """The optimizer passes a layer without a gradient over, and counts the steps of each."""

    def __init__(self, optimizer: str) -> None:
        super().__init__("MLP", optimizer)
        self.model = seeded(0, Growing)
        self.x = torch.linspace(-1, 2, 27, dtype=torch.float64).view(9, 3).sin()
        self.validation = (self.x[5:], self.y[5:])
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())

    def batch(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        size = 6 - number % 4
        return self.x[:size], self.y[:size], torch.arange(size)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_parameters_without_a_gradient(optimizer: str):
    compare(lambda: GrowingProblem(optimizer), 4, warm=1)


class DeadProblem(Problem):
    """Half of the hidden units are never active."""

    def __init__(self) -> None:
        super().__init__("MLP", "Adam")
        self.model = seeded(0, lambda: nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 3)))
        with torch.no_grad():
            self.model[0].bias[:3] = -100.0
        self.x = torch.linspace(-1, 2, 27, dtype=torch.float64).view(9, 3).sin()
        self.validation = (self.x[:4], (self.y[:4] + 1) % 3)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)


def test_units_that_are_dead():
    """Their gradient is zero, where the root in Adam's step has no derivative: it counts as zero,
    and torch's own would be NaN.
    """
    compare(DeadProblem, 4, warm=0)


def test_the_learning_rate_of_every_step_counts():
    """One that a schedule changes between calls, and one that it changes within a call."""
    problem = Problem("MLP", "momentum")
    schedule = torch.optim.lr_scheduler.ExponentialLR(problem.optimizer, 0.5)
    loop = problem.loop(2)
    loop.step(problem.batches(2), problem.validation)
    schedule.step()
    expected = problem.hypergradient(problem.batches(2))
    problem.upper.grad = None
    loop.step(problem.batches(2), problem.validation)
    assert relative_error(problem.upper.grad, expected[0]) < EXACT

    rates = iter([0.05, 0.2, 0.01, 0.1])
    weight = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    x = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    sgd = torch.optim.SGD(weight.parameters(), lr=next(rates))
    sgd.register_step_post_hook(lambda *_: sgd.param_groups[0].update(lr=next(rates)))

    def lower(batch: Tensor) -> Tensor:
        return (x * weight.weight.square()).sum()

    start = weight.weight.item()
    mn.Unrolled(weight, x, lower, lambda _: weight.weight.sum(), sgd, 3).step(None, None)
    # φ_3 = Π (1 − 2α x) φ_0
    factors = [1 - 2 * lr * 0.3 for lr in (0.05, 0.2, 0.01)]
    product = factors[0] * factors[1] * factors[2]
    by_x = sum(-2 * lr / f for lr, f in zip((0.05, 0.2, 0.01), factors, strict=True)) * product
    assert x.grad is not None
    assert x.grad.item() == pytest.approx(by_x * start, rel=1e-12)


@pytest.mark.parametrize("variant", ["foreach", "fused"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_variants_of_an_optimizer(kind: Any, variant: str):
    found = []
    for options in ({}, {variant: True}):
        problem = Problem("MLP", "Adam")
        problem.optimizer = kind(problem.model.parameters(), lr=0.01, **options)
        problem.warm_up()
        problem.loop(3).step(problem.batches(3), problem.validation)
        found.append(problem.upper.grad)
    assert relative_error(*found) < 1e-12


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_capturable(kind: Any):
    """It counts its steps on the device."""
    found = []
    for options in ({}, {"capturable": True}):
        problem = Problem("MLP", "Adam")
        problem.model.cuda()
        problem.x, problem.y = problem.x.cuda(), problem.y.cuda()
        problem.validation = tuple(t.cuda() for t in problem.validation)
        problem.upper = problem.upper.detach().cuda().requires_grad_()
        problem.optimizer = kind(problem.model.parameters(), lr=0.01, **options)
        problem.warm_up()
        problem.loop(3).step(problem.batches(3), problem.validation)
        found.append(problem.upper.grad)
    assert relative_error(*found) < 1e-12


class Attentive(nn.Module):
    """Attends to three numbers, in the backward pass once more."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(1, 6), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.embed(x[:, None, :, None]).chunk(3, -1)
        attend = F.scaled_dot_product_attention
        return self.head(checkpoint(attend, q, k, v, use_reentrant=False).mean((1, 2)))


def test_attention_in_a_checkpoint():
    """Differences may use torch's fused kernel, autograd that of matrix products alone."""
    found = []
    for options, _ in PRODUCTS.values():
        problem = Problem("MLP", "Adam")
        problem.model = seeded(0, Attentive)
        problem.optimizer = torch.optim.Adam(problem.model.parameters(), lr=0.01)
        x = torch.linspace(-1, 2, 27, dtype=torch.float64).view(9, 3).sin()
        problem.x, problem.validation = x, (x[5:], problem.y[5:])
        problem.loop(3, **options).step(problem.batches(3), problem.validation)
        found.append(problem.upper.grad)
    assert relative_error(*found) < APART


# --------------------------------------------------------------------- where autograd cannot follow


def activated(module: nn.Module) -> Problem:
    problem = Problem("MLP", "Adam")
    for name, layer in problem.model.named_children():
        if not list(layer.parameters()):
            setattr(problem.model, name, module)
    problem.warm_up()
    return problem


def test_auto_takes_differences_where_autograd_cannot(caplog: pytest.LogCaptureFixture):
    smooth, once, refused = activated(nn.Tanh()), activated(OnceModule()), activated(OnceModule())
    exact = smooth.loop(3)
    assert exact.step(smooth.batches(3), smooth.validation).products == "autograd"
    loop = once.loop(3)
    with caplog.at_level(logging.WARNING, logger="metanudge"):
        stats = loop.step(once.batches(3), once.validation)
        first = once.upper.grad.clone()
        loop.step(once.batches(3), once.validation)
    assert stats.products == "difference"
    assert len(caplog.records) == 1
    assert relative_error(first, smooth.upper.grad) < APART
    with pytest.raises(RuntimeError, match="once_differentiable"):
        refused.loop(3, products="autograd").step(refused.batches(3), refused.validation)
    assert refused.upper.grad is None


@pytest.mark.parametrize("epsilon", [1e-1, 1e-2, 1e-3])
def test_the_error_is_that_of_one_sided_differences(epsilon: float):
    """[g(φ + εw) − g(φ)]/ε against the central difference, on a loss with a cubic part."""
    model, x = nn.Linear(1, 1, bias=False).double(), torch.ones(1, dtype=torch.float64)
    nn.init.ones_(model.weight)
    x.requires_grad_()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = mn.Unrolled(
        model,
        x,
        lambda _: (x * model.weight**3).sum(),
        lambda _: model.weight.sum(),
        sgd,
        1,
        products="difference",
        epsilon=epsilon,
    )
    # ∂g = 3φ²: with h = ε(1 + |φ|) the even part is 6h², the odd one 12h
    assert loop.step(None, None).error == pytest.approx(epsilon, rel=1e-9)


@pytest.mark.parametrize(
    ("activation", "pool"), [(nn.GELU, nn.AvgPool1d), (nn.ReLU, nn.MaxPool1d)], ids=["GELU", "ReLU"]
)
def test_kinks_are_told_from_what_is_smooth(activation: Any, pool: Any):
    """The derivative of Adam's step is large where gradients are small."""
    kinked = activation is nn.ReLU

    def gradient(products: Any) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv1d(1, 16, 3), activation(), pool(2),
            nn.Conv1d(16, 16, 3), activation(), pool(2), nn.Flatten(), nn.Linear(16 * 8, 3),
        )  # fmt: skip
        x, y, weights = torch.randn(50, 1, 40), torch.randint(3, (50,)), torch.zeros(50)
        weights.requires_grad_()
        loop = mn.Unrolled(
            model,
            weights,
            lambda _: (weights.exp() * F.cross_entropy(model(x), y, reduction="none")).mean(),
            lambda _: F.cross_entropy(model(x.flip(0)), y),
            torch.optim.Adam(model.parameters(), lr=1e-2),
            10,
            products=products,
        )
        warned = kinked and products == "difference"
        with pytest.warns(ProductsWarning, match="one-sided") if warned else nullcontext():
            loop.step(None, None)
        assert weights.grad is not None
        return weights.grad

    error = relative_error(gradient("difference"), gradient("autograd"))
    assert error > 0.3 if kinked else error < 1e-2


# ------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("products", ["autograd", "difference"])
def test_activations_do_not_outlive_a_step(products: Any):
    def peak(steps: int) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        x, weights = torch.randn(2000, 8), torch.zeros(2000, requires_grad=True)
        loop = mn.Unrolled(
            model,
            weights,
            lambda x: (weights.exp() * model(x)[:, 0].square()).mean(),
            lambda x: F.mse_loss(model(x)[:, 0], x[:, 0]),
            torch.optim.Adam(model.parameters()),
            steps,
            products=products,
        )
        loop.step(x, x)  # the optimizer has its memory
        used = peak_memory(lambda: loop.step(x, x), x.device)
        return used - 4 * steps * trainable_bytes(model)  # φ, gradient and two moments

    few, many = peak(1), peak(16)
    # random states, 5 kB a step
    assert many < few + 16 * 2**13 + 0.01 * few
