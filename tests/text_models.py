"""Tiny tokenizers, encoders and classifiers that tests save themselves, and texts for them."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

import torch

WORDS = ["play", "stop", "song", "card", "bank", "lost", "rain", "snow", "warm", "tell", "time"]
CLASSES = [f"intent{number:02d}" for number in range(12)]


def rows(each: int = 8) -> list[dict[str, str]]:
    """Texts whose words tell the class."""
    return [
        {"text": f"{WORDS[c % 11]} {WORDS[(3 * c + 1) % 11]}, {WORDS[i % 11]}", "intent": name}
        for c, name in enumerate(CLASSES)
        for i in range(each)
    ]


def write_csv(file: Path, found: Sequence[dict[str, str]]) -> Path:
    """Rows as a table."""
    with file.open("w", newline="", encoding="utf-8") as opened:
        writer = csv.DictWriter(opened, list(found[0]))
        writer.writeheader()
        writer.writerows(found)
    return file


def save_tokenizer(folder: Path, longest: int = 32) -> Path:
    """A tokenizer of whole words, and others as [UNK]."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS, ","])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", model_max_length=longest
    )
    tokenizer.save_pretrained(folder)
    return folder


def save_bert(folder: Path, *, longest: int = 32) -> Path:
    """A BERT of two narrow layers with random weights, and the tokenizer."""
    from transformers import BertConfig, BertModel

    save_tokenizer(folder, longest)
    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(
        **size, intermediate_size=20, vocab_size=16, max_position_embeddings=longest
    )
    BertModel(config).save_pretrained(folder)
    return folder


def write_jsonl(file: Path, found: Sequence[dict[str, str]]) -> Path:
    """Rows as lines of JSON."""
    file.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
    return file
