"""`metanudge train`: the flags of a run, and the run."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import tyro

from metanudge.cli.program import going_on
from metanudge.training.config import TrainConfig, flag
from metanudge.training.errors import ChangedError, UserError, exit_codes
from metanudge.training.trust import CODE, FETCHED, check_trust

_DESCRIPTION = """Meta-train a few-shot learner: metanudge train DATA [OPTIONS]

Examples:

  metanudge train mnist1d
  metanudge train omniglot --ways 20 --shots 1 --estimator fobmaml:nu=0.1,nudge=gradient
  metanudge train photos/ --model conv4:channels=32 --optimizer adamw:lr=0.003 --schedule cosine
  metanudge train schools.csv --task-column school --target score --support 0.5
  metanudge train intents.csv --text text --label intent --encoder minilm/
  metanudge train --config runs/a/config.json --seed 1 --out runs/b
  metanudge train --resume runs/a

A run whose output nobody reads any more (| head) goes on; what it writes is in its folder.

Exit codes: {codes}"""


@dataclass(frozen=True)
class Arguments:
    """What `metanudge train` takes: a configuration, and where to take it from."""

    train: tyro.conf.OmitArgPrefixes[TrainConfig]
    resume: Path | None = None
    """Continue this run, bit for bit (or one of its checkpoints: RUN/checkpoints/NAME). DATA is not
    needed then.
    """
    config: Path | None = None
    """Take all settings from this file, such as another run's config.json; flags override it."""
    trust: bool = False
    """Obey the file of --resume or --config also where it names code to import (module:attribute)
    or logs to wandb. Look at it first: its code runs as you. What you name yourself with a flag
    needs no trust.
    """
    allow_changed_data: bool = False
    """With --resume: go on although the .csv file or folder is not what it was. It is another run
    from there on.
    """


def parse(
    argv: list[str], *, prog: str = "metanudge train", description: str = _DESCRIPTION
) -> Arguments:
    """Configuration, run to resume, and what is allowed."""
    base, origin = TrainConfig(), None
    resume, file = _path(argv, "--resume"), _path(argv, "--config")
    if resume is not None and file is not None:
        raise UserError(
            "--resume and --config contradict each other: a run has its own configuration. Leave"
            " one of them out."
        )
    if resume is not None:
        origin = _config_of(resume)
        base = _saved(origin)
    elif file is not None:
        origin = file
        if not os.path.lexists(file):
            raise UserError(
                f"--config {file}: there is no such file. Give a run's config.json, or leave it"
                " out."
            )
        base = dataclasses.replace(TrainConfig.read(file), out=None)
    arguments = tyro.cli(
        Arguments,
        args=argv,
        prog=prog,
        description=description.format(codes=exit_codes()),
        default=Arguments(base, resume, file),
    )
    if origin is not None and not arguments.trust:
        check_trust(arguments.train, origin, but=_given(argv, arguments.train))
    return arguments


def _given(argv: list[str], config: TrainConfig) -> set[str]:
    """The settings whose value comes from the command line, among those that a file is not trusted
    with.
    """
    named = {f"{word}={value}" for word, value in pairwise(argv)} | set(argv)
    words = {name: f"{flag(name)}={getattr(config, name)}" for name in (*CODE, *FETCHED)}
    words |= {"wandb": "--wandb", "data": config.data}
    return {name for name, word in words.items() if word in named}


def _path(argv: list[str], name: str) -> Path | None:
    """The value of a flag that must be known before the others can be parsed."""
    for place, argument in enumerate(argv):
        if argument == name and place + 1 < len(argv):
            return Path(argv[place + 1])
        if argument.startswith(f"{name}="):
            return Path(argument.removeprefix(f"{name}="))
    return None


def _config_of(resume: Path) -> Path:
    # Like `runs.read_config`, which needs torch; a wrong path should be told at once.
    folder = resume
    if resume.parent.name == "checkpoints" and not (resume / "config.json").exists():
        folder = resume.parent.parent
    file = folder / "config.json"
    if not os.path.lexists(file):
        what = "is not a run: it has no config.json" if folder.is_dir() else "does not exist"
        raise UserError(
            f"--resume {resume}: {folder} {what}. Give the folder that metanudge train wrote."
        )
    return file


def _saved(file: Path) -> TrainConfig:
    try:
        return TrainConfig.read(file)
    except ChangedError as changed:
        return changed.config  # `train` refuses it, and can say which setting differs


def run(argv: list[str]) -> int:
    """Parse the flags and train."""
    arguments = parse(argv)
    config = arguments.train
    config.check()
    if not config.data:
        raise UserError(
            "What should be trained on? Name the data: metanudge train mnist1d (or omniglot,"
            " sinusoid, a folder with one sub-folder per class, a .csv file)."
        )
    from metanudge.training.trainer import train  # loads torch, which --help must not wait for

    going_on()
    return train(config, resume=arguments.resume, allow_changed_data=arguments.allow_changed_data)
