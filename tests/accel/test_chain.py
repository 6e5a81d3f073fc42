"""Chains of plain layers take a path of their own on the stacked engine; it must compute what the
general one computes.
"""

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import metanudge as mn
from metanudge.accel.layers import NoChain, _Halve, steps_of_problem
from metanudge.engines import Cost, StackedEngine
from metanudge.solvers.base import Descends

ROWS = 4


def conv_1d():
    return mn.models.Conv1D(ways=3, channels=4, length=17), (17,)


def conv_2d():
    return mn.models.Conv4(ways=3, channels=3, image_size=17), (1, 17, 17)


def perceptron():
    return mn.models.MLP(6, 3, hidden=(5, 4), activation="tanh"), (6,)


def batchnorm_without_channels():
    return nn.Sequential(
        nn.Linear(6, 5), nn.BatchNorm1d(5), nn.GELU(), nn.Dropout(0.0), nn.Linear(5, 3, bias=False)
    ), (6,)


def odds_and_ends():
    model = nn.Sequential(
        nn.Conv1d(2, 4, 3, stride=2, dilation=2, bias=False),
        nn.Sequential(
            nn.BatchNorm1d(4, affine=False), nn.SiLU(), nn.MaxPool1d(3, stride=1), nn.AvgPool1d(2)
        ),
        nn.Conv1d(4, 4, 3, padding="same"),
        nn.ReLU(),
        nn.AdaptiveAvgPool1d(2),
        nn.Flatten(),
        nn.Linear(8, 3),
    )
    model[0].weight.requires_grad_(False)
    return model, (2, 22)


def tied():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))
    model[2].weight = model[0].weight
    return model, (4,)


MODELS = (conv_1d, conv_2d, perceptron, batchnorm_without_channels, odds_and_ends, tied)
ESTIMATORS = (
    mn.FOBMAML(),
    mn.FOBMAML(nudge="gradient", start="solution"),
    mn.FOMAML(),
    mn.Reptile(),
)
SECOND_ORDER = (
    mn.MAML(),
    mn.MAML(truncate=2),
    mn.MAML(truncate=0),
    mn.IMAML(cg_steps=3),
    mn.FOBMAML(stencil="tangent"),
)


def problem(make, training=True):
    torch.manual_seed(0)
    model, shape = make()
    g = torch.Generator().manual_seed(1)
    x, xq = (torch.randn(ROWS, n, *shape, generator=g, dtype=torch.float64) for n in (6, 7))
    y, yq = (torch.randint(0, 3, (ROWS, n), generator=g) for n in (6, 7))
    return model.double().train(training), mn.TaskBatch((x, y), (xq, yq))


def result(model, tasks, estimator, solver=mn.GradientDescent, **options):
    solver = solver(lr=0.05, steps=3, batch_size=5)
    learner = mn.MetaLearner(
        model, nn.functional.cross_entropy, solver=solver, estimator=estimator, **options
    )
    gradient, stats = learner.meta_gradient(tasks, seed=3)
    return torch.cat([g.flatten() for g in gradient.values()]), stats, rounding(learner)


def rounding(learner):
    """Relative: sums of a few hundred terms come out within 1e-12 in any order; a difference
    divides what rounding did to φ by ν.
    """
    look = learner.tuner.last
    return 1e-12 + (4 * look.rounding[-1] if look else 0.0)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=str)
@pytest.mark.parametrize("make", MODELS)
def test_equals_the_general_path_and_the_module_itself(make, estimator, training, monkeypatch):
    model, tasks = problem(make, training)
    buffers = [b.clone() for b in model.buffers()]
    assert (
        steps_of_problem(mn.MetaLearner(model, nn.functional.cross_entropy).problem()) is not None
    )
    folded, stats, tolerance = result(model, tasks, estimator, engine="stacked")
    inplace, *_ = result(model, tasks, estimator, engine="inplace")
    monkeypatch.setattr("metanudge.engines.stacked._registered", [])
    general, general_stats, _ = result(model, tasks, estimator, engine="stacked")
    for other in (general, inplace):
        assert float((folded - other).norm()) <= tolerance * float(other.norm())
    assert stats.query_accuracy == general_stats.query_accuracy
    assert stats.query_loss == pytest.approx(general_stats.query_loss, rel=1e-12)
    assert stats.support_gradients == general_stats.support_gradients
    assert all(torch.equal(b, kept) for b, kept in zip(model.buffers(), buffers, strict=True))


@pytest.mark.parametrize(
    "solver", [mn.GradientDescent, mn.Nesterov], ids=lambda solver: solver.__name__
)
@pytest.mark.parametrize("estimator", SECOND_ORDER, ids=str)
@pytest.mark.parametrize("make", MODELS)
def test_second_derivatives_equal_those_of_the_general_path(make, estimator, solver, monkeypatch):
    model, tasks = problem(make)
    folded, stats, _ = result(model, tasks, estimator, solver, engine="stacked")
    monkeypatch.setattr("metanudge.engines.stacked._registered", [])
    general, general_stats, _ = result(model, tasks, estimator, solver, engine="stacked")
    assert float((folded - general).norm()) <= 1e-11 * float(general.norm())
    for key in (
        "query_loss",
        "residual_start",
        "residual",
        "delta",
        "support_gradients",
        "query_gradients",
        "hessian_products",
    ):
        assert getattr(stats, key) == pytest.approx(getattr(general_stats, key), rel=1e-11), key


@pytest.mark.parametrize("nudged", [False, True], ids=["plain", "nudged"])
def test_hessian_products_are_those_of_the_general_path(nudged, monkeypatch):
    model, tasks = problem(conv_1d)
    two_level = mn.MetaLearner(model, nn.functional.cross_entropy).problem()
    g = torch.Generator().manual_seed(2)
    d, v = (
        {
            n: 0.1 * torch.randn(2 * ROWS, *p.shape, generator=g, dtype=p.dtype)
            for n, p in two_level.parameters.items()
        }
        for _ in range(2)
    )
    offsets = torch.linspace(-0.5, 0.5, 2 * ROWS, dtype=torch.float64) if nudged else None

    def products():
        with StackedEngine().session(two_level, tasks, width=2, seed=0, cost=Cost()) as groups:
            return next(iter(groups)).data_hvp(d, v, offsets, 0, None)

    ours = products()
    monkeypatch.setattr("metanudge.engines.stacked._registered", [])
    for a, b in zip(pytree.tree_leaves(ours), pytree.tree_leaves(products()), strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def test_a_loss_without_curvature_has_hessian_products_of_zero():
    model = nn.Sequential(nn.Linear(3, 1, bias=False)).double()
    x = torch.randn(2, 4, 3, dtype=torch.float64)
    learner = mn.MetaLearner(
        model,
        lambda output, target: (output * target).mean(),
        estimator=mn.IMAML(cg_steps=2),
        engine="stacked",
    )
    exact = torch.einsum("tei,te->i", x, torch.ones(2, 4, dtype=torch.float64)) / 8
    gradient, _ = learner.meta_gradient(
        mn.TaskBatch((x, torch.ones(2, 4, 1).double()), (x, torch.ones(2, 4, 1).double()))
    )
    assert torch.allclose(gradient["0.weight"][0], exact, rtol=1e-12)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Dropout(0.5),
        nn.Conv1d(4, 4, 3, padding=1, groups=2),
        nn.Conv1d(4, 4, 3, padding=1, padding_mode="circular"),
        nn.GroupNorm(2, 4),
        nn.Flatten(2),
        nn.Softmax(dim=1),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_that_do_not_fold_are_left_to_the_general_path(layer):
    model = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), layer)
    with pytest.raises(NoChain):
        steps_of_problem(mn.MetaLearner(model, nn.functional.mse_loss).problem())


def test_a_model_with_a_forward_of_its_own_is_left_alone():
    class Twice(nn.Sequential):
        def forward(self, x):
            return 2 * super().forward(x)

    class Odd(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    for model in (Twice(nn.Linear(2, 2)), nn.Sequential(Odd(2, 2)), nn.Bilinear(2, 2, 2)):
        with pytest.raises(NoChain):
            steps_of_problem(mn.MetaLearner(model, nn.functional.mse_loss).problem())


def test_a_model_with_hooks_is_left_alone():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    handle = model[1].register_forward_hook(lambda module, inputs, output: 2 * output)
    with pytest.raises(NoChain):
        steps_of_problem(mn.MetaLearner(model, nn.functional.mse_loss).problem())
    handle.remove()
    assert steps_of_problem(mn.MetaLearner(model, nn.functional.mse_loss).problem())


@pytest.mark.parametrize("length", [8, 9])
def test_halving_is_torchs_pooling(length):
    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, 3, (2, 5, length), generator=g).double().requires_grad_()  # many ties
    theirs = nn.functional.max_pool1d(x, 2)
    ours = _Halve.apply(x, -1)
    weights = torch.randn(theirs.shape, generator=g, dtype=torch.float64)
    assert torch.equal(ours, theirs)
    assert torch.equal(*(torch.autograd.grad((y * weights).sum(), x)[0] for y in (ours, theirs)))


def test_halving_twice_is_torchs_pooling_in_two_dimensions():
    g = torch.Generator().manual_seed(0)
    x = torch.randint(0, 3, (2, 3, 7, 6), generator=g).double().requires_grad_()
    theirs, ours = nn.functional.max_pool2d(x, 2), _Halve.apply(_Halve.apply(x, -1), -2)
    weights = torch.randn(theirs.shape, generator=g, dtype=torch.float64)
    assert torch.equal(ours, theirs)
    assert torch.equal(*(torch.autograd.grad((y * weights).sum(), x)[0] for y in (ours, theirs)))


@pytest.mark.parametrize("length", [8, 9])
def test_halving_can_be_differentiated_twice(length):
    x = torch.randn(2, 3, length, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: _Halve.apply(x, -1) ** 3, (x,))


def test_nan_is_not_pooled_away():
    x = torch.tensor([[float("nan"), 1.0, 1.0, float("nan")]])
    assert _Halve.apply(x, -1).isnan().all()


def test_gradient_descent_steps_on_whole_matrices():
    """On a CUDA device by one kernel; the other way works, too, and nobody would notice."""
    model, tasks = problem(perceptron)
    learner = mn.MetaLearner(model, nn.functional.cross_entropy)
    session = StackedEngine().session(learner.problem(), tasks, width=1, seed=0, cost=Cost())
    with session as groups:
        assert isinstance(next(groups).oracle(), Descends)
