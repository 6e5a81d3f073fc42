"""Features of texts from a frozen encoder of transformers, computed once and kept on disk."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from metanudge.tasks.cache import cache_folder, load_arrays, save_arrays
from metanudge.tasks.counts import check_count
from metanudge.tasks.ngrams import NGRAMS, ngrams
from metanudge.tasks.tokenizers import PretrainedTokenizer, check_name

_AT_ONCE = 128  # texts
_LONGEST = 512
_CHARACTERS = 10_000  # of a text whose n-grams are counted
_READ = (".json", ".txt", ".model", ".safetensors")  # what an encoder's folder is known by


@dataclass(frozen=True)
class Encoded:
    """Features of texts.

    Attributes:
        features: `(texts, width)`, each of length 1; n-grams of mean square 1.
        encoder: its folder, or its name.
        sha256: of its files; empty for a name.
        max_length: tokens that were kept of a text; for n-grams characters.
        cut: how many texts were longer.
    """

    features: NDArray[np.float32]
    encoder: str
    sha256: str
    max_length: int
    cut: int


def encode(
    texts: Sequence[str], encoder: str, *, max_length: int | None = None, fetch: bool = False
) -> Encoded:
    """Mean-pooled features of texts; read from the cache where they were computed before.

    Args:
        texts: any number.
        encoder: the folder of a model in safetensors with its tokenizer, or a name; or "ngrams".
        max_length: tokens that are kept of a text (n-grams: characters); None for as many as the
            encoder takes.
        fetch: a name may be fetched from the Hugging Face hub; never from a folder.
    """
    if max_length is not None:
        check_count("max_length", max_length, why="A text needs at least one token.")
    if encoder == NGRAMS:
        limit = max_length or _CHARACTERS
        cut = sum(len(text) > limit for text in texts)
        return Encoded(ngrams([text[:limit] for text in texts]), NGRAMS, "", limit, cut)
    folder = Path(encoder).expanduser()
    name = str(folder.resolve()) if folder.is_dir() else encoder
    sha256 = _fingerprint(folder) if folder.is_dir() else ""
    if not sha256:
        check_name(encoder, "encoder")
        if re.sub(r"[\s_-]", "", encoder).lower() in ("ngram", NGRAMS):
            raise ValueError(f"There is no folder {encoder!r}. Did you mean {NGRAMS!r}?")
    key = hashlib.sha256(f"2\n{sha256 or name}\n{max_length}\n".encode())
    for text in texts:
        data = text.encode(errors="replace")
        key.update(len(data).to_bytes(8, "little") + data)
    file = cache_folder() / "encoded" / f"{key.hexdigest()}.npz"
    kept = load_arrays(file, {"features": (len(texts), None), "facts": (2,)}) if sha256 else None
    if kept is None:
        kept = _computed(texts, name, max_length, fetch)
        if sha256:
            save_arrays(file, kept)
    limit, cut = (int(fact) for fact in kept["facts"])
    return Encoded(kept["features"].astype(np.float32), name, sha256, limit, cut)


def _fingerprint(folder: Path) -> str:
    """Hex sha256 of an encoder's files."""
    files = sorted(f for f in folder.iterdir() if f.suffix in _READ and f.is_file())
    check_weights(folder, "encoder")
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            part = hashlib.file_digest(opened, "sha256").hexdigest()
        digest.update(f"{file.name} {part}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def check_weights(folder: Path, what: str) -> None:
    """Refuse the folder of a model without weights in safetensors."""
    names = os.listdir(folder)
    if any(name.endswith(".safetensors") for name in names):
        return
    pickled = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    if pickled:
        raise ValueError(
            f"The {what} {folder} has its weights in {pickled[0]}, a pickle that could run any"
            " code when it is read. Save it with safetensors (model.save_pretrained does)."
        )
    raise ValueError(
        f"The {what} {folder} has no weights (*.safetensors). Give the folder that save_pretrained"
        " wrote."
    )


def _computed(
    texts: Sequence[str], name: str, max_length: int | None, fetch: bool
) -> dict[str, NDArray[Any]]:
    tokenizer = PretrainedTokenizer(name, fetch=fetch)
    model = _model(name, fetch)
    room = getattr(model.config, "max_position_embeddings", None) or _LONGEST
    most = min(tokenizer.longest or room, room)
    limit = max_length or min(most, _LONGEST)
    if limit > most:
        raise ValueError(
            f"max_length={limit} is more than the {most} tokens that the encoder {name} can take."
            f" Use {most} or less."
        )
    tokens, cut = tokenizer.encode(texts, limit)
    lengths = np.array([len(one) for one in tokens])
    order = np.argsort(lengths, kind="stable")  # alike in length: little is padded
    rows: list[Tensor | None] = [None] * len(texts)
    for first in range(0, len(order), _AT_ONCE):
        places = order[first : first + _AT_ONCE]
        ids = torch.full((len(places), int(lengths[places].max())), tokenizer.pad)
        mask = torch.zeros_like(ids)
        for row, place in enumerate(places):
            ids[row, : lengths[place]] = torch.from_numpy(tokens[place])
            mask[row, : lengths[place]] = 1
        with torch.inference_mode():
            hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        weight = mask[..., None].float()
        pooled = (hidden * weight).sum(1) / weight.sum(1)
        for place, one in zip(places, pooled / pooled.norm(dim=1, keepdim=True), strict=True):
            rows[place] = one
    found = torch.stack([row for row in rows if row is not None])
    return {"features": found.numpy(), "facts": np.array([limit, cut])}


def _model(name: str, fetch: bool) -> Any:
    from transformers import AutoModel

    folder = Path(name).is_dir()
    try:
        with quiet():
            model = AutoModel.from_pretrained(
                name,
                local_files_only=folder or not fetch,
                trust_remote_code=False,
                use_safetensors=True,
            )
    except Exception as error:  # what transformers raises differs from file to file
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise ValueError(
            f"The encoder {name} cannot be read ({reason}). Give the folder of a model of"
            " transformers with its weights in safetensors."
        ) from error
    return model.float().eval()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the bars and remarks of transformers while a model is loaded."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
