"""`Text`: few-shot classification of texts; `EncodedText`: of features that a frozen encoder makes
of them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metanudge.task import Batch, Task, TaskBatch
from metanudge.tasks.class_splits import FRACTIONS, Splits
from metanudge.tasks.classification import ClassEpisodes
from metanudge.tasks.counts import Count, check_count, check_span
from metanudge.tasks.draws import Keys
from metanudge.tasks.encoder import encode
from metanudge.tasks.episodes import Split, Stream
from metanudge.tasks.labelled import Divided, Labelled, class_pools
from metanudge.tasks.ngrams import NGRAMS
from metanudge.tasks.options import passes_on
from metanudge.tasks.read_texts import read_texts
from metanudge.tasks.standardise import Standardisation
from metanudge.tasks.tokenizers import Tokenizer, find_tokenizer

_LONGEST = 512  # tokens, where a tokenizer knows no bound


@dataclass(frozen=True)
class TextForm:
    """How a text becomes an input.

    Attributes:
        max_length: tokens that are kept of a text; characters, where n-grams are counted.
        tokenizer: "bytes", a folder or a name; empty where an encoder has its own.
        vocabulary: token numbers that there are.
        pad: the token number that fills up.
        encoder: the folder or name of a frozen encoder whose features are the inputs, if any, or
            "ngrams".
        encoder_sha256: of the encoder's files.
    """

    max_length: int
    tokenizer: str = ""
    vocabulary: int = 0
    pad: int = 0
    encoder: str = ""
    encoder_sha256: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; `TextForm(**values)` is the way back."""
        return asdict(self)

    def raw(self, texts: Sequence[str]) -> Tensor:
        """Texts as one tensor: features, or token numbers `(n, longest)` with −1 behind each."""
        if self.encoder:
            found = encode(texts, self.encoder, max_length=self.max_length)
            if self.encoder_sha256 not in ("", found.sha256):
                raise ValueError(
                    f"The encoder {self.encoder} is not the one that the run was trained with: its"
                    " files have changed. Put the same ones back."
                )
            return torch.from_numpy(found.features)
        tokens, _ = find_tokenizer(self.tokenizer).encode(texts, self.max_length)
        rows = np.full((len(tokens), max(map(len, tokens), default=1)), -1, dtype=np.int64)
        for row, one in zip(rows, tokens, strict=True):
            row[: len(one)] = one
        return torch.from_numpy(rows)

    def inputs(self, raw: Tensor) -> Batch:
        """What a model is called with, of token numbers with −1 behind each text."""
        raw = raw[:, : max(1, int((raw >= 0).sum(1).max()))]
        there = raw >= 0
        return {"input_ids": raw.where(there, self.pad), "attention_mask": there.long()}


class TextOptions(Divided, total=False):
    """The options that every way of building a `Text` takes; see there."""

    tokenizer: str | Tokenizer
    max_length: int | None
    fetch: bool


class Text(ClassEpisodes):
    """Few-shot tasks from texts and labels. The *classes* are divided among the splits.

    Inputs are `{"input_ids": …, "attention_mask": …}`, padded for each support and query set to its
    longest text, rounded up to a number with two binary digits (…, 8, 12, 16, 24, …) so that many
    tasks have the same shape.

    Args:
        texts: one per example.
        labels: one per example: strings or integers.
        tokenizer: "bytes" (UTF-8, needs nothing), or a folder or name for `AutoTokenizer` of
            transformers; or an object like `metanudge.tasks.tokenizers.ByteTokenizer`.
        max_length: tokens that are kept of a text; None for as many as the tokenizer's model takes.
        fetch: a tokenizer that is no folder may be fetched from the Hugging Face hub.
        ways, shots, queries, splits, split_seed, drop_small, stream: see `Labelled`.

    Example:
        >>> texts = [f"{word} {i}" for word in ("ant", "bee", "cat") for i in range(4)]
        >>> source = Text(texts, [t[:3] for t in texts], ways=2, shots=1, queries=2,
        ...     splits=(1.0, 0.0, 0.0))
        >>> inputs, labels = source.task(0).query
        >>> inputs["input_ids"].shape, labels.tolist()
        (torch.Size([4, 6]), [0, 0, 1, 1])
    """

    def __init__(
        self,
        texts: Sequence[str],
        labels: Sequence[Any],
        *,
        tokenizer: str | Tokenizer = "bytes",
        max_length: int | None = None,
        fetch: bool = False,
        ways: Count = 5,
        shots: Count = 1,
        queries: int = 15,
        splits: Splits = FRACTIONS,
        split_seed: int = 0,
        drop_small: bool = False,
        **stream: Unpack[Stream],
    ) -> None:
        check_texts(texts)
        pools = class_pools(labels, len(texts), splits, split_seed)
        if drop_small:
            needed = check_span("shots", shots)[1] + queries
            pools = {split: pool.without_small(needed) for split, pool in pools.items()}
        found = find_tokenizer(tokenizer, fetch=fetch)
        limit = max_length or found.longest or _LONGEST
        check_count("max_length", limit, why="A text needs at least one token.")
        if found.longest is not None and limit > found.longest and found.name != "bytes":
            raise ValueError(
                f"max_length={limit} is more than the {found.longest} tokens that the model of"
                f" {found.name} can take. Use {found.longest} or less."
            )
        tokens, cut = found.encode(texts, limit)
        if not all(map(len, tokens)):
            empty = next(i for i, one in enumerate(tokens) if not len(one))
            raise ValueError(f"Text {empty} ({texts[empty][:40]!r}) has no tokens. Leave it out.")
        self._lengths = np.array([len(one) for one in tokens])
        self._starts = np.cumsum(self._lengths) - self._lengths
        # one after the other, so that a long text costs no more than itself
        flat = torch.from_numpy(np.concatenate(tokens))
        super().__init__(flat, pools, ways=ways, shots=shots, queries=queries, **stream)
        self.texts = texts
        self.form = TextForm(limit, found.name, found.vocabulary, found.pad)
        self.note = f"{found.name} tokens"
        if cut:
            self.note += f"; {cut} of {len(texts)} texts are cut to {limit}"
        self._fingerprint: str | None = None

    @classmethod
    @passes_on(__init__)
    def from_table(
        cls,
        table: str | os.PathLike[str] | Any,
        *,
        text: str = "text",
        label: str = "label",
        delimiter: str | None = None,
        **options: Unpack[TextOptions],
    ) -> Self:
        """From a .csv, .tsv or .jsonl file, a DataFrame, a `datasets` table or a list of dicts.

        Args:
            table: the file or table.
            text, label: names of its columns.
            delimiter: of a .csv file; None finds it in the first line.
            options: see `Text`.
        """
        read = read_texts(table, text=text, label=label, delimiter=delimiter)
        source = cls(read.texts, read.labels, **options)
        source._fingerprint = read.fingerprint
        return source

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The longest text's tokens."""
        return (int(self._lengths.max()),)

    def fingerprint(self) -> str | None:
        """Hex sha256 of the file it was read from; None for texts."""
        return self._fingerprint

    def draw(self, keys: Keys, split: Split) -> TaskBatch:
        """One task per key, each padded by itself."""
        rows = self._rows(keys, split)
        return TaskBatch.of(
            [Task(self._padded(one[:, : self.shots]), self._padded(one[:, self.shots :]))
             for one in rows]
        )  # fmt: skip

    def _padded(self, rows: NDArray[np.int64]) -> tuple[dict[str, Tensor], Tensor]:
        ways, each = rows.shape
        flat = rows.reshape(-1)
        lengths = self._lengths[flat]
        width = min(_rounded_up(int(lengths.max())), self.form.max_length)
        there = np.arange(width) < lengths[:, None]
        index = np.where(there, self._starts[flat][:, None] + np.arange(width), 0)
        mask = torch.from_numpy(there).to(self.device)
        assert isinstance(self._examples, Tensor)
        ids = self._examples[torch.from_numpy(index).to(self.device)].where(mask, self.form.pad)
        labels = torch.arange(ways, device=self.device).repeat_interleave(each)
        return {"input_ids": ids, "attention_mask": mask.long()}, labels


class EncodedText(Labelled):
    """Few-shot tasks on features of texts: those that a frozen encoder computed, once, or counts of
    words and of runs of letters. Made by `from_table`.

    Attributes:
        form: how a text becomes an input.
        texts: one per example.
    """

    form: TextForm
    texts: Sequence[str]

    @classmethod
    @passes_on(Labelled.__init__)
    def from_table(
        cls,
        table: str | os.PathLike[str] | Any,
        *,
        encoder: str = NGRAMS,
        text: str = "text",
        label: str = "label",
        max_length: int | None = None,
        fetch: bool = False,
        delimiter: str | None = None,
        standardise: bool | Standardisation | None = None,
        **options: Unpack[Divided],
    ) -> Self:
        """From what `Text.from_table` takes, and an encoder.

        Args:
            table: the file or table.
            encoder: the folder (or name) of a model of transformers in safetensors with its
                tokenizer. A text's features are the mean of its last hidden states, of length 1.
                "ngrams" needs no model: see `metanudge.tasks.ngrams`.
            text, label, delimiter: as in `Text.from_table`.
            max_length: tokens (n-grams: characters) that are kept of a text; None for as many as
                the encoder takes.
            fetch: an encoder that is no folder may be fetched from the Hugging Face hub.
            standardise: see `Labelled`. None: an encoder's features are, since of length 1 they
                are far too small for usual inner learning rates; n-grams are not, since rare ones
                would drown the others.
            options: see `Labelled`.
        """
        read = read_texts(table, text=text, label=label, delimiter=delimiter)
        check_texts(read.texts)
        found = encode(read.texts, encoder, max_length=max_length, fetch=fetch)
        usual = encoder != NGRAMS if standardise is None else standardise
        source = cls(found.features, read.labels, standardise=usual, **options)
        source._fingerprint = read.fingerprint
        source.texts = read.texts
        source.form = TextForm(found.max_length, encoder=found.encoder, encoder_sha256=found.sha256)
        ours = encoder == NGRAMS
        notes = [NGRAMS if ours else f"features of {os.path.basename(found.encoder)}"]
        if source.standardisation is not None:
            notes.append("standardised over the training classes")
        if found.cut:
            what = " characters" if ours else ""
            notes.append(
                f"{found.cut} of {len(read.texts)} texts are cut to {found.max_length}{what}"
            )
        source.note = "; ".join(notes)
        return source


def check_texts(texts: Sequence[str]) -> None:
    """Refuse what is no text, and empty ones."""
    if isinstance(texts, str) or not len(texts):
        raise ValueError("texts holds none. Give a sequence with one text per example.")
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise TypeError(f"Text {place} is a {type(text).__name__}, {text!r:.40}. Give strings.")
        if not text.strip():
            raise ValueError(f"Text {place} is empty. Write it, or leave the example out.")


def _rounded_up(size: int) -> int:
    """The smallest number with at most two binary digits other than 0 from this on.

    Example:
        >>> [_rounded_up(n) for n in (1, 3, 5, 7, 13, 30)]
        [1, 3, 6, 8, 16, 32]
    """
    low = max(0, size.bit_length() - 2)
    return -(-size >> low) << low
