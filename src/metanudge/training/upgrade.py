"""Settings from a file: of the right types, and those that an earlier version recorded in today's
words: what it did by default is written out, so a run stays what it was.
"""

from __future__ import annotations

import re
import reprlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from metanudge.names import near
from metanudge.training.errors import UserError, check_text, count
from metanudge.training.files import parse_json
from metanudge.version import __version__

_RELEASE = re.compile(r"(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?(?:[.+-]?[a-z][a-z0-9.+-]*)?", re.ASCII)
_UNRECORDED = "0.1"  # wrote no version

# What version 0.1 did with data of the user's own where nothing else was said.
_DATA_SETS_0_1 = ("mnist1d", "omniglot", "sinusoid")
_TABLE_0_1 = {"delimiter": "','", "standardise": "false"}
_STEP_0_1 = {"tasks": 16, "estimator": "fobmaml", "head": "fixed", "patience": 0}
_FOLDER_0_1 = {"image_size": "28", "grey": "true"}


def parsed(text: str | bytes, where: str) -> dict[str, Any]:
    """The object with settings that a JSON document holds."""
    try:
        values = parse_json(text)
    except ValueError as error:
        raise UserError(
            f"{where} is not valid JSON ({error}). Correct it, or write a new one."
        ) from error
    if not isinstance(values, dict):
        raise UserError(
            f"{where} holds a {type(values).__name__}, not an object with settings. Use a run's"
            " config.json."
        )
    return values


def settings(values: Mapping[str, Any], kinds: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values, each of them known and of the type that it should have."""
    for key in values:
        if key not in kinds:
            raise UserError(
                f"{where} has an unknown setting {reprlib.repr(key)}.{near(key, kinds)} Correct"
                " or remove it."
            )
    checked = {key: typed(key, value, kinds[key], where) for key, value in values.items()}
    for key, value in checked.items():
        check_text(f"{where}: {key}", value)
    for key in ("ways", "shots"):
        count(f"{where}: {key}", checked.get(key))
    return checked


def upgrade(values: Mapping[str, Any], version: object, *, where: str) -> dict[str, Any]:
    """The settings that `version` recorded (None: 0.1) as today's; `UserError` for a version that
    is newer than this one.
    """
    found = _release(_UNRECORDED if version is None else version, where)
    if found > _release(__version__, where):
        raise UserError(
            f"{where} was written by metanudge {version}, and this is {__version__}. Use metanudge"
            f" {version} or a newer one."
        )
    if (
        found < (0, 2, 0)
        and isinstance(values.get("data", ""), str)
        and isinstance(values.get("data_options", ""), str)
    ):
        data, options = values.get("data", ""), values.get("data_options", "")
        return {**_STEP_0_1, **values, "data_options": _with(options, _defaults_0_1(data))}
    return dict(values)


def _release(version: object, where: str) -> tuple[int, ...]:
    match = _RELEASE.fullmatch(version) if isinstance(version, str) else None
    if match is None:
        raise UserError(
            f"{where}: version is {version!r}, which no metanudge has. Put back what was there,"
            f" such as {__version__!r}."
        )
    return tuple(int(part or 0) for part in match.groups())


def _defaults_0_1(data: str) -> dict[str, str]:
    if not data or re.sub(r"[-_\s]", "", data).lower() in _DATA_SETS_0_1:
        return {}
    return _TABLE_0_1 if Path(data).suffix.lower() in (".csv", ".tsv") else _FOLDER_0_1


def _with(options: str, defaults: Mapping[str, str]) -> str:
    """The options, and the defaults of those that are not among them."""
    given = {key.replace("-", "_") for key in re.findall(r"(?:^|,)\s*([\w-]+)\s*=", options)}
    return ",".join(
        [
            *filter(None, [options]),
            *(f"{key}={value}" for key, value in defaults.items() if key not in given),
        ]
    )


def typed(name: str, value: Any, kind: Any, where: str) -> Any:
    """`value` if it has the field's type (a whole number may stand for a float), else an error that
    names the field.
    """
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            choices = ", ".join(get_args(kind))
            raise UserError(
                f"{where}: {name} is {reprlib.repr(value)}.{near(str(value), get_args(kind))}"
                f" Choose one of: {choices}."
            )
        return value
    kinds = get_args(kind) or (kind,)
    if type(value) in (int, float) and float in kinds:
        if not -sys.float_info.max <= value <= sys.float_info.max:
            raise UserError(
                f"{where}: {name} is a number beyond ±{sys.float_info.max:.1e}. Give one that a"
                " float can hold."
            )
        return float(value)
    if type(value) not in kinds:
        wanted = " or ".join(
            {int: "a whole number", float: "a number", str: "text", bool: "true or false"}.get(
                k, "null"
            )
            for k in kinds
        )
        raise UserError(f"{where}: {name} is {reprlib.repr(value)}. It must be {wanted}.")
    return value
