"""`metanudge train`: the flags of a run, and the run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import tyro

from metanudge.training import output
from metanudge.training.config import TrainConfig
from metanudge.training.errors import UserError, exit_codes

HELP = "meta-train a few-shot learner, or resume a run"

_DESCRIPTION = """Meta-train a few-shot learner: metanudge train DATA [OPTIONS]

Examples:

  metanudge train mnist1d
  metanudge train omniglot --ways 20 --shots 1 --estimator fobmaml:nu=0.1,nudge=gradient
  metanudge train photos/ --model conv4:channels=32 --optimizer adamw:lr=0.003 --schedule cosine
  metanudge train --config runs/a/config.json --seed 1 --out runs/b
  metanudge train --resume runs/a

A run whose output nobody reads any more (| head) goes on; what it writes is in its folder.

Exit codes: {codes}"""


@dataclass(frozen=True)
class Arguments:
    """What `metanudge train` takes: a configuration, and where to take it from."""

    train: tyro.conf.OmitArgPrefixes[TrainConfig]
    resume: Path | None = None
    """Continue this run, bit for bit (or one of its checkpoints: RUN/checkpoints/NAME). DATA is not needed then."""
    config: Path | None = None
    """Take all settings from this file, such as another run's config.json; flags override it."""


def parse(argv: list[str]) -> tuple[TrainConfig, Path | None]:
    """Configuration and run to resume."""
    base = TrainConfig()
    resume, file = _path(argv, "--resume"), _path(argv, "--config")
    if resume is not None and file is not None:
        raise UserError("--resume and --config contradict each other: a run has its own configuration. Leave one of them out.")
    if resume is not None:
        base = _saved(resume)
    elif file is not None:
        if not file.is_file():
            raise UserError(f"--config {file}: there is no such file. Give a run's config.json, or leave it out.")
        base = dataclasses.replace(TrainConfig.from_json(file.read_text(encoding="utf-8"), where=str(file)), out=None)
    arguments = tyro.cli(
        Arguments,
        args=argv,
        prog="metanudge train",
        description=_DESCRIPTION.format(codes=exit_codes()),
        default=Arguments(base, resume, file),
    )
    return arguments.train, arguments.resume


def _path(argv: list[str], name: str) -> Path | None:
    """The value of a flag that must be known before the others can be parsed."""
    for place, argument in enumerate(argv):
        if argument == name and place + 1 < len(argv):
            return Path(argv[place + 1])
        if argument.startswith(f"{name}="):
            return Path(argument.removeprefix(f"{name}="))
    return None


def _saved(resume: Path) -> TrainConfig:
    # Like `runs.read_config`, which needs torch; a wrong path should be told at once.
    folder = resume.parent.parent if resume.parent.name == "checkpoints" and not (resume / "config.json").exists() else resume
    file = folder / "config.json"
    if not file.is_file():
        what = "is not a run: it has no config.json" if folder.is_dir() else "does not exist"
        raise UserError(f"--resume {resume}: {folder} {what}. Give the folder that metanudge train wrote.")
    return TrainConfig.from_json(file.read_text(encoding="utf-8"), where=str(file))


def run(argv: list[str]) -> int:
    """Parse the flags and train."""
    config, resume = parse(argv)
    config.check()
    if not config.data:
        raise UserError(
            "What should be trained on? Name the data: metanudge train mnist1d (or omniglot, sinusoid, a folder with one sub-folder "
            "per class, a .csv file)."
        )
    from metanudge.training.trainer import train  # loads torch, which --help must not wait for

    output.going_on()
    return train(config, resume=resume)
