"""What only a CUDA device runs: the Triton trunk, fused steps and recorded meta-steps."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import metanudge as mn
from metanudge.accel import chain
from metanudge.accel.trunk.blocks import BlockWeights, match
from metanudge.models import Conv4

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CE = nn.functional.cross_entropy


@pytest.fixture(autouse=True)
def precision():
    """TF32 off unless a test turns it on."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


def images(
    tasks: int, examples: int, channels: int, size: tuple[int, ...], seed: int = 0
) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return ((torch.rand(tasks, examples, channels, *size, generator=g) > 0.8).float()).cuda()


def batch(
    tasks: int = 4,
    shots: int = 1,
    queries: int = 3,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> mn.TaskBatch:
    labels = torch.arange(5, device="cuda")
    support = images(tasks, 5 * shots, 1, (28, 28), seed).to(dtype), labels.repeat(tasks, shots)
    query = (
        images(tasks, 5 * queries, 1, (28, 28), seed + 1).to(dtype),
        labels.repeat(tasks, queries),
    )
    return mn.TaskBatch(support, query)


def learner(
    estimator: mn.estimators.Estimator, dtype: torch.dtype = torch.float32, **options: object
) -> mn.MetaLearner:
    torch.manual_seed(0)
    model = Conv4(ways=5, channels=16).to("cuda", dtype)
    solver = mn.GradientDescent(lr=0.02, steps=3)
    return mn.MetaLearner(
        model, CE, solver=solver, estimator=estimator, engine="stacked", **options
    )


def flat(gradient: dict[str, Tensor]) -> Tensor:
    return torch.cat([leaf.flatten().double() for leaf in gradient.values()])


SHAPES = {
    "conv4": (2, 64, 1, (28, 28), 3, 1, 4, True),
    "colour, odd sizes": (2, 20, 3, (19, 17), 3, 1, 3, True),
    "1-d": (1, 16, 1, (40,), 3, 1, 3, True),
    "wide input, large kernel, no affine": (2, 24, 8, (16, 16), 5, 2, 2, False),
    "more channels than a tile": (2, 128, 3, (32, 32), 3, 1, 3, True),
    "no padding, one block": (2, 16, 1, (9, 9), 3, 0, 1, True),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_trunk_equals_its_layers(shape):
    from metanudge.accel.trunk.cuda import CUDATrunk

    dim, channels, inputs, size, kernel, padding, count, affine = shape
    conv, norm, pool = (
        (nn.Conv2d, nn.BatchNorm2d, nn.MaxPool2d)
        if dim == 2
        else (nn.Conv1d, nn.BatchNorm1d, nn.MaxPool1d)
    )
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for i in range(count):
        layers += [
            conv(channels if i else inputs, channels, kernel, padding=padding),
            norm(channels, affine=affine),
            nn.ReLU(),
            pool(2),
        ]
    found = match(layers)
    assert found is not None
    tasks, rows = 2, 4
    x = images(tasks, 6, inputs, size) + 0.1 * torch.rand(tasks, 6, inputs, *size, device="cuda")
    weights = []
    for block in found.blocks:
        w = block.conv.weight.detach().cuda()
        bias, gamma, beta = torch.randn(3, rows, channels, device="cuda")
        scale = (gamma + 0.5, beta) if affine else (None, None)
        weights.append(
            [w + 0.1 * w.std() * torch.randn(rows, *w.shape, device="cuda"), bias, *scale]
        )
    leaves = [
        [None if t is None else t.clone().requires_grad_() for t in block] for block in weights
    ]
    trunk = CUDATrunk(found.blocks)
    y = trunk.outputs(trunk.prepare(x), [BlockWeights(*block) for block in leaves])
    direction = torch.randn(y.shape, device="cuda")
    got = torch.autograd.grad(
        (y * direction).sum(), [t for block in leaves for t in block if t is not None]
    )
    exact = [
        [None if t is None else t.double().requires_grad_() for t in block] for block in weights
    ]
    outputs = []
    for row in range(rows):
        h = x[row % tasks].double()
        for block, (w, b, gamma, beta) in zip(found.blocks, exact, strict=True):
            h = (F.conv2d if dim == 2 else F.conv1d)(h, w[row], b[row], padding=padding)
            scale = (None, None) if gamma is None else (gamma[row], beta[row])
            h = F.batch_norm(h, None, None, *scale, True, 0.0, block.eps)
            h = (F.max_pool2d if dim == 2 else F.max_pool1d)(F.relu(h), 2)
        outputs.append(h)
    want_y = torch.stack(outputs)
    want = torch.autograd.grad(
        (want_y * direction.double()).sum(), [t for block in exact for t in block if t is not None]
    )
    assert (y - want_y).norm() <= 3e-6 * want_y.norm()
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm() + 1e-7


ESTIMATORS = {
    "loss nudge": mn.FOBMAML(nu=0.1),
    "gradient nudge": mn.FOBMAML(nu=0.1, nudge="gradient"),
    "shifted": mn.FOBMAML(nu=0.1, nudge="gradient", start="shifted"),
    "from the solution": mn.FOBMAML(nu=0.1, stencil="forward", start="solution"),
    "FO-MAML": mn.FOMAML(),
    "Reptile": mn.Reptile(),
    "MAML": mn.MAML(),
}


@pytest.mark.parametrize(
    ("name", "learn_lr"), [*((name, None) for name in ESTIMATORS), ("MAML", "step")]
)
def test_a_replay_is_the_meta_step(name, learn_lr):
    """Replays equal the same kernels launched one by one (a learner's first call), and layers run
    by torch up to rounding.
    """
    make = partial(learner, ESTIMATORS[name], learn_lr=learn_lr)
    recorded, plain = make(), make(compile=False)
    for seed in range(4):
        tasks, fresh = batch(seed=10 * seed), make()
        fresh.load_state_dict(recorded.state_dict())
        a, b, c = (
            recorded.meta_gradient(tasks),
            fresh.meta_gradient(tasks),
            plain.meta_gradient(tasks),
        )
        assert torch.allclose(flat(a[0]), flat(b[0]), rtol=0, atol=2e-6 * float(flat(b[0]).norm()))
        assert torch.allclose(flat(a[0]), flat(c[0]), rtol=0, atol=2e-5 * float(flat(c[0]).norm()))
        assert a[1].query_loss == pytest.approx(c[1].query_loss, rel=1e-5)
        with torch.no_grad():  # an optimizer's step: recordings must see it
            for p, q in zip(recorded.parameters(), plain.parameters(), strict=True):
                p.sub_(0.01 * torch.ones_like(p))
                q.sub_(0.01 * torch.ones_like(q))
    assert any(
        not isinstance(known, str) for known in recorded._choice._recorder._known.values()
    ), "nothing was recorded"


@pytest.mark.parametrize(
    "estimator",
    [mn.MAML(), mn.IMAML(cg_steps=3), mn.FOBMAML(stencil="tangent")],
    ids=lambda one: type(one).__name__,
)
def test_second_derivatives_equal_those_of_the_general_path_on_a_cpu(estimator, monkeypatch):
    tasks, ours = batch(dtype=torch.float64), learner(estimator, torch.float64)
    # as it is, recorded, replayed
    found = [flat(ours.meta_gradient(tasks)[0]).cpu() for _ in range(4)]
    general = learner(estimator, torch.float64)
    general.model.cpu()
    monkeypatch.setattr("metanudge.engines.stacked._registered", [])
    exact = flat(general.meta_gradient(tasks.to("cpu"))[0])
    for gradient in found:
        assert float((gradient - exact).norm()) <= 1e-11 * float(exact.norm())


SECOND_ORDER = {
    "MAML": mn.MAML(),
    "iMAML": mn.IMAML(cg_steps=3),
    "tangent": mn.FOBMAML(stencil="tangent"),
}


@pytest.mark.parametrize("name", SECOND_ORDER)
@pytest.mark.parametrize("bound", [None, 20_000])
def test_second_derivatives_through_fused_blocks(name, bound, monkeypatch):
    """In float32 blocks run fused; also where their activations are too many for one kernel.

    Both paths round each product and sum to float32, in other orders: their errors are two draws
    of one size, with the problem's own conditioning (conjugate gradients') in both.
    """
    from metanudge.accel.trunk import tail

    if bound is not None:
        monkeypatch.setattr(tail, "_MOST", bound)
    ours = learner(SECOND_ORDER[name])
    exact = flat(
        learner(SECOND_ORDER[name], torch.float64).meta_gradient(batch(dtype=torch.float64))[0]
    )
    found = [flat(ours.meta_gradient(batch())[0]) for _ in range(4)]
    monkeypatch.setattr("metanudge.engines.stacked._registered", [])
    general = flat(learner(SECOND_ORDER[name]).meta_gradient(batch())[0])
    least = torch.finfo(torch.float32).eps * float(exact.norm())
    for gradient in found:
        error = float((gradient - exact).norm())
        assert error <= 4 * max(float((general - exact).norm()), least)


@pytest.mark.parametrize(
    "shape", [(3, 20, 6, 7), (2, 128, 4, 4), (5, 64, 3, 2), (25, 2048, 14, 14)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_norm_relu_and_pooling_as_one_operation(shape, dtype):
    from metanudge.accel.trunk.tail import normalise_and_pool

    torch.manual_seed(0)
    z, gamma, beta = (torch.randn(size, device="cuda") for size in (shape, shape[1], shape[1]))
    gamma[1], z = 0.0, z.to(dtype)

    def layers(z: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
        return F.max_pool2d(F.relu(F.batch_norm(z, None, None, gamma, beta, True, 0.0, eps)), 2)

    def derivatives(run, *leaves: Tensor) -> list[Tensor]:
        leaves = tuple(leaf.detach().requires_grad_() for leaf in leaves)
        y = run(*leaves, 1e-5)
        torch.manual_seed(1)
        outer = torch.randn(y.shape, device="cuda").to(y.dtype)
        first = torch.autograd.grad((y.square() * outer).sum(), leaves, create_graph=True)
        along = [torch.randn(g.shape, device="cuda").to(g.dtype) for g in first]
        return [y, *first, *torch.autograd.grad(first, leaves, along)]

    exact = derivatives(layers, z.double(), gamma.double(), beta.double())
    for a, b in zip(derivatives(normalise_and_pool, z, gamma, beta), exact, strict=True):
        assert (a - b).norm() <= (2e-6 if dtype == torch.float32 else 3e-2) * b.norm()


def test_what_draws_random_numbers_is_not_recorded():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(784, 16), nn.Dropout(0.5), nn.Linear(16, 5)
    ).cuda()
    learner = mn.MetaLearner(model, CE, engine="stacked")
    losses = {learner.meta_gradient(batch(), seed=seed)[1].query_loss for seed in range(4)}
    assert len(losses) == 4
    assert set(learner._choice._recorder._known.values()) == {"as it is"}


def test_another_mode_or_shape_is_another_recording():
    lr = learner(mn.FOBMAML(nudge="gradient"))
    for _ in range(3):
        training = flat(lr.meta_gradient(batch())[0])
    lr.model.eval()
    for _ in range(3):
        evaluating = flat(lr.meta_gradient(batch())[0])
    assert not torch.allclose(training, evaluating)
    lr.model.train()
    assert torch.equal(flat(lr.meta_gradient(batch())[0]), training)
    assert lr.meta_gradient(batch(tasks=6))[1].tasks == 6


def test_a_nan_is_told_and_forgotten():
    lr = learner(mn.FOBMAML())
    good = [flat(lr.meta_gradient(batch())[0]) for _ in range(3)][-1]
    bad = batch()
    bad.stacks[0].support[0][2, 0] = float("nan")
    with pytest.raises(mn.NonFiniteError, match="task 2"):
        lr.backward(bad)
    assert all(p.grad is None for p in lr.model.parameters())
    assert torch.equal(flat(lr.meta_gradient(batch())[0]), good)


@pytest.mark.parametrize("mode", ["tf32", "bf16"])
@pytest.mark.parametrize("name", ["loss nudge", "gradient nudge", "FO-MAML", "MAML"])
def test_precision_is_no_worse_than_layer_by_layer(mode, name, monkeypatch):
    """Rounding moves choices of ReLU and max-pooling, so the error of one meta-gradient is a matter
    of luck: many are averaged.
    """
    torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("high")
    draws = range(0, 24, 2)
    exact = [
        flat(
            learner(ESTIMATORS[name], torch.float64).meta_gradient(
                batch(8, dtype=torch.float64, seed=seed)
            )[0]
        )
        for seed in draws
    ]

    def error() -> float:
        recorded = learner(ESTIMATORS[name])
        with (
            torch.autocast("cuda", torch.bfloat16, cache_enabled=False)
            if mode == "bf16"
            else contextlib.nullcontext()
        ):
            found = [flat(recorded.meta_gradient(batch(8, seed=seed))[0]) for seed in draws]
        return (
            sum(float((a - b).norm() / b.norm()) ** 2 for a, b in zip(found, exact, strict=True))
            ** 0.5
        )

    ours = error()
    monkeypatch.setattr(chain, "trunk_for", lambda *_: None)
    monkeypatch.setattr(chain.Chain, "_has_head", lambda *_: False)
    assert ours <= 1.25 * error()


@pytest.mark.parametrize(
    ("rows", "examples", "features", "classes"), [(3, 5, 16, 5), (2, 40, 70, 20), (4, 75, 64, 5)]
)
@pytest.mark.parametrize("has_bias", [True, False])
def test_the_head_equals_linear_layer_and_cross_entropy(
    rows, examples, features, classes, has_bias
):
    from metanudge.accel.head import cross_entropy

    torch.manual_seed(0)
    x, weight, bias, outer = (
        torch.randn(size, device="cuda")
        for size in ((rows, examples, features), (rows, classes, features), (rows, classes), rows)
    )
    targets = torch.randint(0, classes, (rows, examples), device="cuda")
    targets[:, ::3] = -100
    leaves = [
        leaf.clone().requires_grad_() for leaf in ((x, weight, bias) if has_bias else (x, weight))
    ]
    places = torch.zeros(rows, classes * (features + 1) + 3, device="cuda")
    into = (
        places[:, : classes * features].view(rows, classes, features),
        places[:, classes * features : -3],
    )
    losses = cross_entropy(leaves[0], leaves[1], leaves[2] if has_bias else None, targets, into)
    got = torch.autograd.grad(losses, leaves, outer)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    outputs = exact[0] @ exact[1].transpose(1, 2) + (exact[2].unsqueeze(1) if has_bias else 0)
    want_losses = torch.stack([CE(outputs[row], targets[row]) for row in range(rows)])
    want = torch.autograd.grad(want_losses, exact, outer.double())
    assert torch.allclose(losses.double(), want_losses, rtol=1e-5)
    for a, b in zip(got, want, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm()
    assert got[1].data_ptr() == into[0].data_ptr()
    assert float(places[:, -3:].abs().max()) == 0
    targets[0, 1] = classes
    assert torch.isnan(cross_entropy(x, weight, None, targets)).tolist() == [True] + [False] * (
        rows - 1
    )
