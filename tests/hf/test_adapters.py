"""Adapters of PEFT: what adapting costs, saving and loading, serving many users from one base."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import metanudge as mn
from metanudge.testing.memory import Allocations, trainable_bytes
from problems import seeded

hf = pytest.importorskip("hf_models", reason="needs transformers and peft: make check-hf")
peft = pytest.importorskip("peft")


def learner_for(family: str = "Llama") -> mn.MetaLearner:
    return mn.MetaLearner(hf.model_of(family, "LoRA"), lam={"*lora_A*": 5.0, "*": 1.0})


def base_of(family: str) -> nn.Module:
    """The same base, made anew."""
    return hf.model_of(family)


def logits(model: nn.Module, task: mn.Task) -> torch.Tensor:
    with torch.no_grad():
        return model(**task.query).logits


def test_stiffness_by_pattern():
    found = {n: float(leaf) for n, leaf in learner_for().stiffness().items()}
    assert set(found.values()) == {1.0, 5.0}
    assert all((value == 5.0) == ("lora_A" in name) for name, value in found.items())


@pytest.mark.parametrize("family", hf.MODELS)
def test_an_adapted_copy_holds_no_more_than_its_adapters(family: str):
    learner, task = learner_for(family), hf.tasks_of(family)[0]
    adapters, everything = (
        trainable_bytes(learner.model),
        sum(p.nbytes for p in learner.model.parameters()),
    )
    learner.adapt(task.support)
    with Allocations() as seen:
        copied = learner.adapt(task.support)
    # adapters, and small buffers
    assert seen.live <= adapters + 1024 <= everything / 5
    for own, shared in zip(copied.parameters(), learner.model.parameters(), strict=True):
        assert (own is shared) == (not own.requires_grad)


def test_memory_of_adapting_at_its_height():
    """Beyond what a plain training step needs, three copies of the adapters."""
    learner, task = learner_for(), hf.tasks_of("Llama")[0]
    model = learner.model
    with Allocations() as plain:
        model(**task.support).loss.backward()
    model.zero_grad()
    with Allocations() as seen:
        learner.adapted_state(task.support)
    assert seen.peak <= plain.peak + 3 * trainable_bytes(model)


@pytest.mark.parametrize("family", ["GPT-2", "T5"])
def test_many_users_from_one_base(family: str, tmp_path: Path):
    """States made by one learner are loaded into one PEFT model in turn, or saved as adapters."""
    learner, tasks = learner_for(family), hf.tasks_of(family, 3)
    states = [learner.adapted_state(task.support) for task in tasks]
    serving = copy.deepcopy(learner.model)
    for number, (task, state) in enumerate(zip(tasks, states, strict=True)):
        expected = logits(learner.adapt(task.support), task)
        assert not torch.equal(logits(learner.model, task), expected)
        serving.load_state_dict(state, strict=False)
        assert torch.equal(logits(serving, task), expected)
        peft.set_peft_model_state_dict(serving, peft.get_peft_model_state_dict(learner.model))
        assert torch.equal(logits(serving, task), logits(learner.model, task))
        found = peft.set_peft_model_state_dict(
            serving, peft.get_peft_model_state_dict(learner.model, state_dict=state)
        )
        assert not found.unexpected_keys
        assert torch.equal(logits(serving, task), expected)
        learner.model.save_pretrained(tmp_path / str(number), state_dict=state)
        loaded = peft.PeftModel.from_pretrained(base_of(family), tmp_path / str(number))
        assert torch.equal(logits(loaded.eval(), task), expected)


def test_the_meta_learned_adapter_and_an_adapted_one_are_saved_and_loaded(tmp_path: Path):
    learner, tasks = learner_for(), hf.tasks_of("Llama")
    optimizer = torch.optim.SGD(learner.parameters(), lr=0.1)
    learner.backward(tasks)
    optimizer.step()
    task = tasks[0]
    learner.model.save_pretrained(tmp_path / "learned")
    with learner.adapted(task.support) as model:
        adapted = logits(model, task)
        model.save_pretrained(tmp_path / "adapted")
    learned = logits(learner.model, task)
    assert not torch.equal(adapted, learned)
    for name, expected in (("learned", learned), ("adapted", adapted)):
        loaded = peft.PeftModel.from_pretrained(base_of("Llama"), tmp_path / name)
        assert torch.equal(logits(loaded.eval(), task), expected)
    again = peft.PeftModel.from_pretrained(
        base_of("Llama"), tmp_path / "learned", is_trainable=True
    ).eval()
    other = mn.MetaLearner(again, lam=learner.lam)
    found, expected = other.adapted_state(task.support), learner.adapted_state(task.support)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_statistics_and_tables_stay_their_own_and_shared():
    """A model with BatchNorm beside the base: its statistics are the copy's, the base is shared."""

    class Vision(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vit = hf.model_of("ViT", "LoRA")
            self.norm = nn.BatchNorm2d(1, affine=False).double()

        def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> object:
            return self.vit(pixel_values=self.norm(pixel_values), labels=labels)

    model, task = seeded(0, Vision).double(), hf.tasks_of("ViT")[0]
    copied = mn.MetaLearner(model).adapt(task.support)
    before = model.norm.running_mean.clone()
    copied.train()(**task.query)
    assert torch.equal(model.norm.running_mean, before)
    assert not torch.equal(copied.norm.running_mean, before)
