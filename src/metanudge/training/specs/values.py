"""The value of an option: text → the type that its target declares."""

from __future__ import annotations

import ast
import os
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from metanudge.names import near
from metanudge.training.errors import UserError
from metanudge.training.specs.language import split_commas

_NO = object()  # "does not fit"; None itself is a value


def typed(text: str, hint: Any, where: str) -> Any:
    """A raw value as the declared type; where none fits, an error that says what would."""
    for kind in _alternatives(hint):
        converted = _try(text, kind)
        if converted is not _NO:
            return converted
    wanted = " or ".join(dict.fromkeys(_spell(kind) for kind in _alternatives(hint)))
    words = [
        str(word)
        for kind in _alternatives(hint)
        if typing.get_origin(kind) is Literal
        for word in typing.get_args(kind)
    ]
    raise UserError(f"{where}={text} is not {wanted}.{near(text, words)}")


def _alternatives(hint: Any) -> list[Any]:
    if hint is None:
        return [Any]
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        found = [kind for part in typing.get_args(hint) for kind in _alternatives(part)]
        if type(None) in typing.get_args(hint):
            found = [kind for kind in found if kind is not Any] + [type(None)]
        # Text fits everything, so it comes last.
        return sorted(
            (kind for kind in found if kind is not torch.Tensor), key=lambda kind: kind is str
        )
    if hint is type(None):
        return [type(None)]
    return [hint]


def _try(text: str, kind: Any) -> Any:
    origin = typing.get_origin(kind)
    word = text.lower()
    if kind is type(None):
        return None if word in ("none", "null") else _NO
    if kind is bool:
        return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}.get(
            word, _NO
        )
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            return _NO
    if origin is Literal:
        literal = _literal(text)
        return literal if literal in typing.get_args(kind) else _NO
    if (
        kind is str
        or (isinstance(kind, type) and issubclass(kind, os.PathLike))
        or origin is os.PathLike
    ):
        literal = _literal(text)
        return literal if isinstance(literal, str) else text
    container = origin if isinstance(origin, type) else kind if isinstance(kind, type) else None
    literal = _names(text) if _of_names(kind) else _literal(text)
    if container is tuple or container in (Sequence, list):
        if not isinstance(literal, (tuple, list)):
            return _NO
        return tuple(literal) if container is not list else list(literal)
    if isinstance(container, type) and issubclass(container, Mapping):
        return literal if isinstance(literal, dict) else _NO
    return literal


def _of_names(kind: Any) -> bool:
    """Whether a list or dict holds text and nothing else, so that quotes can be left out."""
    parts = [part for part in typing.get_args(kind) if part is not Ellipsis]
    return bool(parts) and all(part is str or _of_names(part) for part in parts)


def _names(text: str) -> Any:
    """Lists and dicts of names, with or without quotes.

    Example:
        >>> _names("[petal width,7,'a,b']"), _names("{train:[cat],test:[dog]}")
        (['petal width', '7', 'a,b'], {'train': ['cat'], 'test': ['dog']})
    """
    text = text.strip()
    if text[:1] + text[-1:] not in ("[]", "()", "{}"):
        literal = _literal(text)
        return literal if isinstance(literal, str) else text
    parts = split_commas(text[1:-1], "a list")
    if text[0] != "{":
        return [_names(part) for part in parts]
    pairs = [part.partition(":") for part in parts]
    return {str(_names(key)): _names(value) for key, _, value in pairs}


def _literal(text: str) -> Any:
    """Numbers, quoted text, tuples, lists and dicts as Python writes them (true/false/none too);
    anything else is text.
    """
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _spell(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return " or ".join(map(str, typing.get_args(kind)))
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "text",
        type(None): "none",
    }
    if kind in names:
        return names[kind]
    if _of_names(kind):
        return "a list such as [a,b]"
    return (
        "a list such as (1,2)" if typing.get_origin(kind) in (tuple, list, Sequence) else str(kind)
    )
