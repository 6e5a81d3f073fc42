"""What a file may not decide by itself: which code is imported, and what leaves this machine."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from pathlib import Path

from metanudge.training.config import TrainConfig, flag, own_code
from metanudge.training.errors import UserError

CODE = ("data", "model", "loss", "query_loss", "metrics", "optimizer", "augment")
"""What may name code of the user's own, as module:attribute."""
FETCHED = ("encoder", "tokenizer")
"""What may name something that is fetched, or one of `OURS`."""
OURS = ("bytes", "ngrams")


def named_code(config: TrainConfig) -> dict[str, str]:
    """The settings that name code, with their values.

    Example:
        >>> named_code(TrainConfig("mnist1d", loss="my:focal", metrics="mae=my:mae"))
        {'loss': 'my:focal', 'metrics': 'mae=my:mae'}
    """
    values = {name: getattr(config, name) for name in CODE}
    return {
        name: value
        for name, value in values.items()
        if own_code(value) or (name == "metrics" and value)
    }


def check_trust(config: TrainConfig, file: Path, *, but: Collection[str] = ()) -> None:
    """Refuse settings from a file that run code or send data away; `but` names those that are not
    the file's word, or not used.
    """
    for setting, value in named_code(config).items():
        if setting not in but:
            what, said = setting.replace("_", " "), "" if setting == "data" else f"{flag(setting)} "
            why = (
                "which would be read, or fetched where it is no folder here. None of its code would"
                " be run. Where you trust the file and those weights"
                if value.startswith("hf:")
                else "and to build it Python code would be imported and run. Look at the file and"
                " at that code first; where you trust both"
            )
            raise UserError(
                f"{file} names the {what} {value}, {why}, add --trust (in Python: trust=True), or,"
                f" on metanudge train, name the {what} yourself: {said}{shlex.quote(value)}"
            )
    for setting in FETCHED:
        name = None if setting in but else getattr(config, setting)
        if name not in (None, *OURS) and not Path(name).is_dir():
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
