"""Small runs for the tests of what comes after training: made with the library's own parts, in the
layout of `metanudge train`.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from metanudge.tasks import Omniglot
from metanudge.tasks.omniglot_files import load_omniglot
from metanudge.training import runs, sources
from metanudge.training.checkpoint import CheckpointStore
from metanudge.training.config import TrainConfig
from metanudge.training.device import device_called
from metanudge.training.sources import for_device
from metanudge.training.specs import build_optimizer, parameter_groups

_NAMED = os.environ.get("METANUDGE_DATA")
DATA = Path(_NAMED) if _NAMED else Path(__file__).resolve().parents[1].parent / "shared" / "data"


def make_run(folder: Path, config: TrainConfig, *, iterations: int = 0) -> Path:
    """A run folder with one checkpoint after some meta-steps."""
    config = for_device(config, device_called(config.device))
    source = runs.build_source(config)
    config = sources.resolve(config, source)
    learner = runs.build_learner(config, source)
    optimizer = build_optimizer(config.optimizer, parameter_groups(learner, None))
    for tasks in source.batches(size=config.tasks, count=iterations):
        optimizer.zero_grad()
        learner.backward(tasks, metrics=False)
        optimizer.step()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config.to_json())
    CheckpointStore(folder / "checkpoints").save(
        iterations,
        {"model": learner.model.state_dict()},
        {"shapes": runs.DataShapes.of(source).to_dict()},
        best=True,
    )
    return folder


def vector_table(
    path: Path,
    *,
    classes: int = 12,
    each: int = 12,
    features: int = 6,
    seed: int = 0,
    first: int = 0,
) -> Path:
    """A table of well separated clusters of numbers, one per class, named c00, c01, …"""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(99).normal(size=(100, features)) * 3
    lines = [",".join([*(f"x{i}" for i in range(features)), "label"])]
    for c in range(first, first + classes):
        for row in centres[c] + 0.3 * rng.normal(size=(each, features)):
            lines.append(",".join([*(f"{v:.6f}" for v in row), f"c{c:02d}"]))
    path.write_text("\n".join(lines) + "\n")
    return path


def vector_run(folder: Path, table: Path, **changes: object) -> Path:
    """An untrained run on `vector_table`: 3 ways, an MLP. Adaptation alone tells such clusters
    apart.
    """
    config = TrainConfig(
        data=str(table),
        ways=3,
        shots=3,
        queries=5,
        model="mlp:hidden=(16,)",
        lam=0.1,
        solver="gradient_descent:lr=0.2,steps=20",
    )
    return make_run(folder, TrainConfig(**(config.to_dict() | changes)))


def omniglot_folder() -> Path:
    """The folder with Omniglot; skips the test where it is not."""
    if not (DATA / "omniglot").is_dir():
        pytest.skip(f"Omniglot is not in {DATA}; set METANUDGE_DATA to its folder")
    return DATA / "omniglot"


def omniglot_run(folder: Path, **changes: object) -> Path:
    """A quickly trained run on Omniglot; made once and kept in `folder`."""
    root = omniglot_folder()
    if not (folder / "config.json").is_file():
        config = TrainConfig(
            data="omniglot", ways=5, shots=5, queries=5,
            data_options=f"root={str(root)!r},rotations=false", model="conv4:channels=32",
            lam=0.1, solver="gradient_descent:lr=0.1,steps=5", estimator="fomaml",
            optimizer="adam:lr=0.005", tasks=4, engine="inplace",
        )  # fmt: skip
        make_run(folder, TrainConfig(**(config.to_dict() | changes)), iterations=40)
    return folder


def character_folders(
    root: Path, *, ways: int, shots: int, queries: int, seed: int
) -> tuple[Path, Path]:
    """PNGs of characters that no training task has shown: `root/support/NAME/n.png` and
    `root/predict/NAME/n.png`, ink dark on light.
    """
    source = Omniglot(root=omniglot_folder(), rotations=False)
    names = list(source.classes("test"))
    arrays = load_omniglot(omniglot_folder())
    rng = np.random.default_rng(seed)
    for c in rng.choice(len(names), ways, replace=False):
        drawings = arrays.images[arrays.names.index(names[c])][rng.permutation(20)]
        for part, images in (
            ("support", drawings[:shots]),
            ("predict", drawings[shots : shots + queries]),
        ):
            folder = root / part / names[c].replace("/", "-")
            folder.mkdir(parents=True)
            for n, image in enumerate(images):
                Image.fromarray(255 - image).save(folder / f"{n}.png")
    return root / "support", root / "predict"


def write_images(
    root: Path, classes: list[str], each: int, *, size: int = 20, seed: int = 0
) -> Path:
    """Random grey pictures, one sub-folder per class."""
    rng = np.random.default_rng(seed)
    for name in classes:
        (root / name).mkdir(parents=True)
        for n in range(each):
            Image.fromarray(rng.integers(0, 256, (size, size), dtype=np.uint8)).save(
                root / name / f"{n}.png"
            )
    return root
