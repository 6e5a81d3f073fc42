"""Texts that a configuration names: tokens, or features of a frozen encoder."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from metanudge.tasks import EncodedText, Episodes, Text
from metanudge.tasks.ngrams import NGRAMS
from metanudge.tasks.read_texts import TEXT_FILES
from metanudge.training.config import TEXT, TrainConfig
from metanudge.training.data import Data, DataShapes
from metanudge.training.errors import UserError
from metanudge.training.spec_language import normal
from metanudge.training.specs import HF

_OF_NUMBERS = ("auto", "features", "mlp", "table")  # models that read no tokens


class TextTable(Data):
    """A table of texts."""

    def decided(self, given: dict[str, Any], source: Episodes) -> dict[str, Any]:
        """How many tokens are kept, and whether features are standardised."""
        assert isinstance(source, (Text, EncodedText))
        found: dict[str, Any] = {"max_length": source.form.max_length}
        if isinstance(source, EncodedText):
            found["standardise"] = source.standardisation is not None
        return found

    def as_remembered(self, given: dict[str, Any], shapes: DataShapes) -> dict[str, Any]:
        """As many tokens, or features on the same scale."""
        assert shapes.form is not None
        fixed: dict[str, Any] = {"max_length": shapes.form.max_length}
        if shapes.form.encoder:
            fixed["standardise"] = shapes.standardisation or False
        return {**given, **fixed}


def text_data(config: TrainConfig) -> Data:
    """Texts, as the flags name them."""
    path = Path(config.data).expanduser()
    if config.text is None:
        said = next(name for name in TEXT if getattr(config, name) is not None)
        also = " Of a table of numbers it is --data-options label=…" if said == "label" else ""
        raise UserError(f"--{said} is for texts: name their column with --text COLUMN.{also}")
    if not path.is_file() or path.suffix.lower() not in TEXT_FILES:
        what = "is no file" if not path.is_file() else "is no table of texts"
        raise UserError(
            f"--text {config.text}: {config.data} {what}. Give a {', '.join(TEXT_FILES)} file with"
            " a column of texts and one of labels."
        )
    columns: dict[str, Any] = {"text": config.text, "label": config.label or "label", "fetch": True}
    flags = (*TEXT, "fetch")
    encoder = config.encoder
    if encoder is None and config.tokenizer is None and _name(config.model) in _OF_NUMBERS:
        encoder = NGRAMS
    if encoder is not None:
        if config.tokenizer is not None:
            raise UserError(
                f"--tokenizer {config.tokenizer} and --encoder {encoder} contradict each"
                " other: an encoder has a tokenizer of its own. Leave one out."
            )
        if config.model.startswith(HF):
            raise UserError(
                f"--model {config.model} reads texts, but with --encoder {encoder} inputs"
                " are its features. Leave one of the two out."
            )
        encoded = functools.partial(EncodedText.from_table, path, encoder=encoder, **columns)
        return TextTable(str(path.resolve()), "encoded texts", encoded, own_flags=flags)
    tokenizer = config.tokenizer
    if tokenizer is None:
        tokenizer = config.model.removeprefix(HF) if config.model.startswith(HF) else "bytes"
    make = functools.partial(Text.from_table, path, tokenizer=tokenizer, **columns)
    return TextTable(str(path.resolve()), "texts", make, own_flags=flags)


def _name(model: str) -> str:
    return normal(model.partition(":")[0])
