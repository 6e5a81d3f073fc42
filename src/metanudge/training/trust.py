"""What a file may not decide by itself: which code is imported, what leaves this machine, and what
a terminal is told to do.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from metanudge.training.errors import UserError

if TYPE_CHECKING:
    from metanudge.training.config import TrainConfig

# All control characters but newline and tab, and those that reverse the direction of text.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def own_code(model: str) -> tuple[str, str, str] | None:
    """Module, attribute and options of a model written module:attribute:options; None for one of
    ours.

    Example:
        >>> own_code("my_nets:Net:width=64"), own_code("conv4:channels=32")
        (('my_nets', 'Net', 'width=64'), None)
    """
    module, attribute, options = [*model.split(":", 2), "", ""][:3]
    return (module, attribute, options) if attribute and "=" not in attribute else None


def check_trust(config: TrainConfig, file: Path, *, but: Collection[str] = ()) -> None:
    """Refuse settings from a file that run code or send data away; `but` names those that are not
    the file's word, or not used.
    """
    if "model" not in but and own_code(config.model):
        raise UserError(
            f"{file} names the model {config.model}, and to build it Python code would be imported"
            " and run. Look at the file and at that code first; where you trust both, add --trust"
            " (in Python: trust=True), or, on metanudge train, name the model yourself: --model"
            f" {shlex.quote(config.model)}"
        )
    if "wandb" not in but and config.wandb:
        raise UserError(
            f"{file} has wandb: true, which sends settings and measurements to Weights & Biases."
            " Say yourself whether you want that with --wandb or --no-wandb, or trust the whole"
            " file with --trust (in Python: trust=True)."
        )


def printable(text: str) -> str:
    r"""Text with control characters, which could move a terminal's cursor or rename its window,
    spelled out.

    Example:
        >>> printable("cat\x1b[2J")
        'cat\\x1b[2J'
    """
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)
