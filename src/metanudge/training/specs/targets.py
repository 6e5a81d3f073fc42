"""What a spec is for: a class or function that declares its options and judges their values."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from metanudge.names import near
from metanudge.training.errors import UserError
from metanudge.training.specs.values import typed


def convert(
    raw: Mapping[str, str], target: Any, flag: str, name: str, *, also: Sequence[str] = ()
) -> dict[str, Any]:
    """Raw options as the types that a class or function declares, in the order of its
    declaration.
    """
    declared = parameters(target)
    for key in raw:
        if key not in declared:
            choices = [*also, *declared]
            listed = f"Its options are {', '.join(choices)}." if choices else "It has no options."
            raise UserError(f"{flag} {name} has no option {key!r}.{near(key, choices)} {listed}")
    return {
        key: typed(raw[key], hint, f"{flag} {name}: {key}")
        for key, hint in declared.items()
        if key in raw
    }


def parameters(target: Any) -> dict[str, Any]:
    """The options that a target takes, with their types (None where nothing is declared)."""
    if isinstance(target, nn.Module):
        return {}
    signature = inspect.signature(target)
    function = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError):  # a name that only type checkers know
        hints = {}
    fixed = (
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.VAR_KEYWORD,
        inspect.Parameter.POSITIONAL_ONLY,
    )
    return {
        n: hints.get(n)
        for n, p in signature.parameters.items()
        if p.kind not in fixed and n not in ("self", "params", "options")
    }


def make(flag: str, name: str, target: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call a target; what it refuses becomes a `UserError` that names the flag."""
    needed = [
        n
        for n, p in list(inspect.signature(target).parameters.items())[len(args) :]
        if _required(p) and n not in options
    ]
    if needed:
        example = ",".join(f"{key}=..." for key in needed)
        raise UserError(
            f"{flag} {name} needs the option{'s' * (len(needed) > 1)} {', '.join(needed)}. Write"
            f" {name}:{example}."
        )
    try:
        return target(*args, **options)
    except (TypeError, ValueError, ImportError) as error:
        raise UserError(f"{flag} {name}: {error}") from error


def _required(parameter: inspect.Parameter) -> bool:
    variadic = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and not variadic
