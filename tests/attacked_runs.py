"""What the attacks share: a small genuine run, the commands that a user would give it to, and a
command line that does not exit.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from metanudge.cli import main
from metanudge.training.checkpoint import load, save
from metanudge.training.files import SEAL, seal
from trained_runs import vector_table

TINY = [
    "--ways", "3", "--shots", "2", "--queries", "2", "--model", "mlp:hidden=(4,)", "--solver",
    "gradient_descent:lr=0.1,steps=1",
    "--tasks", "2", "--iterations", "2", "--eval-every", "1", "--eval-tasks", "2", "--test-tasks",
    "2", "--device", "cpu",
]  # fmt: skip
COMMANDS = ("eval", "adapt", "resume", "config")


def call(*arguments: str) -> int:
    """The exit code of the command line."""
    try:
        return main(list(arguments))
    except SystemExit as left:  # how the flag parser leaves
        return left.code if isinstance(left.code, int) else -1


def genuine_run(folder: Path) -> Path:
    """A finished run in FOLDER/run on the table FOLDER/table.csv; FOLDER/few.csv has three classes
    to adapt to.
    """
    table = vector_table(folder / "table.csv", classes=20, each=4, features=3)
    vector_table(folder / "few.csv", classes=3, each=2, features=3)
    assert call("train", str(table), *TINY, "--out", str(folder / "run")) == 0
    return folder / "run"


def copied(run: Path, to: Path) -> Path:
    """A run to spoil."""
    return Path(shutil.copytree(run, to))


def rewrite(run: Path, **changes: Any) -> Path:
    """Write other settings into a run, as a stranger would: into config.json and into every
    checkpoint, sealed anew.
    """
    file = run / "config.json"
    settings = {
        key: value for key, value in (json.loads(file.read_text()) | changes).items() if key != SEAL
    }
    file.write_text(seal(settings, indent=2))
    for folder in (run / "checkpoints").iterdir():
        old = load(folder)
        shutil.rmtree(folder)
        save(
            folder,
            step=old.step,
            tensors=old.tensors,
            state=old.state | {"config": old.state["config"] | changes},
        )
    return run


def arguments(command: str, run: Path, few: Path) -> list[str]:
    """What a user types who was given a run folder."""
    return {
        "eval": ["eval", str(run), "--tasks", "2", "--device", "cpu"],
        "adapt": [
            "adapt",
            str(run),
            "--support",
            str(few),
            "--predict",
            str(few),
            "--out",
            "labels.csv",
            "--device",
            "cpu",
        ],
        "resume": ["train", "--resume", str(run), "--iterations", "3"],
        "config": ["train", "--config", str(run / "config.json"), "--out", "another"],
    }[command]
