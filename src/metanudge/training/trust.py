"""What a file may not decide by itself: which code is imported, and what leaves this machine."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from pathlib import Path

from metanudge.training.config import TrainConfig, own_code
from metanudge.training.errors import UserError


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
    for setting in ("encoder", "tokenizer"):
        name = None if setting in but else getattr(config, setting)
        if name is not None and name != "bytes" and not Path(name).is_dir():
            raise UserError(
                f"{file} names {name}, which is no folder here and might be fetched. Where you"
                " trust the file, add --trust (in Python: trust=True)."
            )
    if "wandb" not in but and config.wandb:
        raise UserError(
            f"{file} has wandb: true, which sends settings and measurements to Weights & Biases."
            " Say yourself whether you want that with --wandb or --no-wandb, or trust the whole"
            " file with --trust (in Python: trust=True)."
        )
