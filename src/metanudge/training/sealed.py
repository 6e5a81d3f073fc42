"""JSON that vouches for itself: read strictly, and sealed with the sha256 of its own content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

SEAL = "sha256"


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text in UTF-8; `ValueError` for anything doubtful: NaN, a key given
    twice, nesting without end.

    Example:
        >>> parse_json('{"lam": 2, "lam": 3}')
        Traceback (most recent call last):
        ValueError: 'lam' is given twice
    """
    try:
        return json.loads(
            text if isinstance(text, str) else text.decode(),
            parse_constant=_no_number,
            object_pairs_hook=_unique,
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def seal(document: Mapping[str, Any], *, indent: int) -> str:
    """A JSON text of the document that ends with its sha256."""
    return json.dumps({**document, SEAL: _digest(document, indent)}, indent=indent) + "\n"


def is_intact(document: Mapping[str, Any], *, indent: int) -> bool:
    """Whether a sealed document, read from its file, still holds what was sealed."""
    return document.get(SEAL) == _digest(
        {key: value for key, value in document.items() if key != SEAL}, indent
    )


def _digest(document: Mapping[str, Any], indent: int) -> str:
    return hashlib.sha256(json.dumps(document, indent=indent).encode()).hexdigest()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r} is given twice")
        found[key] = value
    return found


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is not a number that JSON knows")
