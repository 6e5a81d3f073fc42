"""The language of specs: `NAME`, or `NAME:key=value,key=value`, and the values in it.

    fobmaml:nu=0.1,stencil=forward   gradient_descent:lr=0.1,steps=5   adam:lr=0.01,betas=(0.9,0.99)
    torch_optimizer:optimizer=adam,steps=5,lr=0.01    conv4:channels=32    my_package:Net:width=64

Names match whatever their case, `-` and `_` (`FO-MAML`, `fomaml`). Values are converted to the
types that the target declares, and the target itself judges them. `str` of a parsed spec writes it
in one fixed way, so that two specs mean the same when they are equal.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from metanudge.names import near
from metanudge.training.errors import UserError, refused

_WORDS = {"true": True, "false": False, "none": None, "null": None}
_YES_OR_NO = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
_KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "none",
}
_NO_OPTION = (
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.VAR_KEYWORD,
    inspect.Parameter.POSITIONAL_ONLY,
)
_NO = object()  # "does not fit"; None itself is a value


@dataclass(frozen=True)
class Spec:
    """A name and its options, converted; `str` gives the canonical text.

    Example:
        >>> str(Spec("fobmaml", {"nu": 1e-1, "stencil": "forward"}))
        'fobmaml:nu=0.1,stencil=forward'
    """

    name: str
    options: Mapping[str, Any]

    def __str__(self) -> str:
        options = show_options(self.options)
        return f"{self.name}:{options}" if options else self.name


def normal(name: str) -> str:
    """A name without case, hyphens and underscores."""
    return re.sub(r"[-_\s]", "", name).lower()


def known(name: str, names: Iterable[str], flag: str, what: str) -> str:
    """The name as it is listed, or an error with the nearest one."""
    spelled = {normal(candidate): candidate for candidate in names}
    if normal(name) not in spelled:
        suggestion = near(normal(name), spelled)
        for plain, candidate in spelled.items():
            suggestion = suggestion.replace(f"'{plain}'", f"'{candidate}'")
        raise UserError(
            f"{flag}: there is no {what} {name!r}.{suggestion} The choices are"
            f" {', '.join(spelled.values())}."
        )
    return spelled[normal(name)]


# --- Text to names and raw options


def split(flag: str, text: str) -> tuple[str, dict[str, str]]:
    """Name and raw options of a spec."""
    name, colon, options = text.partition(":")
    if not name.strip():
        raise UserError(f"{flag} {text!r} names nothing. Write NAME or NAME:key=value,key=value.")
    return name.strip(), split_options(options, f"{flag} {name}") if colon else {}


def split_options(text: str, where: str) -> dict[str, str]:
    """`key=value,key=value` as a dict; commas inside brackets and quotes belong to the value.

    Example:
        >>> split_options("hidden=(64,64),activation=tanh", "--model mlp")
        {'hidden': '(64,64)', 'activation': 'tanh'}
    """
    options: dict[str, str] = {}
    for part in _split_commas(text, where):
        key, equals, value = part.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key.isidentifier():
            raise UserError(
                f"{where}: {part.strip()!r} is not an option. Write key=value,key=value."
            )
        if key in options:
            raise UserError(f"{where}: the option {key!r} is given twice. Keep one of them.")
        options[key] = value.strip()
    return options


def _split_commas(text: str, where: str) -> list[str]:
    """The parts of a text between its commas, but for those inside brackets and quotes."""
    parts, depth, quote, begin, escaped = [], 0, "", 0, False
    for place, character in enumerate(text):
        if quote:
            quote = "" if character == quote and not escaped else quote
            escaped = character == "\\" and not escaped
        elif character in "'\"":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[begin:place])
            begin = place + 1
    if depth or quote:
        raise UserError(f"{where}: {text!r} has a bracket or a quote that is not closed.")
    parts.append(text[begin:])
    return [part for part in parts if part.strip()]


# --- Values to text


def show_options(options: Mapping[str, Any]) -> str:
    """Options as `split_options` and `typed` read them back."""
    return ",".join(f"{key}={show(value)}" for key, value in options.items())


def show(value: Any) -> str:
    """A value as `typed` reads it back.

    Example:
        >>> show(0.1), show(True), show((64, 64)), show("tanh"), show("a,b")
        ('0.1', 'true', '(64,64)', 'tanh', "'a,b'")
    """
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, str):
        plain = re.fullmatch(r"[A-Za-z_./~][\w./~+-]*", value) and value.lower() not in _WORDS
        return value if plain else repr(value)
    if isinstance(value, (tuple, list, dict)) and not _holds_text(value):
        return repr(value).replace(", ", ",")
    return repr(value)


def _holds_text(value: Any) -> bool:
    items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return any(
        isinstance(item, str) or (isinstance(item, (tuple, list, dict)) and _holds_text(item))
        for item in items
    )


# --- Text to values


def typed(text: str, hint: Any, where: str) -> Any:
    """A raw value as the declared type; where none fits, an error that says what would."""
    kinds = _alternatives(hint)
    for kind in kinds:
        converted = _try(text, kind)
        if converted is not _NO:
            return converted
    wanted = " or ".join(dict.fromkeys(_spell(kind) for kind in kinds))
    words = [
        str(word)
        for kind in kinds
        if typing.get_origin(kind) is Literal
        for word in typing.get_args(kind)
    ]
    raise UserError(f"{where}={text} is not {wanted}.{near(text, words)}")


def _alternatives(hint: Any) -> list[Any]:
    if hint is None:
        return [Any]
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return [hint]
    found = [kind for part in typing.get_args(hint) for kind in _alternatives(part)]
    if type(None) in found:
        found = [kind for kind in found if kind not in (Any, type(None))] + [type(None)]
    # Tensors and objects have no text. Text fits everything, so it comes last.
    return sorted(
        (kind for kind in found if kind is not torch.Tensor and not dataclasses.is_dataclass(kind)),
        key=lambda kind: kind is str,
    )


def _try(text: str, kind: Any) -> Any:
    origin = typing.get_origin(kind)
    if kind is type(None):
        return None if text.lower() in ("none", "null") else _NO
    if kind is bool:
        return _YES_OR_NO.get(text.lower(), _NO)
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            return _NO
    literal = _names(text) if _of_names(kind) else _literal(text)
    if origin is Literal:
        return literal if literal in typing.get_args(kind) else _NO
    container = origin or kind
    if not isinstance(container, type):
        return literal
    if container is str or issubclass(container, os.PathLike):
        return literal if isinstance(literal, str) else text
    if container in (tuple, list, Sequence):
        if not isinstance(literal, (tuple, list)):
            return _NO
        return list(literal) if container is list else tuple(literal)
    if issubclass(container, Mapping):
        return literal if isinstance(literal, dict) else _NO
    return literal


def _of_names(kind: Any) -> bool:
    """Whether a list or dict holds nothing but names, so that quotes can be left out."""
    parts = [part for part in typing.get_args(kind) if part is not Ellipsis]
    container = typing.get_origin(kind)
    return isinstance(container, type) and bool(parts) and all(map(_is_name, parts))


def _is_name(kind: Any) -> bool:
    if typing.get_origin(kind) is Literal:
        return all(isinstance(word, str) for word in typing.get_args(kind))
    return kind in (str, object) or _of_names(kind)


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
    parts = _split_commas(text[1:-1], "a list")
    if text[0] != "{":
        return [_names(part) for part in parts]
    pairs = [part.partition(":") for part in parts]
    return {str(_names(key)): _names(value) for key, _, value in pairs}


def _literal(text: str) -> Any:
    """Numbers, quoted text, tuples, lists and dicts as Python writes them (true/false/none too);
    anything else is text.
    """
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def _spell(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return " or ".join(map(str, typing.get_args(kind)))
    if kind in _KINDS:
        return _KINDS[kind]
    if _of_names(kind):
        return "a list such as [a,b]"
    if typing.get_origin(kind) in (tuple, list, Sequence):
        return "a list such as (1,2)"
    return str(kind)


# --- Options of a class or function


def options_of(target: Any) -> dict[str, inspect.Parameter]:
    """The options that a class or function takes by name."""
    if isinstance(target, nn.Module):
        return {}
    return {
        name: parameter
        for name, parameter in inspect.signature(target).parameters.items()
        if parameter.kind not in _NO_OPTION and name not in ("self", "params", "options")
    }


def convert(
    raw: Mapping[str, str],
    target: Any,
    flag: str,
    name: str,
    *,
    also: Sequence[str] = (),
    but: Sequence[str] = (),
) -> dict[str, Any]:
    """Raw options as the types that a class or function declares, in the order of its
    declaration.

    Args:
        raw: as they were written.
        target: the class or function.
        flag, name: what they were written after, for messages.
        also: what messages list besides.
        but: what it declares and is no option here.
    """
    declared = [option for option in options_of(target) if option not in but]
    for key in raw:
        if key not in declared:
            choices = [*also, *declared]
            listed = f"Its options are {', '.join(choices)}." if choices else "It has no options."
            raise UserError(f"{flag} {name} has no option {key!r}.{near(key, choices)} {listed}")
    hints = _hints(target)
    return {
        key: typed(raw[key], hints.get(key), f"{flag} {name}: {key}")
        for key in declared
        if key in raw
    }


def _hints(target: Any) -> dict[str, Any]:
    function = target.func if isinstance(target, functools.partial) else target
    if isinstance(function, type):
        function = function.__init__  # type: ignore[misc]
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError):  # a name that only type checkers know
        return {}


def make(flag: str, name: str, target: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a target; what it refuses becomes a `UserError` that names the flag."""
    needed = [
        n
        for n, p in list(inspect.signature(target).parameters.items())[len(args) :]
        if p.default is inspect.Parameter.empty and p.kind not in _NO_OPTION and n not in options
    ]
    if needed:
        example = ",".join(f"{key}=..." for key in needed)
        raise UserError(
            f"{flag} {name} needs the option{'s' * (len(needed) > 1)} {', '.join(needed)}. Write"
            f" {name}:{example}."
        )
    with refused(f"{flag} {name}: ", TypeError, ValueError, ImportError):
        return target(*args, **options)
