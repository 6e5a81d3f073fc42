"""What drawing a meta-batch costs, as a share of the training step that uses it.

python benchmarks/episodes.py --out runs/bench
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

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
        learner = mn.MetaLearner(
            model.to(device), torch.nn.functional.cross_entropy, estimator=estimator
        )
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
