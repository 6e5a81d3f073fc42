"""Options that a way of building a source passes on to its constructor."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

Build = TypeVar("Build", bound=Callable[..., Any])


def passes_on(constructor: Callable[..., Any]) -> Callable[[Build], Build]:
    """In a class, before a function with `**options`: its signature, and so what the command line
    reads as its options, gets the constructor's keywords that are not its own.

    Example:
        >>> def constructor(self, data, *, seed: int = 0, noise: float = 1.0): ...
        >>> @passes_on(constructor)
        ... def from_file(cls, path, *, noise: float = 0.0, **options): ...
        >>> inspect.signature(from_file)
        <Signature (cls, path, *, noise: 'float' = 0.0, seed: 'int' = 0)>
    """

    def decorate(build: Build) -> Build:
        signature = inspect.signature(build)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        more = [
            parameter
            for name, parameter in inspect.signature(constructor).parameters.items()
            if parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD)
            and name not in signature.parameters
        ]
        build.__signature__ = signature.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
        build.__annotations__ |= {parameter.name: parameter.annotation for parameter in more}
        return build

    return decorate
