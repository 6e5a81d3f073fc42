"""The flags of a command, parsed into its dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import cleandoc
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import tyro

Options = TypeVar("Options")


@dataclass(frozen=True, kw_only=True)
class OfARun:
    """What a command that uses a trained run takes."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The folder that metanudge train wrote."""

    checkpoint: str = "best"
    """Which weights: best, last, or a step that was saved."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""

    trust: bool = False
    """Import and run the code that the run's config.json names (model, data, loss … as
    module:attribute). Look at it first.
    """


def parse(options: type[Options], command: str, argv: list[str], examples: str = "") -> Options:
    """What the flags say; `--help` shows the dataclass's docstring and the examples."""
    description = f"{cleandoc(options.__doc__ or '')}\n{examples}"
    return tyro.cli(options, args=argv, prog=f"metanudge {command}", description=description)
