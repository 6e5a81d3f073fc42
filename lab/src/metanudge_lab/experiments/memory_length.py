"""Appendix B: peak memory of a meta-step against the length of the sequences of a Transformer
block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from metanudge_lab.experiments import memory, memory_transformer
from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.base import (
    Cell,
    Experiment,
    Result,
    Row,
    Settings,
    Statement,
    Verdict,
)

AXIS = memory.Axis("length", "length of the sequences", "length {}")
LINEAR = 1.25  # powers below are nearer to linear growth than to quadratic, with room


@dataclass(frozen=True)
class Lengths:
    """What memory is measured against, and what stays the same."""

    lengths: tuple[int, ...] = (32, 64, 128, 256, 512)
    width: int = 128


@dataclass(frozen=True)
class Config(memory_transformer.Block, Lengths, Settings):
    """All sizes. In full half a minute on a GPU."""

    @classmethod
    def quick(cls) -> Config:
        """Half a minute."""
        return cls(lengths=(32, 64, 128), width=64, hidden=128, steps=2, shots=2, queries=2)


def cells(config: Config) -> list[Cell]:
    """One for each length and method."""
    return AXIS.cells(config.lengths)


def measure(cell: Cell, config: Config, device: torch.device) -> list[Row]:
    """Bytes at the peak."""
    return memory_transformer.measure(
        cell["method"], config, length=int(cell["length"] or 0), width=config.width, device=device
    )


def judge(result: Result[Config]) -> Verdict:
    """As for every axis, and the powers of the length with which memory grows."""
    powers = {
        name: AXIS.growth(result, method)
        for name, method in (
            ("FO-B-MAML", m.LOSS),
            ("FO-MAML", m.FO_MAML),
            ("iMAML", m.IMAML),
            ("MAML", m.MAML),
            ("one training step", memory.STEP),
        )
    }
    sizes = sorted(result.distinct("length"))[-2:]
    words = (
        f"from length {sizes[0]} to {sizes[-1]} memory goes as the length to the power "
        f"{', '.join(f'{power:.2f} ({name})' for name, power in powers.items())}"
    )
    verdict = AXIS.judge(result)
    quadratic = Statement(
        powers["FO-B-MAML"] < LINEAR,
        words,
        f"FO-B-MAML does not avoid the quadratic growth: {words}",
        "quadratic",
    )
    return Verdict.of([*verdict.parts, quadratic], verdict.measured, AXIS.above_a_step(result))


EXPERIMENT = Experiment(
    name="memory-length",
    title="Memory against the length of sequences",
    where="Figure 6 and Appendix B",
    claim=(
        "With a Transformer block of width 128 and sequences of 32 to 512, MAML's memory grows"
        " aggressively and iMAML's is consistently higher than that of first-order methods, while"
        " FO-B-MAML tracks closely with Reptile and FO-MAML and “avoids the quadratic growth”."
    ),
    config=Config,
    cells=cells,
    measure=measure,
    draw=AXIS.draw,
    table=AXIS.table,
    judge=judge,
    compare=AXIS.compare,
    unit=("length",),
    notes=(
        f"We take “tracks closely” as within {memory.MARGIN:.0%} of FO-MAML and of Reptile. No"
        " method that runs this model forward and backward avoids quadratic growth, since one pass"
        " holds its attention maps; what FO-B-MAML avoids is holding those of every inner step. "
        + memory_transformer.SIZE
        + memory.HOW
    ),
)
