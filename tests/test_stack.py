"""The recipes of docs/guides/stack.md: under every tool, the weights after a few meta-steps are
those of the plain loop.

In float64, without dropout. What is scaled and scaled back by powers of two is so exactly; sums in
another order differ by the roundings of `rounding()` in each step.
"""

from __future__ import annotations

import math
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

import metanudge as mn
from conformance import rounding
from documents import ROOT, Page
from metanudge.training.sinks import open_sink
from problems import classification_tasks, mlp, relative_error

RATE = 0.5
HALVES = 2  # each meta-batch in so many parts, where gradients accumulate
TASKS = list(classification_tasks((3,), 3, 8, 6, 9, 0))  # two steps of four tasks


def fresh(dtype: torch.dtype = torch.float64, **options: Any) -> mn.MetaLearner:
    model, loss, _ = mlp()
    return mn.MetaLearner(model.to(dtype), loss, **options)


def sgd(learner: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(learner.parameters(), lr=RATE)


def loader(size: int = 4, tasks: list[mn.Task] = TASKS) -> DataLoader:
    return DataLoader(tasks, batch_size=size, collate_fn=mn.TaskBatch)  # type: ignore[arg-type]


def weights(learner: mn.MetaLearner) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in learner.model.named_parameters()}


def plain(learner: mn.MetaLearner | None = None, steps: int = 2) -> list[dict[str, Tensor]]:
    """The weights after every step of the plain loop."""
    learner = learner or fresh()
    optimizer, seen = sgd(learner), []
    for step in range(steps):
        optimizer.zero_grad()
        learner.backward(mn.TaskBatch.of(TASKS[4 * step : 4 * step + 4]))
        optimizer.step()
        seen.append(weights(learner))
    return seen


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """What other packages deprecate is theirs; random numbers, and the one Accelerator that a
    process can have, are as before.
    """
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.filterwarnings(
            "ignore", module=r"(accelerate|lightning|pytorch_lightning|torch)\b"
        )
        yield
    if "accelerate" in sys.modules:
        sys.modules["accelerate"].state.AcceleratorState._reset_state(reset_partial_state=True)
        sys.modules["accelerate"].state.GradientState._reset_state()


# ------------------------------------------------------------------------------------------- tasks


def test_a_batch_is_made_like_any_sequence():
    """So Lightning and pinned memory make one from the parts they have cast or moved."""
    batch, same = mn.TaskBatch.of(TASKS), mn.TaskBatch(TASKS)
    assert same.stacks[0].places == batch.stacks[0].places
    for a, b in zip(same, batch, strict=True):
        assert torch.equal(a.support[0], b.support[0])
        assert torch.equal(a.query[1], b.query[1])
    with pytest.raises(TypeError, match="Expected tasks, got Tensor"):
        mn.TaskBatch(torch.zeros(2, 3))  # type: ignore[arg-type]
    task, other = TASKS[0], mn.Task(TASKS[0].support, TASKS[0].query)
    assert task == other
    assert len({task, other, TASKS[1]}) == 2


# --------------------------------------------------------------------------------------- Accelerate


@pytest.mark.parametrize("parts", [1, HALVES])
def test_accelerate(parts: int):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=parts)
    learner = fresh()
    prepared, optimizer, tasks = accelerator.prepare(learner, sgd(learner), loader(4 // parts))
    for batch in tasks:
        with accelerator.accumulate(prepared):
            accelerator.backward(prepared(batch))
            optimizer.step()
            optimizer.zero_grad()
    assert relative_error(weights(learner), plain()[-1]) < 2 * rounding()


def test_accelerate_in_mixed_precision():
    """Accelerate's autocast is torch's: the bits of the plain loop under it."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    learner, expected = fresh(torch.float32), fresh(torch.float32)
    prepared, optimizer = accelerator.prepare(learner, sgd(learner))
    batch = mn.TaskBatch.of(TASKS).to(torch.float32)
    accelerator.backward(prepared(batch))
    optimizer.step()
    with torch.autocast("cpu", torch.bfloat16):
        expected.backward(batch)
    sgd(expected).step()
    exact = fresh(torch.float32)
    exact.backward(batch)
    assert all(
        torch.equal(p, q) for p, q in zip(learner.parameters(), expected.parameters(), strict=True)
    )
    assert not torch.equal(expected.model[0].weight.grad, exact.model[0].weight.grad)


# ------------------------------------------------------------------------------------ Hugging Face


@pytest.mark.parametrize("parts", [1, HALVES])
def test_trainer_of_hugging_face(parts: int, tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class MetaTrainer(transformers.Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, **options: Any
        ) -> Any:
            return model(inputs)

    def trainer(learner: mn.MetaLearner) -> Any:
        options = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=4 // parts,
            gradient_accumulation_steps=parts,
            max_steps=2,
            save_steps=1,
            optim="sgd",
            learning_rate=RATE,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            train_sampling_strategy="sequential",
        )
        return MetaTrainer(learner, options, train_dataset=TASKS, data_collator=mn.TaskBatch)

    learner, expected = fresh(), plain()[-1]
    trainer(learner).train()
    assert relative_error(weights(learner), expected) < 2 * rounding()
    again = fresh()
    trainer(again).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert relative_error(weights(again), expected) < 2 * rounding()


# --------------------------------------------------------------------------------------- Lightning


def lightning_trainer(**options: Any) -> Any:
    pl = pytest.importorskip("pytorch_lightning")
    return pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def module_for(learner: mn.MetaLearner, *, automatic: bool) -> Any:
    pl = pytest.importorskip("pytorch_lightning")

    class Meta(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.learner = learner
            self.automatic_optimization = automatic
            self.seen: list[float] = []

        def training_step(self, tasks: mn.TaskBatch) -> Tensor | None:
            if automatic:
                return self.learner(tasks)
            optimizer = self.optimizers()
            optimizer.zero_grad()
            stats = self.learner.backward(tasks)
            optimizer.step()
            self.log("query_loss", stats.query_loss, batch_size=len(tasks))
            self.seen.append(stats.query_loss)
            return None

        def validation_step(self, tasks: mn.TaskBatch) -> None:
            self.seen.append(self.learner.evaluate(tasks).mean_loss)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self.learner)

    return Meta()


@pytest.mark.parametrize(("automatic", "parts"), [(True, 1), (True, HALVES), (False, 1)])
def test_lightning(automatic: bool, parts: int):
    trainer = lightning_trainer(accumulate_grad_batches=parts)
    learner = fresh()
    module = module_for(learner, automatic=automatic)
    trainer.fit(module, loader(4 // parts))
    assert relative_error(weights(learner), plain()[-1]) < 2 * rounding()
    trainer.validate(module, loader(8), verbose=False)
    assert math.isclose(module.seen[-1], learner.evaluate(TASKS).mean_loss, rel_tol=1e-12)


def test_lightning_in_mixed_precision():
    """Manual: `backward` under its autocast is `backward` under torch's."""
    learner, expected = fresh(torch.float32), fresh(torch.float32)
    tasks = [task.to(torch.float32) for task in TASKS[:4]]
    trainer = lightning_trainer(precision="bf16-mixed")
    trainer.fit(module_for(learner, automatic=False), loader(4, tasks))
    with torch.autocast("cpu", torch.bfloat16):
        expected.backward(tasks)
    sgd(expected).step()
    for found, wanted in zip(learner.parameters(), expected.parameters(), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("kind", ["batch", "list", "task"])
def test_lightning_in_bf16(kind: str):
    """It casts the weights and every floating tensor of the tasks; the bits are those of a learner
    and of tasks cast by hand.
    """
    trainer = lightning_trainer(precision="bf16-true", max_steps=1)
    learner = fresh(torch.float32)
    collate = {"batch": mn.TaskBatch, "list": list, "task": lambda tasks: tasks[0]}[kind]
    batch = mn.TaskBatch.of(TASKS[:4] if kind != "task" else TASKS[:1])
    before = [task.support[0].clone() for task in TASKS]
    trainer.fit(module_for(learner, automatic=True), DataLoader(TASKS, 4, collate_fn=collate))
    expected = fresh(torch.bfloat16)
    expected.backward(batch.to(torch.bfloat16))
    sgd(expected).step()
    for found, wanted in zip(learner.parameters(), expected.parameters(), strict=True):
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, wanted)
    assert all(torch.equal(t.support[0], x) for t, x in zip(TASKS, before, strict=True))


# ------------------------------------------------------------------------------------------- torch


@pytest.mark.parametrize("whole", [True, False])
def test_moving_average(whole: bool):
    """Of the learner, or of its model alone."""
    decay, learner = 0.75, fresh()
    ema = AveragedModel(
        learner if whole else learner.model, multi_avg_fn=get_ema_multi_avg_fn(decay)
    )
    start, optimizer, expected = weights(learner), sgd(learner), None
    for step in range(3):
        optimizer.zero_grad()
        learner.backward(TASKS)
        optimizer.step()
        ema.update_parameters(learner if whole else learner.model)
        now = weights(learner)
        expected = {
            n: now[n] if step == 0 else decay * expected[n] + (1 - decay) * now[n] for n in now
        }
    averaged = ema.module if whole else mn.MetaLearner(ema.module, learner.loss)
    assert relative_error(weights(averaged), expected) < 1e-14
    assert relative_error(weights(averaged), weights(learner)) > 1e-6
    assert relative_error(start, weights(learner)) > 1e-3
    fixed = fresh()
    fixed.model.load_state_dict(expected)
    x = TASKS[0].query[0]
    found = averaged.adapt(TASKS[0].support)(x)
    torch.testing.assert_close(found, fixed.adapt(TASKS[0].support)(x), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from torch._dynamo's own imports
def test_compiled(in_place: bool):
    """`torch.compile(model)` and `model.compile()`: the learner finds its engine itself."""
    torch.compiler.reset()
    expected = plain()[-1]
    model, loss, _ = mlp()
    if in_place:
        model.compile(backend="aot_eager")
    learner = mn.MetaLearner(model if in_place else torch.compile(model, backend="aot_eager"), loss)
    found = plain(learner)[-1]
    found = {n.removeprefix("_orig_mod."): w for n, w in found.items()}
    assert relative_error(found, expected) < 2 * rounding()


def test_tasks_made_in_inference_mode():
    """As loaders make them in Lightning's validation."""
    learner, task = fresh(), TASKS[0]
    expected = learner.adapted_state(task.support)
    gradient, _ = learner.meta_gradient(TASKS)
    with torch.inference_mode():
        support = tuple(leaf.clone() for leaf in task.support)
        batch = mn.TaskBatch.of(TASKS)
        again = mn.TaskBatch.of([mn.Task(support, support)]).to(torch.float64)
        assert torch.equal(
            learner.evaluate(again).loss, learner.evaluate(mn.Task(task.support, task.support)).loss
        )
        found = learner.adapted_state(support)
    assert all(torch.equal(found[n], leaf) for n, leaf in expected.items())
    assert batch.stacks[0].support[0].is_inference() is False
    same, _ = learner.meta_gradient(batch)
    assert all(torch.equal(same[n], leaf) for n, leaf in gradient.items())


# ------------------------------------------------------------------------------- the page, the logs


@pytest.mark.parametrize("package", ["accelerate", "transformers", "pytorch_lightning"])
def test_the_recipes_of_the_page(package: str):
    """Each ends with the weights of the plain loop, which are those of the page's first blocks."""
    pytest.importorskip(package)
    page = Page(ROOT / "docs" / "guides" / "stack.md")
    names: dict[str, Any] = {}
    first, second, *rest = [b for b in page.blocks if b.language == "python" and not b.not_run]
    for block in (first, second):
        exec(compile(block.text, str(page), "exec"), names)
    expected, start = weights(names["learner"]), weights(names["fresh"]()[0])
    assert relative_error(start, expected) > 1e-3
    recipes = [block for block in rest if block.needs == package]
    assert recipes
    for block in recipes:
        exec(compile(block.text, str(page), "exec"), names)
        assert relative_error(weights(names["learner"]), expected) < 2 * rounding()


VALUES = {"step": 3, "query_loss": 0.5, "path": "chain", "query_accuracy": math.nan}


def test_tensorboard(tmp_path: Path):
    """Its own reader finds the finite numbers, at their step."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = open_sink("tensorboard", tmp_path, {})
    sink.write(3, VALUES)
    sink.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["scalars"] == ["query_loss"]
    assert [(e.step, e.value) for e in events.Scalars("query_loss")] == [(3, 0.5)]


def test_weights_and_biases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What its interface is called with: without an account nothing can be sent."""
    seen: list[Any] = []
    run = types.SimpleNamespace(
        log=lambda values, step: seen.append((step, values)), finish=lambda: seen.append("end")
    )
    module = types.ModuleType("wandb")
    module.init = lambda **options: seen.append(options["config"]) or run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    sink = open_sink("wandb", tmp_path, {"seed": 0})
    sink.write(3, VALUES)
    sink.close()
    assert seen == [{"seed": 0}, (3, {"query_loss": 0.5}), "end"]
