"""`MetaLearner`: `.grad` as every torch optimizer, scaler and wrapper expects it, adaptation,
evaluation, choice of engine.
"""

from __future__ import annotations

import copy
import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import metanudge as mn
from conformance import SOLVER, Snapshot, learner_for, rounding
from metanudge.engine_choice import LARGEST_STACKED_ON_CPU
from problems import Setup, classification_tasks, conv_net, mlp, relative_error, seeded

ENGINES = ("stacked", "inplace")


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def values(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters()}


# -------------------------------------------------------------------------------------------- .grad


@pytest.mark.parametrize("engine", ENGINES)
def test_backward_writes_the_meta_gradient(engine: str):
    setup = mlp()
    learner = learner_for(setup, engine=engine)
    expected, expected_stats = learner.meta_gradient(setup.tasks, seed=1)
    before = Snapshot(learner)
    stats = learner.backward(setup.tasks, seed=1)
    assert stats == expected_stats
    assert stats.gradient_norm == pytest.approx(
        float(torch.cat([g.flatten() for g in expected.values()]).norm())
    )
    assert relative_error(grads(setup.model), expected) == 0
    learner.zero_grad()
    before.assert_unchanged()


@pytest.mark.parametrize("engine", ENGINES)
def test_backward_accumulates(engine: str):
    """Twice is double, and what was there before stays in the sum."""
    setup = mlp()
    learner = learner_for(setup, engine=engine)
    expected, _ = learner.meta_gradient(setup.tasks)
    learner.backward(setup.tasks)
    learner.backward(setup.tasks)
    assert relative_error(grads(setup.model), {n: 2 * g for n, g in expected.items()}) < 1e-14
    learner.zero_grad()
    existing = {n: torch.full_like(p, 3.0) for n, p in setup.model.named_parameters()}
    for n, p in setup.model.named_parameters():
        p.grad = existing[n]
    learner.backward(setup.tasks)
    assert relative_error(grads(setup.model), {n: 3.0 + g for n, g in expected.items()}) < 1e-14
    assert all(p.grad is existing[n] for n, p in setup.model.named_parameters()), (
        "added to in place, like loss.backward()"
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_gradient_accumulation_over_parts_of_a_batch(engine: str):
    setup = mlp(tasks=4)
    learner = learner_for(setup, engine=engine)
    learner.backward(setup.tasks)
    whole = grads(setup.model)
    learner.zero_grad()
    for first in (0, 2):
        learner.backward(setup.tasks[first : first + 2])
    assert relative_error({n: g / 2 for n, g in grads(setup.model).items()}, whole) < rounding()


def test_tasks_may_come_as_batch_list_generator_or_one_task():
    setup = mlp()
    learner = learner_for(setup)
    expected, _ = learner.meta_gradient(setup.tasks)
    for tasks in (list(setup.tasks), (task for task in setup.tasks)):
        assert relative_error(learner.meta_gradient(tasks)[0], expected) < 1e-14
    one, stats = learner.meta_gradient(setup.tasks[1])
    assert stats.tasks == 1
    assert relative_error(one, learner.meta_gradient([setup.tasks[1]])[0]) == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_a_training_loop_with_clipping_and_scheduler(engine: str):
    """The user's own loop: what it does by hand with the meta-gradient is what torch does with
    `.grad`.
    """
    setup = mlp()
    learner = learner_for(setup, engine=engine)
    optimizer = torch.optim.SGD(learner.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    largest = 0.05
    for lr in (0.5, 0.25, 0.125):
        theta = values(setup.model)
        g, stats = learner.meta_gradient(setup.tasks)
        assert stats.gradient_norm > largest
        optimizer.zero_grad()
        learner.backward(setup.tasks)
        norm = nn.utils.clip_grad_norm_(learner.parameters(), largest)
        optimizer.step()
        schedule.step()
        assert float(norm) == pytest.approx(stats.gradient_norm, rel=1e-12)
        by_hand = {n: theta[n] - lr * g[n] * largest / stats.gradient_norm for n in g}
        # clip_grad_norm_ adds 1e-6 to the norm
        assert relative_error(values(setup.model), by_hand) < 1e-6


def test_training_takes_the_same_path_on_both_engines():
    losses: dict[str, list[float]] = {}
    ends = {}
    for engine in ENGINES:
        setup = mlp(tasks=4, dropout=0.2)
        learner = learner_for(setup, engine=engine)
        optimizer = torch.optim.Adam(learner.parameters(), lr=0.05)
        losses[engine] = []
        for _ in range(10):
            optimizer.zero_grad()
            losses[engine].append(learner.backward(setup.tasks).query_loss)
            optimizer.step()
        ends[engine] = values(setup.model)
    assert relative_error(ends["stacked"], ends["inplace"]) < 1e-8
    assert losses["stacked"] == pytest.approx(losses["inplace"], rel=1e-8)
    assert losses["stacked"][-1] < losses["stacked"][0]


@pytest.mark.parametrize("engine", ENGINES)
def test_forward_is_a_loss_whose_backward_is_the_meta_gradient(engine: str):
    setup = mlp()
    learner = learner_for(setup, engine=engine)
    expected, stats = learner.meta_gradient(setup.tasks)
    loss = learner(setup.tasks)
    assert loss.shape == ()
    assert loss.requires_grad
    assert loss.item() == pytest.approx(stats.query_loss)
    assert not grads(setup.model), "nothing is written before backward()"
    (3 * loss).backward()
    assert relative_error(grads(setup.model), {n: 3 * g for n, g in expected.items()}) < 1e-14


@pytest.mark.parametrize("engine", ENGINES)
def test_grad_scaler(engine: str):
    setup = mlp()
    learner = learner_for(setup, engine=engine)
    expected, _ = learner.meta_gradient(setup.tasks)
    theta = values(setup.model)
    optimizer = torch.optim.SGD(learner.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(learner(setup.tasks)).backward()
    assert (
        relative_error(grads(setup.model), {n: 1024 * g for n, g in expected.items()}) < rounding()
    )
    scaler.unscale_(optimizer)
    assert relative_error(grads(setup.model), expected) < 1e-6
    scaler.step(optimizer)
    scaler.update()
    assert (
        relative_error(values(setup.model), {n: theta[n] - 0.1 * expected[n] for n in theta}) < 1e-6
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_hooks_on_parameters_see_the_meta_gradient(engine: str):
    """On the stacked engine nothing else reaches them; in place the inner gradients pass by first,
    the last one is the meta-gradient.
    """
    setup = mlp()
    learner = learner_for(setup, engine=engine)
    expected, _ = learner.meta_gradient(setup.tasks)
    weight = setup.model[0].weight
    seen: list[Tensor] = []
    accumulated: list[Tensor] = []
    handles = [
        weight.register_hook(lambda g: seen.append(g.clone())),
        weight.register_post_accumulate_grad_hook(lambda p: accumulated.append(p.grad.clone())),
    ]
    learner.backward(setup.tasks)
    for handle in handles:
        handle.remove()
    if engine == "stacked":
        assert len(seen) == len(accumulated) == 1
    assert torch.equal(seen[-1], expected["0.weight"])
    assert torch.equal(accumulated[-1], expected["0.weight"])


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_grad_is_what_autograd_would_have_written(layout: torch.memory_format):
    """With a hook autograd writes it; without one there is a shorter way. Twice: into nothing, and
    on top of what is there.
    """
    written = []
    for hooked in (True, False):
        setup = conv_net()
        setup.model.to(memory_format=layout)
        if hooked:
            next(setup.model.parameters()).register_hook(lambda g: None)
        learner = learner_for(setup)
        for _ in range(2):
            learner.backward(setup.tasks, seed=0)
        written.append([p.grad for p in setup.model.parameters()])
    for a, b in zip(*written, strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()
        assert a.requires_grad is b.requires_grad is False


def test_hooks_may_change_the_meta_gradient():
    setup = mlp()
    learner = learner_for(setup)
    expected, _ = learner.meta_gradient(setup.tasks)
    setup.model[0].weight.register_hook(lambda g: 2 * g)
    learner.backward(setup.tasks)
    assert torch.equal(setup.model[0].weight.grad, 2 * expected["0.weight"])
    assert torch.equal(setup.model[2].weight.grad, expected["2.weight"])


WORKER = """
    import sys
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from conformance import learner_for
    from problems import mlp

    rank, folder = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    saved = {}
    for engine in ("stacked", "inplace"):
        setup = mlp(tasks=4)
        wrapped = DistributedDataParallel(learner_for(setup, engine=engine))
        mine = setup.tasks[2 * rank : 2 * rank + 2]
        for call in range(2):  # the second one goes through the buckets that DDP has rebuilt
            wrapped.zero_grad()
            wrapped(mine).backward()
        saved[engine] = {n: p.grad.clone() for n, p in setup.model.named_parameters()}
    torch.save(saved, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()
"""


def test_distributed_data_parallel(tmp_path: Path):
    """Two processes with half of the tasks each: both end with the meta-gradient of all of them."""
    root = Path(__file__).parent
    environment = {
        **os.environ,
        "PYTHONPATH": f"{root.parent / 'src'}{os.pathsep}{root}",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-c", textwrap.dedent(WORKER)]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            output, _ = process.communicate(timeout=60)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()
            process.wait()
    setup = mlp(tasks=4)
    whole, _ = learner_for(setup).meta_gradient(setup.tasks)
    for rank in range(2):
        saved = torch.load(tmp_path / f"rank{rank}.pt")
        for engine in ENGINES:
            assert relative_error(saved[engine], whole) < 1e-10, (rank, engine)


# -------------------------------------------------------------------------------------------- adapt


def descend(
    model: nn.Module,
    loss: Any,
    support: Any,
    *,
    lam: float = 2.0,
    solver: mn.GradientDescent = SOLVER,
) -> nn.Module:
    """Gradient descent on the proximal problem, by hand, on a copy."""
    adapted = copy.deepcopy(model)
    theta = values(adapted)
    x, y = support
    for _ in range(solver.steps):
        adapted.zero_grad()
        loss(adapted(x), y).backward()
        with torch.no_grad():
            for n, p in adapted.named_parameters():
                if p.requires_grad:
                    p -= solver.lr * (p.grad + lam * (p - theta[n]))
    return adapted


class Recurrent(nn.Module):
    """A model that only the in-place engine runs."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def recurrent(tasks: int = 3) -> Setup:
    return Setup(
        seeded(0, Recurrent), F.cross_entropy, classification_tasks((4, 3), 3, tasks, 5, 7, 0)
    )


BUILDERS = {"mlp": mlp, "conv_net": conv_net, "lstm": recurrent}


@pytest.mark.parametrize("engine", ["auto", *ENGINES])
@pytest.mark.parametrize("build", BUILDERS)
def test_adapt_is_gradient_descent_on_a_copy(build: str, engine: str):
    """Adaptation works one task at a time whatever the engine, so also where a model cannot be
    stacked.
    """
    setup = BUILDERS[build]()
    support = setup.tasks[1].support
    learner = learner_for(setup, engine=engine)
    before = Snapshot(learner)
    adapted = learner.adapt(support)
    before.assert_unchanged()
    assert type(adapted) is type(setup.model)
    assert adapted.training == setup.model.training
    assert (
        relative_error(values(adapted), values(descend(setup.model, setup.loss, support))) < 1e-12
    )
    own, theirs = set(map(id, adapted.parameters())), set(map(id, setup.model.parameters()))
    assert not own & theirs
    assert all(p.requires_grad and p.grad is None and p.is_leaf for p in adapted.parameters())
    for (n, buffer), (_, kept) in zip(
        adapted.named_buffers(), setup.model.named_buffers(), strict=True
    ):
        assert torch.equal(buffer, kept), f"buffer {n} is that of the model"
    adapted(support[0]).sum().backward()  # an ordinary module: it can be trained on
    before.assert_unchanged()


def test_adapt_takes_another_number_of_steps_and_a_seed():
    setup = mlp(dropout=0.4)
    support = setup.tasks[0].support
    learner = learner_for(setup)
    one, again, other = (values(learner.adapt(support, seed=s)) for s in (0, 0, 1))
    assert relative_error(one, again) == 0
    assert relative_error(one, other) > 1e-3
    plain = mlp()
    longer = learner_for(plain).adapt(support, steps=7)
    by_hand = descend(plain.model, plain.loss, support, solver=mn.GradientDescent(SOLVER.lr, 7))
    assert relative_error(values(longer), values(by_hand)) < 1e-12


def test_adapt_leaves_frozen_parameters_and_copies_flags():
    setup = mlp()
    setup.model[0].weight.requires_grad_(False)
    adapted = learner_for(setup).adapt(setup.tasks[0].support)
    assert torch.equal(adapted[0].weight, setup.model[0].weight)
    assert not adapted[0].weight.requires_grad
    assert not torch.equal(adapted[0].bias, setup.model[0].bias)


def test_adapt_keeps_tied_parameters_tied():
    model = seeded(0, lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)))
    model[2].weight = model[0].weight
    setup = Setup(model, F.cross_entropy, mlp().tasks)
    adapted = learner_for(setup).adapt(setup.tasks[0].support)
    assert adapted[2].weight is adapted[0].weight
    assert (
        relative_error(values(adapted), values(descend(model, setup.loss, setup.tasks[0].support)))
        < 1e-12
    )


def test_adapt_with_a_loss_of_the_model():
    setup = mlp()

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"])

    x, y = setup.tasks[0].support
    adapted = mn.MetaLearner(setup.model, loss, lam=2.0, solver=SOLVER).adapt({"x": x, "y": y})
    assert relative_error(values(adapted), values(descend(setup.model, setup.loss, (x, y)))) < 1e-12


# ----------------------------------------------------------------------------------------- evaluate


@pytest.mark.parametrize("steps", [None, 5])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("build", ["mlp", "conv_net"])
def test_evaluate_is_adapting_and_measuring(build: str, engine: str, steps: int | None):
    setup = BUILDERS[build](tasks=3)
    (x, y), query = setup.tasks[1].support, setup.tasks[1].query
    # one task of another size in the middle
    tasks = [setup.tasks[0], mn.Task((x[1:], y[1:]), query), setup.tasks[2]]
    learner = learner_for(setup, engine=engine)
    before = Snapshot(learner)
    evaluation = learner.evaluate(tasks, steps=steps)
    before.assert_unchanged()
    for i, task in enumerate(tasks):
        x, y = task.query
        adapted = learner.adapt(task.support, steps=steps)
        with torch.no_grad():
            after, start = adapted(x), copy.deepcopy(setup.model)(x)
        assert float(evaluation.loss[i]) == pytest.approx(
            float(F.cross_entropy(after, y)), rel=1e-10
        )
        assert float(evaluation.loss_before[i]) == pytest.approx(
            float(F.cross_entropy(start, y)), rel=1e-10
        )
        assert float(evaluation.accuracy[i]) == pytest.approx(
            float((after.argmax(1) == y).double().mean())
        )
        assert float(evaluation.accuracy_before[i]) == pytest.approx(
            float((start.argmax(1) == y).double().mean())
        )
    assert evaluation.mean_loss == pytest.approx(float(evaluation.loss.mean()))
    assert evaluation.mean_accuracy == pytest.approx(float(evaluation.accuracy.mean()))
    half_width = 1.96 * float(evaluation.accuracy.std()) / 3**0.5
    assert evaluation.accuracy_ci95 == pytest.approx(half_width)
    assert "3 tasks" in str(evaluation)


def test_evaluate_agrees_with_the_statistics_of_backward():
    setup = mlp()
    learner = learner_for(setup, mn.FOMAML())
    stats, evaluation = learner.backward(setup.tasks), learner.evaluate(setup.tasks)
    assert evaluation.mean_loss == pytest.approx(stats.query_loss)
    assert float(evaluation.loss_before.mean()) == pytest.approx(stats.query_loss_before)
    assert evaluation.mean_accuracy == pytest.approx(stats.query_accuracy)


def test_evaluate_of_a_regression_has_no_accuracy():
    x = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    learner = mn.MetaLearner(seeded(0, lambda: nn.Linear(3, 1)), F.mse_loss)
    evaluation = learner.evaluate(mn.TaskBatch((x, x[..., :1]), (x, x[..., :1])))
    assert evaluation.accuracy.isnan().all()
    assert "accuracy" not in str(evaluation)


def test_evaluate_uses_the_mode_of_the_module():
    """In evaluation mode there is no dropout: the result does not depend on the seed."""
    setup = mlp(dropout=0.5)
    learner = learner_for(setup)
    assert not torch.equal(
        learner.evaluate(setup.tasks, seed=0).loss, learner.evaluate(setup.tasks, seed=1).loss
    )
    learner.eval()
    assert torch.equal(
        learner.evaluate(setup.tasks, seed=0).loss, learner.evaluate(setup.tasks, seed=1).loss
    )


# ------------------------------------------------------------------------------------------- engine


def test_auto_picks_an_engine_and_says_why():
    small, large = mlp(), mlp(hidden=LARGEST_STACKED_ON_CPU)

    def choice(setup: Setup, **options: Any) -> tuple[str, str]:
        engine, why = learner_for(
            setup, options.pop("estimator", None), "auto", **options
        ).choose_engine(setup.tasks)
        return engine.name, why

    size = sum(p.numel() for p in small.model.parameters())
    name, why = choice(small)
    assert name == "stacked"
    assert str(size) in why
    assert "CPU" in why
    name, why = choice(large)
    assert name == "inplace"
    assert "CPU" in why
    name, why = choice(large, estimator=mn.MAML(products="unrolled"))
    assert name == "stacked"
    assert "MAML" in why
    assert choice(large, estimator=mn.MAML())[0] == "stacked", "a chain of layers"
    assert choice(large, estimator=mn.MAML(products="difference"))[0] == "inplace"
    name, why = choice(small, solver=mn.LBFGS(steps=5))
    assert name == "inplace"
    assert "LBFGS" in why
    for engine in ENGINES:
        chosen, why = learner_for(small, engine=engine).choose_engine(small.tasks)
        assert (chosen.name, why) == (engine, "as asked")


@pytest.mark.parametrize("engine", ["auto", *ENGINES])
def test_statistics_say_where_it_ran(engine: str):
    setup = mlp()
    stats = learner_for(setup, engine=engine).backward(setup.tasks)
    assert stats.engine == ("stacked" if engine == "auto" else engine)
    assert stats.engine in str(stats)


class Branching(nn.Module):
    """Runs by itself but not under vmap: it looks at its data."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.second(x if x.sum() > 1e9 else 2 * x)


def branching() -> Setup:
    return Setup(seeded(0, Branching), F.cross_entropy, mlp().tasks)


def test_auto_falls_back_to_inplace_and_says_so(caplog: pytest.LogCaptureFixture):
    setup = branching()
    learner = learner_for(setup, engine="auto")
    expected, _ = learner_for(setup, engine="inplace").meta_gradient(setup.tasks)
    before = Snapshot(learner)
    with caplog.at_level(logging.WARNING, logger="metanudge"):
        result, stats = learner.meta_gradient(setup.tasks)
    before.assert_unchanged()
    assert stats.engine == "inplace"
    assert relative_error(result, expected) == 0
    (record,) = caplog.records
    assert "in place" in record.getMessage()
    assert "Branching" in record.getMessage()
    caplog.clear()
    engine, why = learner.choose_engine(setup.tasks)
    assert (engine.name, why) == ("inplace", "the model cannot be stacked")
    learner.backward(setup.tasks)
    assert not caplog.records, "said once"


def test_auto_evaluates_a_model_that_cannot_be_stacked():
    setup = branching()
    evaluation = learner_for(setup, engine="auto").evaluate(setup.tasks)
    assert torch.allclose(
        evaluation.loss, learner_for(setup, engine="inplace").evaluate(setup.tasks).loss, rtol=1e-12
    )
    with_maml = learner_for(setup, mn.MAML(), engine="auto").evaluate(setup.tasks)
    assert torch.equal(with_maml.loss, evaluation.loss), (
        "evaluation needs no graph, whatever the estimator"
    )


def test_auto_does_not_hide_that_an_estimator_needs_the_stacked_engine():
    setup = branching()
    with pytest.raises(mn.StackingError, match="Branching"):
        learner_for(setup, mn.MAML(products="unrolled"), engine="auto").backward(setup.tasks)


# ---------------------------------------------------------------------------- the learner as module


def test_defaults():
    learner = mn.MetaLearner(nn.Linear(3, 3), F.cross_entropy)
    assert learner.estimator == mn.FOBMAML(
        nu="auto", stencil="symmetric", nudge="loss", start="theta"
    )
    assert learner.solver == mn.GradientDescent(lr=0.1, steps=5)
    assert learner.engine == "auto"
    assert learner.lam == 2.0


def test_repr_says_what_it_is():
    text = repr(
        mn.MetaLearner(
            nn.Linear(3, 3), F.cross_entropy, lam=1.5, estimator=mn.FOMAML(), engine="inplace"
        )
    )
    for part in (
        "MetaLearner",
        "lam=1.5",
        "GradientDescent(lr=0.1, steps=5",
        "FOMAML()",
        "inplace",
        "Linear(in_features=3",
    ):
        assert part in text


@pytest.mark.parametrize("engine", ENGINES)
def test_parameters_may_be_frozen_and_released_between_calls(engine: str):
    setup = mlp()
    learner = learner_for(setup, engine=engine)
    whole, _ = learner.meta_gradient(setup.tasks)
    setup.model[0].requires_grad_(False)
    part, _ = learner.meta_gradient(setup.tasks)
    assert list(part) == ["2.weight", "2.bias"]
    fresh, _ = learner_for(setup, engine=engine).meta_gradient(setup.tasks)
    assert relative_error(part, fresh) == 0
    learner.backward(setup.tasks)
    assert setup.model[0].weight.grad is None
    setup.model[0].requires_grad_(True)
    assert relative_error(learner.meta_gradient(setup.tasks)[0], whole) == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_parameters_loss_solver_and_estimator_may_be_exchanged(engine: str):
    """Nothing of an earlier call sticks: the learner gives what a new one would give."""
    setup = mlp()
    learner = learner_for(setup, engine=engine)
    learner.meta_gradient(setup.tasks)

    def check() -> None:
        fresh = mn.MetaLearner(
            learner.model,
            learner.loss,
            lam=learner.lam,
            solver=learner.solver,
            estimator=learner.estimator,
            engine=engine,
        )
        expected, _ = fresh.meta_gradient(setup.tasks, seed=0)
        assert relative_error(learner.meta_gradient(setup.tasks, seed=0)[0], expected) == 0

    learner.solver = mn.Nesterov(0.05, 4)
    check()
    learner.estimator = mn.FOBMAML(nu=0.1, stencil="forward")
    check()
    learner.loss = lambda output, target: F.cross_entropy(output, target, label_smoothing=0.3)
    check()
    learner.model[2] = seeded(1, lambda: nn.Linear(5, 3))
    check()
    learner.model = mlp(seed=3).model
    check()
    with torch.no_grad():
        learner.model[0].weight.mul_(2)
    check()


@pytest.mark.parametrize("how", ["assigned", "assigned twice", "changed in place"])
def test_a_new_lam_takes_effect(how: str):
    """Numbers are freed and their addresses used again: an address is no proof that λ is the
    same.
    """
    setup = mlp()
    expected, _ = learner_for(setup, lam=5.0).meta_gradient(setup.tasks)
    if how == "changed in place":
        lam = dict.fromkeys(dict(setup.model.named_parameters()), 2.0)
        learner = learner_for(setup, lam=lam)
        learner.meta_gradient(setup.tasks)
        lam.update(dict.fromkeys(lam, 5.0))
    else:
        learner = learner_for(setup, lam=float("2.0"))
        learner.meta_gradient(setup.tasks)
        if how == "assigned twice":
            learner.lam = float("3.0")
        learner.lam = float("5.0")
    assert relative_error(learner.meta_gradient(setup.tasks)[0], expected) == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_the_learner_may_be_cast(engine: str):
    setup = mlp()
    paper = mn.FOBMAML(nu=0.1)
    truth, _ = learner_for(setup, paper, engine).meta_gradient(setup.tasks)
    learner = learner_for(setup, paper, engine)
    learner.meta_gradient(setup.tasks)
    learner.to(torch.float32)
    result, _ = learner.meta_gradient(setup.tasks.to(torch.float32))
    assert all(g.dtype == torch.float32 for g in result.values())
    assert relative_error({n: g.double() for n, g in result.items()}, truth) < 1e-4
    learner.double()
    assert relative_error(learner.meta_gradient(setup.tasks)[0], truth) < 1e-4


@pytest.mark.parametrize("engine", ENGINES)
def test_deepcopy_is_independent(engine: str):
    setup = mlp()
    learner = learner_for(setup, engine=engine)
    learner.meta_gradient(setup.tasks)
    twin = copy.deepcopy(learner)
    expected, _ = learner.meta_gradient(setup.tasks, seed=0)
    before = Snapshot(learner)
    assert relative_error(twin.meta_gradient(setup.tasks, seed=0)[0], expected) == 0
    twin.backward(setup.tasks)
    with torch.no_grad():
        for p in twin.parameters():
            p.add_(1.0)
    before.assert_unchanged()
    assert relative_error(twin.meta_gradient(setup.tasks, seed=0)[0], expected) > 1e-3
    assert relative_error(learner.meta_gradient(setup.tasks, seed=0)[0], expected) == 0


def test_state_dict_is_that_of_the_model_and_the_learners_own():
    setup, other = conv_net(seed=0), conv_net(seed=1)
    learner, fresh = learner_for(setup), learner_for(other)
    own = [f"model.{n}" for n in setup.model.state_dict()]
    assert list(learner.state_dict()) == ["_extra_state", *own]
    expected, _ = learner.meta_gradient(setup.tasks)
    fresh.meta_gradient(setup.tasks)
    fresh.load_state_dict(learner.state_dict())
    assert (
        relative_error(
            fresh.meta_gradient(setup.tasks, seed=0)[0],
            learner.meta_gradient(setup.tasks, seed=0)[0],
        )
        == 0
    )
    assert relative_error(learner.meta_gradient(setup.tasks)[0], expected) == 0


def test_train_and_eval_reach_the_model():
    learner = learner_for(mlp(dropout=0.5))
    learner.eval()
    assert not learner.model[2].training
    learner.train()
    assert learner.model[2].training


def test_a_loss_with_a_graph_of_its_own_may_be_added():
    """A user may add a regulariser to the meta-loss: its graph was made before, and must survive
    the in-place engine.
    """
    setup = mlp()
    learner = learner_for(setup, engine="inplace")
    expected, _ = learner.meta_gradient(setup.tasks)
    penalty = sum(p.square().sum() for p in setup.model.parameters())
    (penalty + learner(setup.tasks)).backward()
    theta = values(setup.model)
    assert (
        relative_error(grads(setup.model), {n: expected[n] + 2 * theta[n] for n in theta}) < 1e-12
    )


class Temperature(nn.Module):
    """A linear classifier and a parameter that is a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 3)
        self.log_temperature = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.log_temperature.exp()


@pytest.mark.parametrize(
    "solver",
    [mn.GradientDescent(0.1, 2), mn.Nesterov(0.1, 2), mn.NewtonCG(steps=2)],
    ids=lambda s: type(s).__name__,
)
def test_parameters_that_are_single_numbers(solver):
    generator = torch.Generator().manual_seed(0)
    x, y = (
        torch.randn(2, 5, 2, generator=generator, dtype=torch.float64),
        torch.randint(0, 3, (2, 5), generator=generator),
    )
    torch.manual_seed(0)
    model = Temperature().double()
    for estimator in (mn.FOBMAML(nu=0.1), mn.IMAML(cg_steps=2)):
        stacked, inplace = (
            mn.MetaLearner(
                model,
                nn.functional.cross_entropy,
                solver=solver,
                estimator=estimator,
                engine=engine,
            ).meta_gradient(mn.TaskBatch((x, y), (x.flip(1), y.flip(1))), seed=1)[0]
            for engine in ("stacked", "inplace")
        )
        assert stacked["log_temperature"].shape == ()
        for n in stacked:
            torch.testing.assert_close(stacked[n], inplace[n], rtol=1e-10, atol=1e-12)
