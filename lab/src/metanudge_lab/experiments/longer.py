"""Adapting with more steps than in training: what keeps its accuracy, whether that is the estimator
or the mismatch, and why.
"""

from __future__ import annotations

import torch

from metanudge_lab.device_memory import release
from metanudge_lab.experiments.base import Cell, Experiment, Result, Row
from metanudge_lab.experiments.longer_figures import draw, table
from metanudge_lab.experiments.longer_runs import CORE, Config, search, seeds_of, train
from metanudge_lab.experiments.longer_verdict import judge

_known: dict[tuple[str, str, Config], tuple[float, float]] = {}


def cells(config: Config) -> list[Cell]:
    """Learning rates, then the trainings, seed by seed; on each part first of those that the
    verdict needs.
    """
    found: list[Cell] = []
    needed = [one for one, (method, _) in config.trained.items() if method in CORE]
    others = [one for one in config.trained if one not in needed]
    for part, seeds in seeds_of(config).items():
        for group in (needed, others) if seeds else ():
            found += [{"part": part, "what": "rates", "trained": one} for one in group]
            found += [
                {"part": part, "what": "training", "trained": one, "seed": seed}
                for seed in range(seeds)
                for one in group
            ]
    return found


def measure(cell: Cell, config: Config, device: torch.device) -> list[Row]:
    """Find the learning rates on validation tasks; or train, and adapt to test tasks."""
    part, trained = str(cell["part"]), str(cell["trained"])
    release(device)
    rows: list[Row] = []
    if cell["what"] == "rates" or (part, trained, config) not in _known:
        rows = search(part, trained, config, device)
        _known[part, trained, config] = float(rows[-1]["inner"]), float(rows[-1]["rate"])
    if cell["what"] == "rates":
        return rows
    rates = _known[part, trained, config]
    return train(part, trained, rates, int(cell["seed"] or 0), config, device)


def remember(result: Result[Config]) -> None:
    """Learning rates that were found before."""
    for row in result.rows(kind="chosen"):
        key = str(row["part"]), str(row["trained"]), result.config
        _known[key] = float(row["inner"]), float(row["rate"])


EXPERIMENT = Experiment(
    name="longer",
    title="Adapting longer than trained",
    where="not in the paper",
    claim=(
        "Ours: trained with 5 steps, FO-B-MAML keeps its accuracy when it adapts with up to 50,"
        " others lose theirs."
    ),
    config=Config,
    cells=cells,
    measure=measure,
    draw=draw,
    table=table,
    judge=judge,
    remember=remember,
    labels="trained",
    unit=("part", "seed"),
)
