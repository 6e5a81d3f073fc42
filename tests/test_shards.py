"""Parameters sharded over ranks (FSDP2, tensor parallelism): the meta-gradient and the statistics
of one process, and nothing goes wrong silently.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional as F

import metanudge as mn
from problems import transformer
from ranks import on_ranks

pytestmark = pytest.mark.timeout(600)  # ranks that wait for each other are slow on a busy machine

# Sums of a few hundred terms of order one, in another order (1e-16 each), divided by ν or ε: 2e-14
# are seen. Times K steps and two nudges there is room for a factor of a hundred.
CLOSE = 1e-11

GD = mn.GradientDescent(lr=0.1, steps=2)
ADAM = mn.TorchOptimizer(torch.optim.Adam, steps=2, options={"lr": 0.05})
CASES: dict[str, dict[str, Any]] = {
    "loss nudge": {"estimator": mn.FOBMAML(nu=0.05)},
    "gradient nudge": {"estimator": mn.FOBMAML(nu=0.05, nudge="gradient", start="shifted")},
    "automatic ν": {
        "estimator": mn.FOBMAML(nudge="gradient"),
        "solver": mn.GradientDescent(lr=0.1, steps=1),
    },
    "automatic ε": {
        "estimator": mn.MAML(products="difference"),
        "solver": mn.GradientDescent(lr=0.1, steps=1),
    },
    "FO-MAML": {"estimator": mn.FOMAML()},
    "Reptile": {"estimator": mn.Reptile()},
    "MAML": {"estimator": mn.MAML(products="difference", epsilon=1e-4)},
    "Adam": {"estimator": mn.FOBMAML(nu=0.05), "solver": ADAM},
    "MAML, Adam": {"estimator": mn.MAML(products="difference", epsilon=1e-4), "solver": ADAM},
    "tolerance": {
        "estimator": mn.FOBMAML(nu=0.05),
        "solver": mn.Nesterov(lr=0.1, steps=5, tol=0.3),
    },
    "minibatches": {
        "estimator": mn.FOMAML(),
        "solver": mn.GradientDescent(lr=0.1, steps=2, batch_size=4),
    },
    "scalar λ": {"estimator": mn.FOBMAML(nu=0.05), "learn_lam": "scalar"},
    "λ per tensor": {
        "estimator": mn.MAML(products="difference", epsilon=1e-4),
        "learn_lam": "tensor",
    },
    "learned rates": {
        "estimator": mn.MAML(products="difference", epsilon=1e-4),
        "learn_lr": "tensor",
    },
    "fixed λ per entry": {"estimator": mn.FOBMAML(nu=0.05, unshrink=True), "lam": "entries"},
    "shared layers": {"estimator": mn.FOBMAML(nu=0.05), "adapt": "4.*"},
    "shared, MAML": {"estimator": mn.MAML(products="difference", epsilon=1e-4), "adapt": "4.*"},
    "evolution": {"estimator": mn.ESMAML(samples=2)},
    "frozen layer": {"estimator": mn.FOBMAML(nu=0.05, nudge="gradient")},
}


def perceptron(name: str = "") -> nn.Sequential:
    """With dropout, and with a last layer that has fewer rows than there are ranks."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 6), nn.Dropout(0.2), nn.Linear(6, 3)
        layers[0].requires_grad_(name != "frozen layer")
        return nn.Sequential(*layers).double()


def tasks(count: int = 3) -> mn.TaskBatch:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 8, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (count, 8), generator=generator)
    return mn.TaskBatch(support=(x, y), query=(0.7 * x.flip(1), y.flip(1)))


def learner_of(model: nn.Module, engine: Any = "auto", **options: Any) -> mn.MetaLearner:
    if options.get("lam") == "entries":
        options["lam"] = {
            n: 1 + torch.arange(p.numel(), dtype=torch.float64).view(p.shape) / p.numel()
            for n, p in model.named_parameters()
        }
    options = {"solver": GD, **options}
    return mn.MetaLearner(model, reported, engine=engine, **options)


def reported(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return F.cross_entropy(output, target), {"highest": output.max()}


def full(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


Found = tuple[dict[str, Tensor], mn.Stats]


def found(learner: mn.MetaLearner, count: int = 2, **options: Any) -> Found:
    stats = learner.backward(tasks(count), seed=5, **options)
    return {n: full(p.grad) for n, p in learner.named_parameters() if p.requires_grad}, stats


def expected(name: str, count: int) -> Found:
    """In one process, on the same engine."""
    return found(learner_of(perceptron(name), "inplace", **CASES[name]), count)


def assert_alike(name: str, own: Found, reference: Found) -> None:
    for key, leaf in reference[0].items():
        assert float((own[0][key] - leaf).abs().max()) < CLOSE, (name, key)
    assert own[1].engine == "inplace"
    assert "spread over" in own[1].path
    for key, value in dataclasses.asdict(reference[1]).items():
        other = getattr(own[1], key)
        if isinstance(value, (float, dict)):
            assert other == pytest.approx(value, rel=1e-9, abs=1e-10, nan_ok=True), (name, key)
        else:
            assert key == "path" or other == value, (name, key)


def every_case(tasks_by: int, count: int, names: list[str]) -> dict[str, Found]:
    """Some cases on a mesh of tasks × shards."""
    world = torch.distributed.get_world_size()
    axes = ("tasks", "shards")
    mesh = init_device_mesh("cpu", (tasks_by, world // tasks_by), mesh_dim_names=axes)
    over = {"over": mesh["tasks"]} if tasks_by > 1 else {}
    results = {}
    for name in names:
        model = perceptron(name)
        fully_shard(model[0], mesh=mesh["shards"])
        fully_shard(model, mesh=mesh["shards"])
        with torch.no_grad():
            model(tasks().stacks[0].support[0][0])  # leaves gathered parameters behind
        before = [full(p).clone() for p in learner_of(model).model.parameters()]
        results[name] = found(learner_of(model, **CASES[name]), count, **over)
        after = [full(p) for p in model.parameters()]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), name
    return results


MAIN = ["loss nudge", "gradient nudge", "FO-MAML", "Reptile", "MAML", "λ per tensor"]
# ranks, of which so many for the tasks, so many tasks (not the same number for all)
LAYOUTS = {"2": (2, 1, 2, [*CASES]), "4": (4, 1, 2, MAIN), "2x2": (4, 2, 3, MAIN)}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_estimator_equals_one_process(layout: str) -> None:
    world, tasks_by, count, names = LAYOUTS[layout]
    ranks = on_ranks(world, every_case, tasks_by, count, names)
    for name in names:
        reference = expected(name, count)
        for rank in ranks:
            assert_alike(name, rank[name], reference)
            assert str(rank[name][1]) == str(ranks[0][name][1])


def sharded(model: nn.Sequential | None = None, **options: Any) -> nn.Module:
    model = perceptron() if model is None else model
    fully_shard(model[0], **options)
    return fully_shard(model, **options)


def refused(kind: type[Exception], call: Any) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("it was not refused")


def in_use() -> dict[str, Any]:
    """Training, evaluating, failing and going on; on every rank."""
    rank = torch.distributed.get_rank()
    results: dict[str, Any] = {}
    learner = learner_of(sharded(), learn_lam="scalar", estimator=mn.FOBMAML(nu=0.05))
    optimizer = torch.optim.Adam(learner.parameter_groups(lr=0.05))
    for step in range(3):
        if step == 1:
            results["refused"] = refusals(learner, rank)
            fail_in_the_middle(learner)
        learner.backward(tasks())
        learner.backward(tasks())  # adds up
        optimizer.step()
        optimizer.zero_grad()
    results["trained"] = [full(p).detach() for p in learner.parameters()]
    results["evaluated"] = learner.evaluate(tasks())
    learner(tasks(), seed=1).backward()
    results["by autograd"] = [full(p.grad) for p in learner.parameters()]
    results["adapted"] = adapting(learner)
    results["λ"] = learner_of(sharded(), lam="entries").stiffness()["0.weight"].full_tensor()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    coarse = learner_of(sharded(perceptron().float(), mp_policy=policy), estimator=mn.FOMAML())
    results["bfloat16"] = [
        full(g) for g in coarse.meta_gradient(tasks().to(torch.float32))[0].values()
    ]
    return results


def adapting(learner: mn.MetaLearner) -> dict[str, Any]:
    """What one user's support set makes of a model: within the block, as a state that is loaded,
    and what is there afterwards.
    """
    support, (x, _) = tasks()[0].support, tasks()[0].query
    model, results = learner.model.eval(), {}
    before = [full(p).clone() for p in model.parameters()]
    with learner.adapted(support, seed=3) as inside:
        results["within"] = full(inside(x)).detach()
    assert all(torch.equal(full(p), b) for p, b in zip(model.parameters(), before, strict=True))
    state = learner.adapted_state(support, seed=3)
    results["spread"] = {isinstance(leaf, DTensor) for leaf in state.values()}
    results["state"] = torch.cat([full(leaf).flatten() for leaf in state.values()])
    model.load_state_dict(state, strict=False)
    results["loaded"] = full(model(x)).detach()
    return results


def refusals(learner: mn.MetaLearner, rank: int) -> dict[str, str]:
    model = sharded()
    told = {
        "other tasks": refused(ValueError, lambda: learner.backward(tasks(2 + rank)[-2:])),
        "adapt": refused(TypeError, lambda: learner.adapt(tasks()[0].support)),
        "stacked": refused(mn.StackingError, lambda: found(learner_of(model, "stacked"))),
        "operator": refused(TypeError, lambda: learner_of(model, lam=lambda d: d)),
        "regulariser": refused(
            TypeError, lambda: learner_of(model, regulariser=lambda phi, theta: phi["0.bias"].sum())
        ),
        "λ per entry": refused(ValueError, lambda: learner_of(model, learn_lam="parameter")),
        "rate per entry": refused(ValueError, lambda: learner_of(model, learn_lr="parameter")),
        "two axes": refused(TypeError, lambda: learner.backward(tasks(), over="tasks")),
        "few tasks": refused(
            ValueError, lambda: learner.backward(tasks(1), over=torch.distributed.group.WORLD)
        ),
    }
    for name, options in {
        "Exact": {"estimator": mn.Exact()},
        "IMAML": {"estimator": mn.IMAML()},
        "autograd": {"estimator": mn.MAML(products="autograd")},
        "L-BFGS": {"solver": mn.LBFGS()},
        "Adafactor": {"solver": mn.TorchOptimizer(torch.optim.Adafactor, steps=1)},
    }.items():
        kind = mn.StackingError if name == "Exact" else TypeError
        told[name] = refused(kind, lambda: found(learner_of(model, **options)))  # noqa: B023
    model.set_gradient_divide_factor(1.0)
    told["factor"] = refused(ValueError, lambda: found(learner_of(model)))
    model.set_gradient_divide_factor(2.0)
    model.set_requires_gradient_sync(False)
    told["no gradients"] = refused(ValueError, lambda: found(learner_of(model)))
    both = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards"))
    told["HSDP"] = refused(TypeError, lambda: learner_of(sharded(mesh=both)))
    return told


def fail_in_the_middle(learner: mn.MetaLearner) -> None:
    """A model that raises in its third forward pass, and is used again."""
    calls = []

    def raise_once(*_: Any) -> None:
        calls.append(None)
        if len(calls) == 3:
            raise ZeroDivisionError("on purpose")

    handle = learner.model[4].register_forward_pre_hook(raise_once)  # type: ignore[index,operator]
    refused(ZeroDivisionError, lambda: learner.backward(tasks()))
    handle.remove()


def test_it_trains_evaluates_and_refuses_like_one_process() -> None:
    first, second = on_ranks(2, in_use)
    learner = learner_of(perceptron(), "inplace", learn_lam="scalar", estimator=mn.FOBMAML(nu=0.05))
    optimizer = torch.optim.Adam(learner.parameter_groups(lr=0.05))
    for step in range(3):
        learner.calls = 2 * step
        learner.backward(tasks())
        learner.backward(tasks())
        optimizer.step()
        optimizer.zero_grad()
    trained = [p.detach().clone() for p in learner.parameters()]
    evaluated = learner.evaluate(tasks())
    learner(tasks(), seed=1).backward()
    gradients = [full(p.grad) for p in learner.parameters()]
    adapted = adapting(learner)
    assert adapted.pop("spread") == {False}
    for rank in (first, second):
        # Adam divides gradients by their size: 1e-14 of noise in 1e-4, three times
        for own, one in zip(rank["trained"], trained, strict=True):
            torch.testing.assert_close(own, one, rtol=0, atol=1e-9)
        torch.testing.assert_close(rank["evaluated"].loss, evaluated.loss, rtol=0, atol=1e-8)
        for own, one in zip(rank["by autograd"], gradients, strict=True):
            torch.testing.assert_close(own, one, rtol=0, atol=1e-8)
        assert rank["adapted"].pop("spread") == {True}
        for name, one in adapted.items():  # from parameters 1e-9 apart, see above
            torch.testing.assert_close(rank["adapted"][name], one, rtol=0, atol=1e-8)
        torch.testing.assert_close(rank["λ"][0, :2], torch.tensor([1, 1 + 1 / 35]).double())
        told = rank["refused"]
        for name, part in {
            "other tasks": "different tasks",
            "adapt": "learner.adapted(support)",
            "stacked": 'engine="stacked"',
            "Exact": "Exact needs the stacked engine",
            "IMAML": "no Hessian products by autograd",
            "autograd": 'MAML(products="difference")',
            "L-BFGS": "LBFGS looks at whole tensors",
            "Adafactor": "TorchOptimizer with Adafactor",
            "operator": "lam as an operator",
            "regulariser": "a regulariser",
            "λ per entry": 'learn_lam="tensor"',
            "rate per entry": 'learn_lr="tensor"',
            "two axes": "got 'tasks'",
            "few tasks": "1 tasks cannot be split over 2 ranks",
            "factor": "set_gradient_divide_factor(1)",
            "no gradients": "set_requires_gradient_sync(False)",
            "HSDP": "mesh=mesh['shards']",
        }.items():
            assert part in told.pop(name), name
        assert not told
    exact = learner_of(perceptron().float(), estimator=mn.FOMAML()).meta_gradient(
        tasks().to(torch.float32)
    )[0]
    cosine = F.cosine_similarity(
        torch.cat([leaf.flatten() for leaf in first["bfloat16"]]),
        torch.cat([leaf.flatten() for leaf in exact.values()]),
        dim=0,
    )
    assert float(cosine) > 0.99


def wide_perceptron() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)
        return nn.Sequential(*layers).double()


PARALLEL = ["loss nudge", "MAML", "λ per tensor"]


def tensor_parallel() -> dict[str, Found]:
    """Columns and rows over four ranks, and over two beside two shards; a Transformer on four
    shards.
    """
    results = {}
    for name in PARALLEL:
        for axes in ((4,), (2, 2)):
            model, names = wide_perceptron(), ("shards", "parallel")[-len(axes) :]
            mesh = init_device_mesh("cpu", axes, mesh_dim_names=names)
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(model, mesh["parallel"], plan)
            if len(axes) > 1:
                fully_shard(model, mesh=mesh["shards"])
            results[f"{name} {axes}"] = found(learner_of(model, **CASES[name]))
    setup = transformer(dropout=0.1, tasks=1)
    learner = learner_of(fully_shard(setup.model), estimator=mn.FOBMAML(nu=0.05))
    stats = learner.backward(setup.tasks)
    results["Transformer"] = {n: full(p.grad) for n, p in learner.named_parameters()}, stats
    return results


def test_tensor_parallel_layers_and_a_transformer() -> None:
    ranks = on_ranks(4, tensor_parallel)
    setup = transformer(dropout=0.1, tasks=1)
    learner = learner_of(setup.model, "inplace", estimator=mn.FOBMAML(nu=0.05))
    stats = learner.backward(setup.tasks)
    whole = {n: full(p.grad) for n, p in learner.named_parameters()}, stats
    for rank in ranks:
        assert_alike("Transformer", rank.pop("Transformer"), whole)
        for name, own in rank.items():
            case = CASES[name.rpartition(" (")[0]]
            assert_alike(name, own, found(learner_of(wide_perceptron(), "inplace", **case)))
