"""What `metanudge train photos/ --shots 5` has learned on one CPU core after some minutes, with the
defaults and with one of them changed at a time.

    python lab/examples/first_minutes.py photos/ --out results

`photos/` is a folder of classes; where it is not there, it is made of 200 characters of Omniglot
from $METANUDGE_DATA. Time is the process's own CPU time, validation and test left out, so that
other work on the machine does not count. Writes `first_minutes.json`, a variant at a time, and goes
on where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from metanudge.baselines import Comparison, measure
from metanudge.training import sources, specs
from metanudge.training.config import TrainConfig
from metanudge.training.loop import Course, Trainer
from metanudge_lab.provenance import provenance

DEFAULTS = "the defaults"
VARIANTS: dict[str, dict[str, Any]] = {
    DEFAULTS: {},
    "a head of its own": {"head": "fixed"},
    "FO-B-MAML": {"estimator": "fobmaml"},
    "16 tasks": {"tasks": 16},
    "pictures of 84 pixels, 64 channels": {"data_options": "image_size=84", "model": "conv4"},
}


@dataclass(frozen=True)
class Config:
    classes: int = 200
    seconds: float = 60
    longest: float = 180  # of the defaults
    test_tasks: int = 60


def characters(folder: Path, classes: int) -> None:
    """Pictures of Omniglot as a user has them: a folder for each of some characters."""
    archive = Path(os.environ["METANUDGE_DATA"]) / "omniglot" / "images_background.zip"
    with zipfile.ZipFile(archive) as pictures:
        names = [n for n in pictures.namelist() if n.endswith(".png") and "__MACOSX" not in n]
        found = sorted({tuple(name.split("/")[1:3]) for name in names})
        chosen = set(random.Random(0).sample(found, classes))
        for name in names:
            alphabet, character, file = name.split("/")[1:]
            if (alphabet, character) in chosen:
                place = folder / f"{alphabet}-{character}"
                place.mkdir(parents=True, exist_ok=True)
                (place / file).write_bytes(pictures.read(name))


def run(photos: Path, config: Config, name: str) -> list[dict[str, Any]]:
    """Train, and test after each time."""
    asked, cpu = TrainConfig(str(photos), shots=5, **VARIANTS[name]), torch.device("cpu")
    asked = sources.for_device(asked, cpu)
    source = sources.build_source(asked, device=cpu)
    how = sources.resolve(asked, source)
    learner = sources.build_learner(how, source)
    optimizer = specs.build_optimizer(how.optimizer, learner.parameters())
    trainer = Trainer(learner, source, optimizer, Course(1_000_000, how.tasks, seed=how.seed))
    beside = measure(source, config.test_tasks)
    times = [config.seconds, *([config.longest] if name == DEFAULTS else [])]
    rows, spent = [], 0.0
    for until in times:
        began, trainer.done = time.process_time() - spent, False

        def look(_step: int, _values: Any, began: float = began, until: float = until) -> None:
            trainer.done = time.process_time() - began >= until

        trainer.on_step = look
        trainer.run()
        spent = time.process_time() - began
        began = time.process_time()
        result = trainer.evaluate("test", config.test_tasks)
        compared = Comparison("classification", result.accuracy, beside)
        rows.append({
            "variant": name, "until": until, "seconds": spent, "steps": trainer.step,
            "accuracy": result.mean_accuracy, "ci95": result.accuracy_ci95,
            "test_seconds": time.process_time() - began,
            "baselines": compared.as_dict(), "model": how.model, "estimator": how.estimator,
            "tasks": how.tasks, "head": how.head,
        })  # fmt: skip
        print(f"{name}: {trainer.step} steps in {spent:.0f} s, {result.mean_accuracy:.2%}")
    return rows


def main(argv: list[str] | None = None, config: Config | None = None) -> int:
    """Measure what is not measured yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--out", type=Path, default=Path("results"))
    arguments = parser.parse_args(argv)
    config = config or Config()
    torch.set_num_threads(1)
    if not arguments.photos.exists():
        characters(arguments.photos, config.classes)
    file = arguments.out / "first_minutes.json"
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.is_file() else []
    for name in VARIANTS:
        if name not in {row["variant"] for row in rows}:
            rows += run(arguments.photos, config, name)
            about = {"config": asdict(config), "machine": provenance(torch.device("cpu"))}
            text = json.dumps({**about, "rows": rows}, indent=2)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
