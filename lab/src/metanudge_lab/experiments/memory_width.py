"""Figure 3, right: peak memory of a meta-step against the width of a Transformer block."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from metanudge_lab.experiments import memory, memory_transformer
from metanudge_lab.experiments.base import Cell, Experiment, Row, Settings

AXIS = memory.Axis("width", "width of the model", "width {}")


@dataclass(frozen=True)
class Widths:
    """What memory is measured against, and what stays the same."""

    widths: tuple[int, ...] = (64, 128, 256, 512)
    length: int = 128


@dataclass(frozen=True)
class Config(memory_transformer.Block, Widths, Settings):
    """All sizes. In full half a minute on a GPU."""

    @classmethod
    def quick(cls) -> Config:
        """Half a minute."""
        return cls(widths=(32, 64, 128), length=64, hidden=128, steps=2, shots=2, queries=2)


def cells(config: Config) -> list[Cell]:
    """One for each width and method."""
    return AXIS.cells(config.widths)


def measure(cell: Cell, config: Config, device: torch.device) -> list[Row]:
    """Bytes at the peak."""
    return memory_transformer.measure(
        cell["method"], config, length=config.length, width=int(cell["width"] or 0), device=device
    )


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
    draw=AXIS.draw,
    table=AXIS.table,
    judge=AXIS.judge,
    compare=AXIS.compare,
    unit=("width",),
    notes=(
        f"We take “nearly identical” as within {memory.MARGIN:.0%} of FO-MAML and of Reptile. "
        + memory_transformer.SIZE
        + memory.HOW
    ),
)
