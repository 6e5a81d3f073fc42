"""Figure 3, left: peak memory of a meta-step against the channels of a convolutional network."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from metanudge.models import Conv4
from metanudge_lab.experiments import memory
from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.base import (
    Cell,
    Drawing,
    Experiment,
    Result,
    ResultTable,
    Row,
    Settings,
    Statement,
    Verdict,
)

AXIS = memory.Axis("channels", "channels", "{} channels")


@dataclass(frozen=True)
class Config(Settings):
    """Sizes; `shots` are those of the comparison, then others that the table shows beside it.

    In full a minute on a GPU.
    """

    channels: tuple[int, ...] = (16, 32, 64, 128, 256)
    steps: int = m.STEPS
    ways: int = 5
    shots: tuple[int, ...] = (15, 1)
    queries: int = 15
    image_size: int = 28

    @classmethod
    def quick(cls) -> Config:
        """Half a minute."""
        return cls(channels=(8, 16, 32), steps=2, shots=(5, 1), queries=5)


def cells(config: Config) -> list[Cell]:
    """One for each number of shots, channels and method."""
    return [
        {"shots": shots, **cell} for shots in config.shots for cell in AXIS.cells(config.channels)
    ]


def measure(cell: Cell, config: Config, device: torch.device) -> list[Row]:
    """Bytes at the peak."""
    channels, shots, size = int(cell["channels"] or 0), int(cell["shots"] or 0), config.image_size
    model = m.seeded(0, lambda: Conv4(ways=config.ways, channels=channels, image_size=size), device)
    task = memory.random_task(
        (1, size, size), ways=config.ways, shots=shots, queries=config.queries, device=device
    )
    return [
        memory.measure_step(str(cell["method"]), model, task, steps=config.steps, device=device)
    ]


def draw(result: Result[Config]) -> list[Drawing]:
    """The comparison."""
    return AXIS.draw(result, shots=result.distinct("shots")[0])


def table(result: Result[Config]) -> ResultTable:
    """Every number of shots."""
    tables = [(shots, AXIS.table(result, shots=shots)) for shots in result.distinct("shots")]
    head = tables[0][1].header
    return ResultTable(
        (head[0], "shots", *head[1:]),
        [(row[0], shots, *row[1:]) for shots, one in tables for row in one.rows],
    )


def judge(result: Result[Config]) -> Verdict:
    """As for every axis, and what happens where queries outnumber the shots."""
    main, *others = result.config.shots
    verdict = AXIS.judge(result, shots=main)
    reason = verdict.reason + "".join(f" {_beside(result, shots)}" for shots in others)
    return replace(verdict, reason=reason)


def compare(result: Result[Config]) -> list[Statement]:
    """With as many shots as queries."""
    return AXIS.compare(result, shots=result.config.shots[0])


def _beside(result: Result[Config], shots: int) -> str:
    queries = result.config.queries
    found = {}
    for rival in (m.FO_MAML, m.REPTILE, m.IMAML, m.MAML):
        ratios = [
            memory.memory(result, m.LOSS, shots=shots, channels=c)
            / memory.memory(result, rival, shots=shots, channels=c)
            for c in result.config.channels
        ]
        found[rival] = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return (
        f"With {shots} shot{'s' if shots > 1 else ''} and {queries} queries a class FO-B-MAML needs"
        f" {found[m.FO_MAML]} times FO-MAML's memory, {found[m.IMAML]} times iMAML's and"
        f" {found[m.MAML]} times MAML's, but {found[m.REPTILE]} times Reptile's, which never looks"
        " at the queries."
    )


EXPERIMENT = Experiment(
    name="memory-cnn",
    title="Memory against the channels of a convolutional network",
    where="Figure 3, left",
    claim=(
        "FO-B-MAML's peak memory is nearly identical to that of standard first-order training as a"
        " ConvNet's channels grow from 16 to 256, whereas MAML's and iMAML's, which store"
        " activations of the inner loop or the graph of an implicit differentiation, scale steeply."
    ),
    config=Config,
    cells=cells,
    measure=measure,
    draw=draw,
    table=table,
    judge=judge,
    compare=compare,
    unit=("shots", "channels"),
    notes=(
        f"We take “nearly identical” as within {memory.MARGIN:.0%} of FO-MAML and of Reptile. The"
        " paper does not say how many examples a task has; in the comparison support and query set"
        " are equally large, since a method that never looks at queries could otherwise not be"
        " compared with one that does; the table also has tasks with one shot. The network is"
        " Conv4 on 28 × 28 images. " + memory.HOW
    ),
)
