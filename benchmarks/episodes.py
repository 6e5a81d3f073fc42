"""What drawing a meta-batch costs, as a share of the training step that uses it.

python benchmarks/episodes.py --out runs/bench
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import cross_entropy, mse_loss

import metanudge as mn


def median_seconds(work: Callable[[], object], repeats: int) -> float:
    work()
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def own_data(device: str) -> dict[str, tuple[Any, torch.nn.Module, int, mn.FOBMAML]]:
    """Sources as people have them, at the command line's defaults: texts, any number of ways, given
    tasks.
    """
    words = ["".join(random.Random(i).choices("abcdefgh", k=5)) for i in range(60)]
    table = [
        {"text": " ".join([words[c], *random.Random(c * 50 + i).choices(words, k=8)]), "label": c}
        for c in range(40)
        for i in range(50)
    ]
    sizes = {"ways": 5, "shots": 5, "queries": 15, "device": device}
    encoded = mn.tasks.EncodedText.from_table(table, **sizes)
    any_ways = mn.tasks.EncodedText.from_table(table, **{**sizes, "ways": (3, 5)}).with_support()
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(100, 18, 6))).float()
    y = x @ torch.from_numpy(rng.normal(size=(100, 6, 1))).float()
    tasks = [mn.Task((a[:9], b[:9]), (a[9:], b[9:])) for a, b in zip(x, y, strict=True)]
    wide = encoded.input_shape[0]
    return {
        "texts as n-grams, 16 tasks": (encoded, mn.models.FeatureNet(wide), 16, mn.FOBMAML()),
        "the same, 3 to 5 ways": (
            any_ways,
            mn.models.Prototypes(mn.models.FeatureNet(wide)),
            16,
            mn.FOBMAML(),
        ),
        "texts as bytes, 16 tasks": (
            mn.tasks.Text.from_table(table, **sizes),
            mn.models.TextNet(),
            16,
            mn.FOBMAML(nudge="gradient"),
        ),
        "given tasks, 16 a step": (
            mn.tasks.Given(tasks, device=device),
            mn.models.TableNet(6, 1),
            16,
            mn.FOBMAML(),
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cases = {
        "MNIST-1D, Conv1D, 16 tasks": (
            mn.tasks.MNIST1D(seed=0, device=device),
            mn.models.Conv1D(ways=3),
            16,
            mn.FOBMAML(),
        )
    }
    cases |= own_data(device)
    try:
        omniglot = mn.tasks.Omniglot(seed=0, device=device, download=False)
    except FileNotFoundError as error:
        print(f"Omniglot left out: {error}")
    else:
        cases["Omniglot, Conv4, 16 tasks"] = (
            omniglot,
            mn.models.Conv4(ways=5),
            16,
            mn.FOBMAML(nudge="gradient"),
        )
    table = Table(
        "case", "drawing (ms)", "step (ms)", "share", title="Cost of drawing a meta-batch"
    )
    rows = []
    for case, (source, model, size, estimator) in cases.items():
        loss = mse_loss if source.kind == "regression" else cross_entropy
        solver = mn.GradientDescent(lr=0.003 if source.kind == "regression" else 0.1, steps=5)
        learner = mn.MetaLearner(model.to(device), loss, solver=solver, estimator=estimator)
        batches = source.batches(size=size, count=None)
        tasks = next(batches)
        drawing = median_seconds(lambda: next(batches), 50)  # noqa: B023 (called at once)
        step = median_seconds(lambda: learner.meta_gradient(tasks, metrics=False), 3)  # noqa: B023
        rows.append({"case": case, "device": device, "drawing_s": drawing, "step_s": step})
        table.add_row(case, f"{drawing * 1e3:.2f}", f"{step * 1e3:.0f}", f"{drawing / step:.2%}")
    Console().print(table)
    (out / "episodes.json").write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
