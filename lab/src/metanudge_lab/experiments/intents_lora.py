"""A sentence encoder with LoRA adapters that adapt to a task, for the experiment on intents."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

import metanudge as mn
from metanudge.tasks.encoder import quiet
from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.intents_learners import (
    LENGTH,
    Build,
    Method,
    learner_of,
    with_prototypes,
)


class Encoder(nn.Module):
    """The mean of an encoder's last hidden states over a text's tokens, of one length.

    Args:
        folder: of a model of transformers, BERT-like, in safetensors.
        rank: of the adapters on its queries and values; its own weights stay.
    """

    def __init__(self, folder: str, rank: int) -> None:
        super().__init__()
        from peft import LoraConfig, get_peft_model
        from transformers import AutoModel

        with quiet():
            model = AutoModel.from_pretrained(
                folder, local_files_only=True, use_safetensors=True, attn_implementation="eager"
            )
        model.pooler = None
        adapters = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["query", "value"])
        self.encoder = get_peft_model(model.float(), adapters)
        self.width: int = model.config.hidden_size

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Features `(n, width)`."""
        there = attention_mask.to(torch.float32)
        # as a bias, which passes through as it is: what looks at a mask's values does not stack
        bias = (there - 1)[:, None, None, :] * 1e9
        hidden = self.encoder(input_ids=input_ids, attention_mask=bias).last_hidden_state
        weight = there[..., None]
        return LENGTH * normalize((hidden * weight).sum(1) / weight.sum(1), dim=-1)


def build_on_texts(
    method: Method, folder: str, ways: int, rank: int, device: torch.device
) -> Build:
    """Learners whose adapters and last layer, made from prototypes, adapt; dropout is off."""

    def make() -> nn.Module:
        encoder = Encoder(folder, rank)
        return with_prototypes(encoder, encoder.width, ways)

    def build(inner: float) -> mn.MetaLearner:
        model = m.seeded(0, make, device).eval()
        # every length of texts would be recorded anew
        return learner_of(model, method, inner, adapt=("*lora_*", "weight", "bias"), compile=False)

    return build
