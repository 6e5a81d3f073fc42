"""Speed and memory of every estimator on both engines, measured round-robin in one run.

    python benchmarks/engines.py --out runs/bench

Machines are shared: compare the medians of one run with each other, not with another day's.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import metanudge as mn

ESTIMATORS = {
    "FO-B-MAML, loss nudge": mn.FOBMAML(),
    "FO-B-MAML, gradient nudge": mn.FOBMAML(nudge="gradient"),
    "FO-B-MAML, tangent": mn.FOBMAML(stencil="tangent"),
    "MAML": mn.MAML(),
    "FO-MAML": mn.FOMAML(),
    "Reptile": mn.Reptile(),
    "iMAML, 5 CG steps": mn.IMAML(cg_steps=5),
}


def cases() -> dict[str, tuple[torch.nn.Module, mn.TaskBatch]]:
    """The paper's MNIST-1D network, and Omniglot's with random images of its shape."""
    g = torch.Generator().manual_seed(0)
    labels = torch.arange(5).repeat(4, 1)
    images = lambda n: torch.rand(4, n, 1, 28, 28, generator=g)  # noqa: E731
    omniglot = mn.TaskBatch((images(5), labels), (images(25), labels.repeat(1, 5)))
    mnist1d = next(iter(mn.tasks.MNIST1D(seed=0).batches(size=16, count=1)))
    return {
        "Conv1D, MNIST-1D, 16 tasks": (mn.models.Conv1D(ways=3), mnist1d),
        "Conv4-32, Omniglot shapes, 4 tasks": (mn.models.Conv4(ways=5, channels=32), omniglot),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each case, interleaved")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    rows = []
    for case, (model, tasks) in cases().items():
        learners = {
            (name, engine): mn.MetaLearner(model, torch.nn.functional.cross_entropy, estimator=estimator, engine=engine)
            for name, estimator in ESTIMATORS.items()
            for engine in estimator.engines
        }
        seconds: dict[tuple[str, str], list[float]] = {key: [] for key in learners}
        for round_ in track(range(options.rounds + 1), description=case, console=console):
            for key, learner in learners.items():
                begin = time.perf_counter()
                learner.meta_gradient(tasks, metrics=False)
                if round_:  # the first round warms up
                    seconds[key].append(time.perf_counter() - begin)
        unit = min(statistics.median(s) for (name, _), s in seconds.items() if name == "FO-MAML")
        table = Table(title=f"{case}: time of a meta-gradient, FO-MAML's faster engine = 1")
        for column in ("estimator", *("stacked", "inplace")):
            table.add_column(column, justify="left" if column == "estimator" else "right")
        for name in ESTIMATORS:
            ratios = [seconds.get((name, engine)) for engine in ("stacked", "inplace")]
            table.add_row(name, *("–" if s is None else f"{statistics.median(s) / unit:.2f}" for s in ratios))
        console.print(table)
        rows += [
            {"case": case, "estimator": n, "engine": e, "median_s": statistics.median(s), "spread_s": max(s) - min(s)}
            for (n, e), s in seconds.items()
        ]
    machine = {"torch": torch.__version__, "threads": torch.get_num_threads(), "processor": platform.machine()}
    (options.out / "engines.json").write_text(json.dumps({"machine": machine, "rows": rows}, indent=2))
    console.print(f"Numbers: {options.out / 'engines.json'}")


if __name__ == "__main__":
    main()
