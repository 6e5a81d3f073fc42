"""Tokens of a text: its bytes, or what a tokenizer of transformers makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

_NO_LIMIT = 1 << 20  # tokenizers that know of none say 10³⁰


class Tokenizer(Protocol):
    """Texts in, token numbers out.

    Attributes:
        name: "bytes", a folder, or a name that transformers knows.
        pad: the number that fills up; a mask says where.
        vocabulary: how many numbers there are.
        longest: tokens that its model can take; None where nothing is known.
    """

    name: str
    pad: int
    vocabulary: int
    longest: int | None

    def encode(self, texts: Sequence[str], max_length: int) -> tuple[list[NDArray[np.int64]], int]:
        """The tokens of each text, at most `max_length`, and how many texts were cut."""


class ByteTokenizer:
    """The bytes of UTF-8, each plus 1; 0 is the padding. Needs no training and knows all texts.

    Example:
        >>> tokens, cut = ByteTokenizer().encode(["hé", "abc"], max_length=2)
        >>> [one.tolist() for one in tokens], cut
        ([[105, 196], [98, 99]], 2)
    """

    name = "bytes"
    pad = 0
    vocabulary = 257
    longest: int | None = 512

    def encode(self, texts: Sequence[str], max_length: int) -> tuple[list[NDArray[np.int64]], int]:
        """The bytes of each text, at most `max_length`, and how many texts were cut."""
        raw = [np.frombuffer(text.encode(errors="replace"), dtype=np.uint8) for text in texts]
        cut = sum(len(one) > max_length for one in raw)
        return [one[:max_length].astype(np.int64) + 1 for one in raw], cut


class PretrainedTokenizer:
    """A tokenizer of transformers.

    Args:
        name: a folder that holds one; or a name, which may be fetched where `fetch` is True.
    """

    def __init__(self, name: str, *, fetch: bool = False) -> None:
        where = Path(name).expanduser()
        folder = where.is_dir()
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ValueError(
                f"The tokenizer {name!r} needs transformers: pip install 'metanudge[hf]'. The"
                " tokenizer 'bytes' needs nothing."
            ) from error
        self.name = str(where.resolve()) if folder else name
        if not folder:
            check_name(name, "tokenizer")
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                self.name, local_files_only=folder or not fetch, trust_remote_code=False
            )
        except Exception as error:  # what transformers raises differs from file to file
            what = "is no folder with a tokenizer of transformers" if folder else "is not there"
            raise ValueError(
                f"The tokenizer {name!r} {what} ({_line(error)}). Give 'bytes', a folder that"
                " save_pretrained wrote, or a name on the Hugging Face hub."
            ) from error
        pad = self._tokenizer.pad_token_id
        self.pad = int(pad if pad is not None else self._tokenizer.eos_token_id or 0)
        self.vocabulary = len(self._tokenizer)
        limit = int(min(self._tokenizer.model_max_length, _NO_LIMIT))
        self.longest = limit if limit < _NO_LIMIT else None
        if self.vocabulary <= 1:
            raise ValueError(f"The tokenizer {name!r} has no vocabulary. Give another.")

    def encode(self, texts: Sequence[str], max_length: int) -> tuple[list[NDArray[np.int64]], int]:
        """The tokens of each text, at most `max_length`, and how many texts were cut."""
        whole: list[list[int]] = self._tokenizer(list(texts), verbose=False)["input_ids"]
        long = [place for place, tokens in enumerate(whole) if len(tokens) > max_length]
        if long:  # cut by the tokenizer itself, which keeps its last token
            shorter = self._tokenizer(
                [texts[place] for place in long], truncation=True, max_length=max_length
            )["input_ids"]
            for place, tokens in zip(long, shorter, strict=True):
                whole[place] = tokens
        return [np.array(tokens, dtype=np.int64) for tokens in whole], len(long)


def find_tokenizer(tokenizer: str | Tokenizer, *, fetch: bool = False) -> Tokenizer:
    """A tokenizer by "bytes", folder or name; one that is there already as it is."""
    if not isinstance(tokenizer, str):
        return tokenizer
    if tokenizer == "bytes":
        return ByteTokenizer()
    return PretrainedTokenizer(tokenizer, fetch=fetch)


def check_name(name: str, what: str) -> None:
    """Refuse what is a path and not a name on the Hugging Face hub."""
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or not name:
        raise ValueError(f"There is no folder {name!r}. Give the folder of a {what}, or a name.")


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
