"""Figure 3, right: peak memory of a meta-step against the width of a Transformer block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from metanudge.models import TransformerBlock
from metanudge_lab.experiments import memory
from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.base import Cell, Drawing, Experiment, Result, Row, Table, Verdict

AT = "width {}"


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of a task."""

    widths: tuple[int, ...] = (64, 128, 256, 512)
    length: int = 128
    heads: int = 8
    hidden: int = 512
    steps: int = m.STEPS
    ways: int = 5
    shots: int = 5
    queries: int = 5

    @classmethod
    def quick(cls) -> Config:
        """Half a minute."""
        return cls(widths=(32, 64, 128), length=64, hidden=128, steps=2, shots=2, queries=2)

    @classmethod
    def full(cls) -> Config:
        """Half a minute on a GPU."""
        return cls()


def cells(config: Config) -> list[Cell]:
    """One for each width and method."""
    return memory.cells("width", config.widths)


def measure(cell: Cell, config: Config, device: torch.device) -> list[Row]:
    """Bytes at the peak."""
    width, length = int(cell["width"] or 0), config.length
    options: dict[str, Any] = {"heads": config.heads, "hidden": config.hidden, "length": length}
    model = m.seeded(
        0, lambda: TransformerBlock(ways=config.ways, d_model=width, **options), device
    )
    task = memory.random_task(
        (length, width), ways=config.ways, shots=config.shots, queries=config.queries, device=device
    )
    return [
        memory.measure_step(str(cell["method"]), model, task, steps=config.steps, device=device)
    ]


def draw(result: Result[Config]) -> list[Drawing]:
    """Memory against width."""
    return memory.draw(result, "width", "width of the model", AT)


def table(result: Result[Config]) -> Table:
    """Memory at every width."""
    return memory.table(result, "width", AT)


def judge(result: Result[Config]) -> Verdict:
    """As in `metanudge_lab.experiments.memory`."""
    return memory.judge(result, "width", AT)


EXPERIMENT = Experiment(
    name="memory-width",
    title="Memory against the width of a Transformer",
    where="Figure 3, right",
    claim=(
        "For a Transformer block with embeddings of up to 512 dimensions and sequences of 128,"
        " FO-B-MAML's memory stays nearly identical to standard first-order training, while MAML's"
        " grows aggressively with the width."
    ),
    config=Config,
    cells=cells,
    measure=measure,
    draw=draw,
    table=table,
    judge=judge,
    notes=(
        f"We take “nearly identical” as within {memory.MARGIN:.0%} of FO-MAML and of Reptile. A"
        " standard block with 8 heads and 512 hidden units as in the paper; the size of a task is"
        " ours: support and query set of 25 sequences each. Attention is written out (no flash"
        " kernel) for all methods, since second derivatives need it. " + memory.HOW
    ),
)
