"""The flags of a command, parsed into its dataclass."""

from __future__ import annotations

from inspect import cleandoc
from typing import TypeVar

import tyro

Options = TypeVar("Options")


def parse(options: type[Options], command: str, argv: list[str], examples: str = "") -> Options:
    """What the flags say; `--help` shows the dataclass's docstring and the examples."""
    description = f"{cleandoc(options.__doc__ or '')}\n{examples}"
    return tyro.cli(options, args=argv, prog=f"metanudge {command}", description=description)
