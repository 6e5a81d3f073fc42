"""Tiny models of Hugging Face with random weights, nothing of them downloaded, and tasks for them;
whole, or as a frozen base with LoRA.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

import metanudge as mn
from problems import seeded

VOCABULARY, CLASSES = 29, 3
WIDE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
# Eager attention can be differentiated twice, for oracles.
EAGER = {"attn_implementation": "eager"}
TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


class Double(TorchFunctionMode):
    """Within, models that cast to float32 on the way (norms, softmax, losses) cast to float64: what
    is compared to 1e-8 must not be rounded to 1e-7 within.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, in float64 where it asks for float32."""
        args, kwargs = tree_map(
            lambda leaf: torch.float64 if leaf is torch.float32 else leaf, (args, kwargs or {})
        )
        return (Tensor.double if func is Tensor.float else func)(*args, **kwargs)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        intermediate_size=24,
        num_key_value_heads=1,
        **WIDE,
        **EAGER,
        **TOKENS,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    """Its first and last matrix are one."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2, **EAGER, **TOKENS
    )
    with_loss = transformers.GPT2LMHeadModel(config)
    with_loss.loss_type = "ForCausalLM"  # what it takes anyway, with a warning
    return with_loss


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        intermediate_size=24,
        max_position_embeddings=16,
        num_labels=CLASSES,
        **WIDE,
        **EAGER,
        **TOKENS,
    )
    return transformers.BertForSequenceClassification(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=1,
        num_heads=2,
        feed_forward_proj="gated-gelu",
        decoder_start_token_id=2,
        **EAGER,
        **TOKENS,
    )
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        image_size=8,
        patch_size=4,
        num_channels=1,
        intermediate_size=24,
        num_labels=CLASSES,
        **WIDE,
        **EAGER,
    )
    return transformers.ViTForImageClassification(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "Llama": llama,
    "GPT-2": gpt2,
    "BERT": bert,
    "T5": t5,
    "ViT": vit,
}
LORA = {
    "Llama": ["q_proj", "v_proj"],
    "GPT-2": ["c_attn"],
    "BERT": ["query", "value"],
    "T5": ["q", "v"],
    "ViT": ["q_proj", "v_proj"],
}


def model_of(family: str, kind: str = "full", dtype: torch.dtype = torch.float64) -> nn.Module:
    """In evaluation mode: without dropout, as `functional_call` by hand has no seeds of ours."""

    def make() -> nn.Module:
        model = MODELS[family]()
        if kind == "full":
            return model
        # B starts at 0 by default, and with it half of the gradients
        config = LoraConfig(
            r=2,
            target_modules=LORA[family],
            init_lora_weights=False,
            fan_in_fan_out=family == "GPT-2",
        )
        return get_peft_model(model, config)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = seeded(0, make)
    return model.to(dtype).eval()


def batch_of(family: str, examples: int, generator: torch.Generator, length: int = 6) -> Any:
    """As a tokenizer or an image processor would make it, with a padded example."""
    if family == "ViT":
        pixels = torch.randn(examples, 1, 8, 8, generator=generator, dtype=torch.float64)
        labels = torch.randint(CLASSES, (examples,), generator=generator)
        return transformers.BatchFeature({"pixel_values": pixels, "labels": labels})
    ids = torch.randint(3, VOCABULARY, (examples, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    ids = torch.where(mask == 1, ids, 2)
    labels: Tensor
    if family == "BERT":
        labels = torch.randint(CLASSES, (examples,), generator=generator)
    elif family == "T5":
        labels = torch.randint(3, VOCABULARY, (examples, 4), generator=generator)
        labels[0, -1] = -100
    else:
        labels = torch.where(mask == 1, ids, -100)
    return transformers.BatchEncoding({"input_ids": ids, "attention_mask": mask, "labels": labels})


def tasks_of(family: str, tasks: int = 2) -> list[mn.Task]:
    generator = torch.Generator().manual_seed(1)
    return [
        mn.Task(batch_of(family, 3, generator), batch_of(family, 2, generator))
        for _ in range(tasks)
    ]
