"""Text ↔ names and options: `NAME`, or `NAME:key=value,key=value`. Values stay text here; their
types are the target's affair.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from metanudge.names import near
from metanudge.training.errors import UserError


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
        options = ",".join(f"{key}={show(value)}" for key, value in self.options.items())
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
    for part in split_commas(text, where):
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


def split_commas(text: str, where: str) -> list[str]:
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


def show(value: Any) -> str:
    """A value as `convert` reads it back.

    Example:
        >>> show(0.1), show(True), show((64, 64)), show("tanh"), show("a,b")
        ('0.1', 'true', '(64,64)', 'tanh', "'a,b'")
    """
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, str):
        plain = re.fullmatch(r"[A-Za-z_./~][\w./~+-]*", value) and value.lower() not in (
            "true",
            "false",
            "none",
            "null",
        )
        return value if plain else repr(value)
    if isinstance(value, (tuple, list, dict)):
        return repr(value).replace(", ", ",") if not _holds_text(value) else repr(value)
    return repr(value)


def _holds_text(value: Any) -> bool:
    items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return any(
        isinstance(item, str) or (isinstance(item, (tuple, list, dict)) and _holds_text(item))
        for item in items
    )
