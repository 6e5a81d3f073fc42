"""Classifiers of transformers, named `hf:FOLDER_OR_NAME`, and adapters of peft for them.

Weights are read from safetensors only, no code comes with a model, and nothing is fetched for a
folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from metanudge.tasks.encoder import check_weights, quiet
from metanudge.tasks.tokenizers import check_name
from metanudge.training.errors import UserError
from metanudge.training.spec_language import convert, known, split
from metanudge.training.specs import HF, Shapes, vocabulary_of


def build_classifier(text: str, shapes: Shapes) -> nn.Module:
    """The classifier that a spec describes, with an output for each way."""
    name = text.removeprefix(HF)
    if not name:
        raise UserError("--model hf: names no model. Write hf:FOLDER or hf:NAME.")
    name = str(Path(name).expanduser()) if Path(name).expanduser().is_dir() else name
    folder = Path(name).is_dir()
    if not vocabulary_of(shapes):
        raise UserError(
            f"--model {text} reads texts, and the inputs are numbers. Name the column with texts:"
            " --text COLUMN --label COLUMN."
        )
    try:
        from transformers import AutoModelForSequenceClassification
    except ImportError as error:
        raise UserError(
            f"--model {text} needs transformers: pip install 'metanudge[hf]'."
        ) from error
    try:
        if folder:
            check_weights(Path(name), "model")
        else:
            check_name(name, "model")
        with quiet():
            model: nn.Module = AutoModelForSequenceClassification.from_pretrained(
                name,
                num_labels=shapes.num_outputs,
                local_files_only=folder,
                trust_remote_code=False,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # its head may have been made for other classes
            )
    except Exception as error:  # what transformers raises differs from file to file
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
        raise UserError(f"--model {text} cannot be read: {reason}") from error
    _check_fits(text, model.config, shapes)
    return model


def _check_fits(text: str, config: Any, shapes: Shapes) -> None:
    room, longest = getattr(config, "max_position_embeddings", None), shapes.input_shape[0]
    if room is not None and longest > room:
        raise UserError(
            f"--model {text} takes {room} tokens, and the longest text has {longest}. Cut the"
            f" texts: --data-options max_length={room}"
        )
    there = getattr(config, "vocab_size", None)
    if there is not None and vocabulary_of(shapes) > there:
        raise UserError(
            f"--model {text} knows {there} tokens, and the tokenizer makes"
            f" {vocabulary_of(shapes)}. Give the model's own with --tokenizer."
        )


def lora(
    r: int = 8,
    alpha: int | None = None,
    dropout: float = 0.0,
    target_modules: Sequence[str] | None = None,
) -> Any:
    """The configuration of LoRA adapters; alpha is 2 r where none is given, and peft chooses the
    layers where none are named.
    """
    from peft import LoraConfig, TaskType

    return LoraConfig(
        task_type=TaskType.SEQ_CLS,  # the head is trained and saved too
        r=r,
        lora_alpha=2 * r if alpha is None else alpha,
        lora_dropout=dropout,
        target_modules=None if target_modules is None else list(target_modules),
    )


ADAPTERS = {"lora": lora}


def with_adapters(model: nn.Module, text: str) -> nn.Module:
    """A model of transformers with the adapters that `--peft` describes; its own weights stay."""
    name, raw = split("--peft", text)
    name = known(name, ("none", *ADAPTERS), "--peft", "adapter")
    options = convert(raw, ADAPTERS[name], "--peft", name)
    if not hasattr(model, "config"):
        raise UserError(f"--peft {text} is for models of transformers: --model hf:FOLDER.")
    try:
        from peft import get_peft_model
    except ImportError as error:
        raise UserError(f"--peft {text} needs peft: pip install 'metanudge[hf]'.") from error
    try:
        wrapped: nn.Module = get_peft_model(model, ADAPTERS[name](**options))
    except (TypeError, ValueError) as error:
        raise UserError(f"--peft {text}: {error}") from error
    return wrapped
