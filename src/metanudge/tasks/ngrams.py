"""Features of texts that need no model: their words and runs of letters, counted."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

NGRAMS = "ngrams"
"""What stands in the place of an encoder's folder or name."""

_WIDTH, _LENGTHS = 1024, (3, 4, 5)
_WORD = re.compile(r"\w+|[^\w\s]")


def ngrams(texts: Sequence[str]) -> NDArray[np.float32]:
    """Roots of the counts of words and of runs of 3 to 5 letters within a word and the spaces
    around it, hashed into 1024 bins: `(texts, 1024)`, each of mean square 1.

    Capital letters count as small ones. The same on every machine.

    Example:
        >>> pay, paying, fly = ngrams(["pay a bill", "Paying bills", "fly"])
        >>> bool(pay @ paying > 4 * (pay @ fly)), round(float(pay @ pay))
        (True, 1024)
    """
    counts = np.zeros((len(texts), _WIDTH), dtype=np.float32)
    for row, text in zip(counts, texts, strict=True):
        bins = [zlib.crc32(part.encode(errors="replace")) % _WIDTH for part in _parts(text)]
        row += np.bincount(bins, minlength=_WIDTH)
    # the roots' squares are the counts
    return np.sqrt(counts / np.maximum(counts.mean(axis=1, keepdims=True), 1e-12))


def _parts(text: str) -> Iterator[str]:
    for word in _WORD.findall(text.lower()):
        yield f"w{word}"
        padded = f" {word} "
        for length in _LENGTHS:
            for first in range(len(padded) - length + 1):
                yield padded[first : first + length]
