"""§ 6.4: peak memory of a meta-step on MNIST-1D, where the paper names megabytes; and with one
shot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from metanudge.models import Conv1D
from metanudge_lab.experiments import memory
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

AXIS = memory.Axis("shots", "shots of a class", "{} shots")
PAPER = {m.MAML: 40.0, m.LOSS: 25.0}  # MB
PAPER_SHOTS = 5


@dataclass(frozen=True)
class Config(Settings):
    """Sizes of a task; a few seconds on a CPU."""

    shots: tuple[int, ...] = (1, 5, 10)
    ways: int = 3
    queries: int = 10
    steps: int = m.STEPS

    @classmethod
    def quick(cls) -> Config:
        """As in full."""
        return cls()


def cells(config: Config) -> list[Cell]:
    """One for each number of shots and method."""
    return AXIS.cells(config.shots)


def measure(cell: Cell, config: Config, device: torch.device) -> list[Row]:
    """Bytes at the peak."""
    model = m.seeded(0, lambda: Conv1D(ways=config.ways), device)
    task = memory.random_task(
        (40,),
        ways=config.ways,
        shots=int(cell["shots"] or 0),
        queries=config.queries,
        device=device,
    )
    return [
        memory.measure_step(str(cell["method"]), model, task, steps=config.steps, device=device)
    ]


def judge(result: Result[Config]) -> Verdict:
    """MAML above FO-B-MAML by at least what the paper's two numbers say."""
    shots = PAPER_SHOTS if PAPER_SHOTS in result.config.shots else result.config.shots[-1]
    peaks = {method: memory.memory(result, method, shots=shots) for method in memory.METHODS}
    times, theirs = peaks[m.MAML] / peaks[m.LOSS], PAPER[m.MAML] / PAPER[m.LOSS]
    told = ", ".join(f"{method} {memory.megabytes(peak)}" for method, peak in peaks.items())
    words = (
        f"with {shots} shots MAML needs {times:.1f} times FO-B-MAML's memory, in the paper"
        f" {theirs:.1f} times or more"
    )
    return Verdict.of(
        [
            Statement(times >= theirs, words, words, "ratio"),
            *compare(result),
            Statement(
                None,
                f"the megabytes themselves ({PAPER[m.LOSS]:g} and {PAPER[m.MAML]:g}), of an"
                " allocator, a batch and a device that the paper does not name",
                name="megabytes",
            ),
        ],
        f"A meta-step of one task with {shots} shots takes, in MB: {told}.",
        _one_shot(result),
    )


def compare(result: Result[Config]) -> list[Statement]:
    """Second-order methods above FO-B-MAML with every number of shots."""
    return [one for one in AXIS.compare(result) if one.name == "second order"]


def _one_shot(result: Result[Config]) -> str:
    few = min(result.config.shots)
    ours = memory.memory(result, m.LOSS, shots=few)
    told = ", ".join(
        f"{memory.memory(result, method, shots=few) / ours:.2f} times ({method})"
        for method in (m.FO_MAML, m.REPTILE, m.IMAML, m.MAML)
    )
    return (
        f"With {few} shot{'s' if few > 1 else ''} and {result.config.queries} queries a class the"
        f" others need {told} FO-B-MAML's, whose inner steps pass the queries too."
    )


EXPERIMENT = Experiment(
    name="memory-mnist1d",
    title="Memory on MNIST-1D",
    where="§ 6.4",
    claim=(
        "For the MNIST-1D task, MAML requires over 40 MB, while FO-B-MAML requires only 25 MB (one"
        " task's meta-gradient, 3-way 5-shot, 5 inner steps)."
    ),
    config=Config,
    cells=cells,
    measure=measure,
    draw=AXIS.draw,
    table=AXIS.table,
    judge=judge,
    compare=compare,
    unit=("shots",),
    notes="The network and the tasks' sizes of the MNIST-1D experiment. " + memory.HOW,
)
