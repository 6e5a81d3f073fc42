"""Batches, labels, lengths and hooks as Hugging Face has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import metanudge as mn
from problems import relative_error

hf = pytest.importorskip("hf_models", reason="needs transformers and peft: make check-hf")


def test_accuracy_is_that_of_the_labels_that_the_loss_counts():
    for family in ("Llama", "GPT-2", "BERT", "T5", "ViT"):
        for kind in ("full", "LoRA"):
            model, task = hf.model_of(family, kind), hf.tasks_of(family)[0]
            output, labels = model(**task.query), task.query["labels"]
            guesses = output.logits.argmax(-1)
            if family in ("Llama", "GPT-2"):
                guesses, labels = guesses[:, :-1], labels[:, 1:]
            known = labels != -100
            _, stats = mn.MetaLearner(model, estimator=mn.FOMAML()).meta_gradient(task)
            expected = float((guesses == labels)[known].double().mean())
            assert stats.query_accuracy_before == pytest.approx(expected)
            assert stats.query_loss_before == pytest.approx(output.loss.item())


def test_tasks_of_different_lengths():
    """Those of equal length are stacked; each counts as much as if it were alone."""
    generator = torch.Generator().manual_seed(0)
    tasks = [
        mn.Task(
            hf.batch_of("Llama", 3, generator, length), hf.batch_of("Llama", 2, generator, length)
        )
        for length in (6, 9, 6)
    ]
    batch = mn.TaskBatch.of(tasks)
    assert [stack.places for stack in batch.stacks] == [(0, 2), (1,)]
    model = hf.model_of("Llama", "LoRA")
    for engine in ("inplace", "stacked"):
        learner = mn.MetaLearner(model, engine=engine, estimator=mn.FOMAML())
        together, _ = learner.meta_gradient(batch)
        alone = [learner.meta_gradient(task)[0] for task in tasks]
        mean = {n: sum(g[n] for g in alone) / 3 for n in together}
        # sums in another order; softmax and norms in float32 within
        assert relative_error(together, mean) < (1e-12 if engine == "inplace" else 1e-6)


def test_adapters_in_more_bits_than_their_base():
    """As PEFT makes them; pictures come in the bits of the base."""
    model = hf.model_of("ViT", "LoRA", dtype=torch.bfloat16)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    tasks = mn.TaskBatch.of(hf.tasks_of("ViT")).to(torch.bfloat16)
    estimator = mn.FOMAML()
    found, _ = mn.MetaLearner(model, estimator=estimator, engine="inplace").meta_gradient(tasks)
    exact, _ = mn.MetaLearner(hf.model_of("ViT", "LoRA"), estimator=estimator).meta_gradient(
        hf.tasks_of("ViT")
    )
    a, b = (torch.cat([leaf.flatten().double() for leaf in g.values()]) for g in (found, exact))
    # eight bits, and a few layers of them
    assert float(torch.cosine_similarity(a, b, dim=0)) > 0.99
    assert all(leaf.dtype == torch.float32 for leaf in found.values())


def test_a_loss_of_logits_and_labels():
    model, tasks = hf.model_of("BERT"), hf.tasks_of("BERT")
    how = {"engine": "inplace", "estimator": mn.FOBMAML(nu=0.1)}
    own, _ = mn.MetaLearner(model, **how).meta_gradient(tasks)
    given, stats = mn.MetaLearner(model, F.cross_entropy, **how).meta_gradient(tasks)
    assert relative_error(given, own) < 1e-12  # the same operations
    assert 0 <= stats.query_accuracy <= 1


@pytest.mark.parametrize("offloads", [False, True])
def test_hooks_that_move_weights_take_the_model_in_place(offloads: bool):
    accelerate = pytest.importorskip("accelerate")
    tasks, estimator = hf.tasks_of("Llama"), mn.FOBMAML(nu=0.1)
    plain = mn.MetaLearner(hf.model_of("Llama", "LoRA"), engine="inplace", estimator=estimator)
    expected, _ = plain.meta_gradient(tasks)
    model: Any = hf.model_of("Llama", "LoRA")
    if offloads:  # frozen weights lie on the host and come when their layer runs
        for name, part in model.named_modules():
            if isinstance(part, nn.Linear) and "lora" not in name and "proj" not in name:
                accelerate.cpu_offload(part, execution_device="cpu")
        assert any(p.is_meta for p in model.parameters())
    else:
        accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True)
    learner = mn.MetaLearner(model, estimator=estimator)
    found, stats = learner.meta_gradient(tasks)
    assert stats.engine == "inplace"
    assert relative_error(found, expected) < 1e-12
