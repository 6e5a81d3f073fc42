"""Convolution blocks as one operation: the same outputs and derivatives as the layers
themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import metanudge as mn
from metanudge.accel.chain import Chain, losses_of_rows
from metanudge.accel.layers import steps_of_problem
from metanudge.accel.trunk import cpu, first_block, trunk_for
from metanudge.accel.trunk.blocks import BlockWeights, match
from metanudge.accel.trunk.convolution import Columns, Native
from metanudge.objective import Objective

TASKS, NUDGES = 3, 2
CONV = {1: nn.Conv1d, 2: nn.Conv2d}
NORM = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d}
POOL = {1: nn.MaxPool1d, 2: nn.MaxPool2d}


def blocks(
    axes: int, channels: Sequence[int], *, affine: bool = True, **conv: Any
) -> nn.Sequential:
    """Blocks with these numbers of channels, all parameters random."""
    layers: list[nn.Module] = []
    for before, after in pairwise(channels):
        layers += [
            CONV[axes](before, after, **{"kernel_size": 3, "padding": 1} | conv),
            NORM[axes](after, affine=affine),
        ]
        layers += [nn.ReLU(), POOL[axes](2)]
    return nn.Sequential(*layers)


def rows_of(model: nn.Module, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    rows = TASKS * NUDGES
    return {
        n: (
            (p.detach() + 0.5 * torch.randn(rows, *p.shape, generator=g, dtype=torch.float64)).to(
                dtype
            )
        )
        for n, p in model.named_parameters()
    }


def images(shape: Sequence[int], examples: int = 4) -> Tensor:
    return torch.randn(
        TASKS, examples, *shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )


def by_trunk(
    model: nn.Sequential, phi: dict[str, Tensor], x: Tensor, sets: Sequence[int] = ()
) -> tuple[Tensor, list[Tensor]]:
    """Outputs, and the gradient of their weighted sum; examples are one set, or several of these
    sizes.
    """
    found = match(list(model))
    assert found is not None
    assert found.layers == len(model)
    assert found.fits(x)
    trunk = trunk_for(x.device, x.dtype, found.blocks)
    assert trunk is not None
    leaves = {n: leaf.clone().requires_grad_() for n, leaf in phi.items()}
    names = {id(p): n for n, p in model.named_parameters()}

    def of(parameter: Tensor | None) -> Any:
        return None if parameter is None else leaves[names[id(parameter)]]

    own = [
        BlockWeights(of(b.conv.weight), of(b.conv.bias), of(b.norm.weight), of(b.norm.bias))
        for b in found.blocks
    ]
    prepared = (
        trunk.join([trunk.prepare(part) for part in x.split(list(sets), 1)])
        if sets
        else trunk.prepare(x)
    )
    assert prepared is not None
    out = trunk.outputs(prepared, own)
    total = (out * weights_like(out)).sum()
    return out.detach(), list(
        torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    )


def by_layers(
    model: nn.Sequential, phi: dict[str, Tensor], x: Tensor, sets: Sequence[int] = ()
) -> tuple[Tensor, list[Tensor]]:
    """The same from the module itself, one row after the other."""
    modules, outputs = [], []
    for row in range(TASKS * NUDGES):
        modules.append(copy.deepcopy(model))
        for n, p in modules[-1].named_parameters():
            p.data.copy_(phi[n][row])
        outputs.append(
            torch.cat(
                [modules[-1](part) for part in x[row % TASKS].split(list(sets) or x.shape[1])]
            )
        )
    out = torch.stack(outputs)
    parameters = [list(module.parameters()) for module in modules]
    flat = torch.autograd.grad(
        (out * weights_like(out)).sum(), [p for own in parameters for p in own]
    )
    size = len(parameters[0])
    return out.detach(), [torch.stack(flat[i::size]) for i in range(size)]


def weights_like(out: Tensor) -> Tensor:
    return torch.randn(
        out.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    ).to(out.dtype)


def joined(leaves: Sequence[Tensor]) -> Tensor:
    return torch.cat([leaf.flatten().double() for leaf in leaves])


def check(
    model: nn.Sequential,
    x: Tensor,
    phi: dict[str, Tensor] | None = None,
    tol: float = 1e-12,
    sets: Sequence[int] = (),
) -> None:
    model = model.double()
    phi = rows_of(model) if phi is None else phi
    out, gradient = by_trunk(model, phi, x, sets)
    expected, exact = by_layers(model, phi, x, sets)
    assert out.shape == expected.shape
    assert float((out - expected).norm()) <= tol * float(expected.norm())
    total = float(joined(exact).norm())
    assert total > 0
    for (name, _), mine, theirs in zip(model.named_parameters(), gradient, exact, strict=True):
        assert mine.shape == theirs.shape
        assert float((mine - theirs).norm()) <= tol * total, name


# --------------------------------------------------------------------------------- what it computes

SHAPES = {1: [(17,), (24,)], 2: [(16, 17), (17, 18)]}


@pytest.mark.parametrize(("axes", "convolution"), [(1, Columns), (2, Columns), (2, Native)])
@pytest.mark.parametrize("padding", [0, 1, 2])
@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_equals_the_layers(
    axes: int, kernel: int, padding: int, convolution: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cpu, "_convolution", lambda block, *_: convolution(block))
    torch.manual_seed(0)
    for channels, shape in zip(([1, 4, 5], [3, 5, 4]), SHAPES[axes], strict=True):
        check(
            blocks(axes, channels, kernel_size=kernel, padding=padding),
            images((channels[0], *shape)),
        )


@pytest.mark.parametrize(("axes", "convolution"), [(1, Columns), (2, Columns), (2, Native)])
@pytest.mark.parametrize("sets", [(4, 4), (2, 4), (6, 3), (1, 3), (4, 2, 6), (5, 3)])
def test_sets_that_go_together_are_normalised_apart(
    axes: int, sets: tuple[int, ...], convolution: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cpu, "_convolution", lambda block, *_: convolution(block))
    torch.manual_seed(0)
    for channels, shape in zip(([1, 4, 5], [3, 5, 4]), SHAPES[axes], strict=True):
        x = images((channels[0], *shape), sum(sets))
        x[:, : sets[0]] = 3 * x[:, : sets[0]] + 1
        model = blocks(axes, channels)
        check(model, x, sets=sets)
        phi = rows_of(model)
        for n in ("1.weight", "5.weight"):
            phi[n][:, 0], phi[n][1, 1] = -1.0, 0.0
        check(model, x, phi, sets=sets)
    check(
        blocks(axes, [1, 4, 3], affine=False, bias=False),
        images((1, *SHAPES[axes][0]), sum(sets)),
        sets=sets,
    )


def test_many_small_groups_do_not_go_together():
    model = blocks(1, [1, 4]).double()
    found = match(list(model))
    assert found is not None
    trunk = trunk_for(torch.device("cpu"), torch.float64, found.blocks)
    assert trunk is not None
    assert trunk.join([trunk.prepare(images((1, 17), n)) for n in (5, 7)]) is not None
    assert trunk.join([trunk.prepare(images((1, 17), n)) for n in (8, 9)]) is None
    assert trunk.join([trunk.prepare(images((1, n))) for n in (17, 19)]) is None, (
        "of different sizes"
    )


def test_kernels_that_are_not_square():
    torch.manual_seed(0)
    check(blocks(2, [1, 4, 3], kernel_size=(3, 1), padding=(1, 0)), images((1, 9, 12)))
    check(blocks(2, [2, 4, 3], kernel_size=(2, 4), padding=(2, 1)), images((2, 9, 12)))


@pytest.mark.parametrize("padding", ["same", "valid"])
def test_padding_by_name(padding: str):
    torch.manual_seed(0)
    check(blocks(1, [1, 4, 3], padding=padding), images((1, 18)))


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_with_and_without_scale_and_bias(axes: int, affine: bool, bias: bool):
    torch.manual_seed(0)
    check(blocks(axes, [1, 4, 3], affine=affine, bias=bias), images((1, *SHAPES[axes][0])))


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_few_blocks_and_single_examples(axes: int, number: int):
    torch.manual_seed(0)
    model = blocks(axes, [1, 3, 4, 2][: number + 1])
    check(model, images((1, *[8] * axes), examples=1))
    check(model, images((1, *[9] * axes), examples=2))


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("gamma", [-1.0, 0.0])
def test_scales_that_are_not_positive(axes: int, gamma: float):
    """Below zero the smallest entry of a window wins; at zero all are equal, and the first does."""
    torch.manual_seed(0)
    model = blocks(axes, [1, 4, 3])
    phi = rows_of(model)
    for n in ("1.weight", "5.weight"):
        phi[n][:, 0] = gamma
        phi[n][1, 1] = gamma
    check(model, images((1, *SHAPES[axes][0])), phi)


DATA: dict[str, Callable[[Tensor], Tensor]] = {
    "pixels that are alike": lambda x: (x > 0.8).double(),
    "nothing but one number": lambda x: torch.full_like(x, 0.7),
    "far from zero": lambda x: 0.01 * x + 100,
    "zero": torch.zeros_like,
}


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("axes", [1, 2])
def test_difficult_data(axes: int, data: str):
    torch.manual_seed(0)
    # A bias would have torch divide the rounding error of a mean by √ε where nothing varies.
    check(blocks(axes, [1, 4, 3], bias=False), DATA[data](images((1, *SHAPES[axes][0]))))


def test_without_variance():
    """Nothing varies at all: the outputs are relu(β), and no filter has any influence."""
    model = blocks(2, [1, 4, 3], padding=0).double()
    phi = rows_of(model)
    out, gradient = by_trunk(
        model, phi, torch.full((TASKS, 4, 1, 14, 14), 0.7, dtype=torch.float64)
    )
    expected = phi["5.bias"].relu()[:, None, :, None, None].expand_as(out)
    assert torch.allclose(out, expected, rtol=0, atol=1e-12)
    found = dict(zip(dict(model.named_parameters()), gradient, strict=True))
    dbeta = (weights_like(out) * (expected > 0)).sum((1, 3, 4))
    assert torch.allclose(found.pop("5.bias"), dbeta, rtol=1e-12)
    assert all(float(leaf.norm()) <= 1e-8 for leaf in found.values())


def test_biases_before_batchnorm_have_no_gradient():
    model = blocks(1, [1, 4, 3]).double()
    _, gradient = by_trunk(model, rows_of(model), images((1, 17)))
    found = dict(zip(dict(model.named_parameters()), gradient, strict=True))
    assert not found["0.bias"].any()
    assert not found["4.bias"].any()


def test_pieces_do_not_matter(monkeypatch: pytest.MonkeyPatch):
    """Windows in pieces, and made anew in every pass."""
    torch.manual_seed(0)
    for size in (50, 2000):
        monkeypatch.setattr(first_block, "IN_CACHE", size)
        monkeypatch.setattr(first_block, "LARGEST_KEPT", 0)
        check(blocks(2, [3, 4, 3]), images((3, 16, 17)))
        check(blocks(1, [1, 4, 3]), images((1, 17)))


@pytest.mark.parametrize("axes", [1, 2])
def test_float32_is_as_precise_as_the_layers(axes: int):
    torch.manual_seed(0)
    model = blocks(axes, [1, 16, 16, 16])
    x, phi = (
        images((1, *[24] * axes), examples=6),
        {n: leaf.float().double() for n, leaf in rows_of(model).items()},
    )
    for shift in (0.0, 30.0):
        data = (x + shift).float()
        exact = by_layers(model.double(), phi, data.double())
        model.float()
        single = {n: leaf.float() for n, leaf in phi.items()}
        errors = [
            [
                float((joined([a]) - joined([b])).norm() / joined([b]).norm())
                for a, b in zip((out, joined(g)), (exact[0], joined(exact[1])), strict=True)
            ]
            for out, g in (by_trunk(model, single, data), by_layers(model, single, data))
        ]
        for ours, theirs in zip(*errors, strict=True):
            assert ours <= 1.5 * theirs, errors


def test_nan_stays_nan():
    model = blocks(1, [1, 4, 3]).double()
    x = images((1, 17))
    x[0, 0, 0, 3] = float("nan")
    out, _ = by_trunk(model, rows_of(model), x)
    by_task = out.unflatten(0, (NUDGES, TASKS))
    assert by_task[:, 0].isnan().all()
    assert by_task[:, 1:].isfinite().all()


def test_one_backward_pass_only():
    model = blocks(1, [1, 4, 3]).double()
    found = match(list(model))
    assert found is not None
    trunk = cpu.CPUTrunk(found.blocks)
    phi = {n: leaf.requires_grad_() for n, leaf in rows_of(model).items()}
    own = [
        BlockWeights(*(phi[f"{i}.{n}"] for i in (at, at + 1) for n in ("weight", "bias")))
        for at in (0, 4)
    ]
    out = trunk.outputs(trunk.prepare(images((1, 17))), own).sum()
    torch.autograd.grad(out, list(phi.values()), retain_graph=True, allow_unused=True)
    with pytest.raises(AssertionError, match="second backward pass"):
        torch.autograd.grad(out, list(phi.values()), allow_unused=True)


# ------------------------------------------------------------------------------------ where it runs


def block(**changes: nn.Module) -> list[nn.Module]:
    layers = {
        "conv": nn.Conv1d(1, 4, 3),
        "norm": nn.BatchNorm1d(4),
        "relu": nn.ReLU(),
        "pool": nn.MaxPool1d(2),
    }
    return list((layers | changes).values())


@pytest.mark.parametrize(
    "changes",
    [
        {"conv": nn.Conv1d(1, 4, 3, stride=2)},
        {"conv": nn.Conv1d(1, 4, 3, dilation=2)},
        {"conv": nn.Conv1d(4, 4, 3, groups=2)},
        {"conv": nn.Conv1d(1, 4, 3, padding=1, padding_mode="circular")},
        {"conv": nn.Conv1d(1, 4, 2, padding="same")},
        {"norm": nn.BatchNorm1d(4).eval()},
        {"norm": nn.InstanceNorm1d(4)},
        {"relu": nn.LeakyReLU()},
        {"pool": nn.MaxPool1d(3)},
        {"pool": nn.MaxPool1d(2, stride=1)},
        {"pool": nn.MaxPool1d(2, ceil_mode=True)},
        {"pool": nn.AvgPool1d(2)},
    ],
    ids=str,
)
def test_other_layers_are_no_blocks(changes: dict[str, nn.Module]):
    assert match(block()) is not None
    assert match(block(**changes)) is None
    both = match([*block(), *block(conv=nn.Conv1d(4, 4, 3)), *block(**changes), nn.Flatten()])
    assert both is not None
    assert both.layers == 8


def test_statistics_kept_by_nobody_are_the_batchs():
    assert match(block(norm=nn.BatchNorm1d(4, track_running_stats=False).eval())) is not None


def test_inputs_that_do_not_fit_are_left_to_torch():
    found = match(blocks(2, [1, 4, 4]))
    assert found is not None
    assert found.fits(torch.zeros(2, 3, 1, 4, 4))
    for shape in ((2, 3, 1, 3, 8), (2, 3, 2, 8, 8), (2, 3, 8, 8)):
        assert not found.fits(torch.zeros(shape))
    assert not found.fits(torch.zeros(2, 3, 1, 8, 8, dtype=torch.float64))


def test_autocast_and_half_precision_run_layer_by_layer():
    found = match(blocks(1, [1, 4, 4]))
    assert found is not None
    device = torch.device("cpu")
    assert trunk_for(device, torch.bfloat16, found.blocks) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert trunk_for(device, torch.float32, found.blocks) is None
    wide = match(blocks(2, [64, 4]))
    assert wide is not None
    assert trunk_for(device, torch.float32, wide.blocks) is None, (
        "windows too large for a covariance"
    )


def meta_gradient(model: nn.Module, tasks: mn.TaskBatch, estimator: Any, **options: Any) -> Tensor:
    solver = mn.GradientDescent(lr=0.05, steps=2)
    learner = mn.MetaLearner(
        model, F.cross_entropy, solver=solver, estimator=estimator, engine="stacked", **options
    )
    gradient, _ = learner.meta_gradient(tasks)
    return joined(list(gradient.values()))


@pytest.mark.parametrize(
    "estimator",
    [mn.FOBMAML(), mn.FOBMAML(nudge="gradient", stencil="five-point"), mn.FOMAML()],
    ids=str,
)
def test_meta_gradients_do_not_depend_on_portions(estimator: Any, monkeypatch: pytest.MonkeyPatch):
    """All rows at once, a few, one; chunks; layer by layer."""
    torch.manual_seed(0)
    model = mn.models.Conv4(ways=3, channels=4, image_size=16).double()
    g = torch.Generator().manual_seed(1)
    x, xq = (torch.randn(3, n, 1, 16, 16, generator=g, dtype=torch.float64) for n in (3, 5))
    y, yq = (torch.randint(0, 3, (3, n), generator=g) for n in (3, 5))
    tasks = mn.TaskBatch((x, y), (xq, yq))
    whole = meta_gradient(model, tasks, estimator)
    results = [meta_gradient(model, tasks, estimator, chunk=2)]
    for held in (1, 1 << 17):
        monkeypatch.setattr(cpu, "HELD", held)
        results.append(meta_gradient(model, tasks, estimator))
    monkeypatch.setattr("metanudge.accel.chain.match", lambda layers: None)
    results.append(meta_gradient(model, tasks, estimator))
    for result in results:
        assert float((result - whole).norm()) <= 1e-12 * float(whole.norm())


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How gradients were evaluated, in order: of both sets together, or of one."""
    seen: list[str] = []
    both, one = Chain.losses_of_sets, Chain.losses

    def of_both(self: Chain, *args: Any) -> Tensor:
        seen.append("both")
        return both(self, *args)

    def of_one(self: Chain, *args: Any) -> Tensor:
        seen.append("one")
        return one(self, *args)

    monkeypatch.setattr(Chain, "losses_of_sets", of_both)
    monkeypatch.setattr(Chain, "losses", of_one)
    return seen


def few_shot_tasks(ignored: bool = False) -> mn.TaskBatch:
    g = torch.Generator().manual_seed(1)
    x, xq = (torch.randn(3, n, 1, 16, 16, generator=g, dtype=torch.float64) for n in (3, 6))
    y, yq = (torch.randint(0, 3, (3, n), generator=g) for n in (3, 6))
    if ignored:
        y[0, 0], yq[1, :4] = -100, -100
    return mn.TaskBatch((x, y), (xq, yq))


@pytest.mark.parametrize("ignored", [False, True])
@pytest.mark.parametrize("stencil", ["forward", "symmetric", "five-point"])
def test_support_and_query_together_are_what_they_are_apart(
    stencil: Any, ignored: bool, evaluated: list[str], monkeypatch: pytest.MonkeyPatch
):
    torch.manual_seed(0)
    model = mn.models.Conv4(ways=3, channels=4, image_size=16).double()
    estimator = mn.FOBMAML(nudge="loss", stencil=stencil, nu=0.1)
    together = meta_gradient(model, few_shot_tasks(ignored), estimator)
    assert "both" in evaluated
    evaluated.clear()
    monkeypatch.setattr(Chain, "join", lambda self, *args: None)
    apart = meta_gradient(model, few_shot_tasks(ignored), estimator)
    assert "both" not in evaluated
    assert float((together - apart).norm()) <= 1e-10 * float(apart.norm())


def smooth(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, label_smoothing=0.1)


def test_sets_are_kept_apart_where_examples_meet_elsewhere(evaluated: list[str]):
    def run(model: nn.Module, loss: Any = F.cross_entropy, **solver: Any) -> list[str]:
        evaluated.clear()
        solver = {"lr": 0.05, "steps": 2} | solver
        estimator = mn.FOBMAML(nudge="loss", nu=0.1)
        learner = mn.MetaLearner(
            model.double(),
            loss,
            solver=mn.GradientDescent(**solver),
            estimator=estimator,
            engine="stacked",
        )
        learner.meta_gradient(few_shot_tasks())
        return evaluated

    torch.manual_seed(0)
    features = [*blocks(2, [1, 4, 4]), nn.Flatten(), nn.Linear(64, 8)]
    assert "both" in run(nn.Sequential(*features, nn.ReLU(), nn.Linear(8, 3)))
    assert "both" not in run(nn.Sequential(*features, nn.BatchNorm1d(8), nn.Linear(8, 3)))
    assert "both" not in run(nn.Sequential(*features, nn.ReLU(), nn.Linear(8, 3)), smooth), (
        "it may look at all examples"
    )
    assert "both" not in run(nn.Sequential(*features, nn.ReLU(), nn.Linear(8, 3)), batch_size=2)


def test_the_engine_for_a_model_that_begins_with_blocks():
    x, y = torch.zeros(2, 5, 1, 28, 28), torch.arange(5).repeat(2, 1)
    tasks = mn.TaskBatch((x, y), (x, y))

    def chosen(model: nn.Module, **options: Any) -> str:
        return mn.MetaLearner(model, F.cross_entropy, **options).choose_engine(tasks)[0].name

    model = mn.models.Conv4(ways=5)
    assert chosen(model) == "stacked"
    assert chosen(model, estimator=mn.IMAML()) == "stacked", (
        "second derivatives run layer by layer, but side by side"
    )
    assert chosen(mn.models.Conv4(ways=5).eval()) == "inplace", "statistics of another data set"
    assert chosen(mn.models.MLP(784, 5, hidden=(200, 40))) == "inplace"
    assert chosen(nn.Sequential(model, nn.Identity()).to(torch.bfloat16)) == "inplace"


# ----------------------------------------------------------------------------- the loss of all rows


@pytest.mark.parametrize("ignored", [False, True])
def test_cross_entropy_of_all_rows(ignored: bool):
    """torch leaves examples with the label −100 out of the mean."""
    objective = Objective(nn.Identity(), F.cross_entropy)
    g = torch.Generator().manual_seed(0)
    outputs = torch.randn(4, 6, 3, generator=g, dtype=torch.float64)
    targets = torch.randint(0, 3, (4, 6), generator=g)
    if ignored:
        targets[1, :4] = -100
    losses = losses_of_rows(objective)(outputs, targets)
    expected = torch.stack([F.cross_entropy(o, t) for o, t in zip(outputs, targets, strict=True)])
    assert torch.allclose(losses, expected, rtol=1e-14)
    probabilities = outputs.softmax(-1)
    losses = losses_of_rows(objective)(outputs, probabilities)
    assert torch.allclose(
        losses,
        torch.stack([F.cross_entropy(o, t) for o, t in zip(outputs, probabilities, strict=True)]),
        rtol=1e-14,
    )


def test_chains_say_whether_they_run_a_trunk():
    problem = mn.MetaLearner(mn.models.Conv1D(), F.cross_entropy).problem()
    chain = Chain(problem, steps_of_problem(problem))
    assert chain.why_no_blocks(torch.zeros(2, 5, 40)) is None
    assert chain.why_no_blocks(torch.zeros(2, 5, 7)) is not None
