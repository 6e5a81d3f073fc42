"""Peak memory of a meta-step against the number of inner steps: flat, or not."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from metanudge.models import Conv4
from metanudge_lab import style
from metanudge_lab.experiments import memory
from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.base import (
    Cell,
    Drawing,
    Experiment,
    Result,
    Row,
    Settings,
    Statement,
    Verdict,
)

AXIS = memory.Axis("steps", "inner steps K", "K = {}")


@dataclass(frozen=True)
class Config(Settings):
    """Sizes of the model and of a task; `budget` is in MB. In full a minute on a GPU."""

    steps: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    budget: float = 4000.0
    channels: int = 64
    ways: int = 5
    shots: int = 15
    queries: int = 15
    image_size: int = 28

    @classmethod
    def quick(cls) -> Config:
        """Half a minute."""
        return cls(steps=(1, 2, 4, 8, 16), budget=20.0, channels=8, shots=2, queries=2)


def cells(config: Config) -> list[Cell]:
    """One for each number of steps and method; a training step has none."""
    return [cell for cell in AXIS.cells(config.steps) if cell["method"] != memory.STEP]


def measure(cell: Cell, config: Config, device: torch.device) -> list[Row]:
    """Bytes at the peak."""
    size = config.image_size
    model = m.seeded(
        0, lambda: Conv4(ways=config.ways, channels=config.channels, image_size=size), device
    )
    task = memory.random_task(
        (1, size, size), ways=config.ways, shots=config.shots, queries=config.queries, device=device
    )
    return [
        memory.measure_step(
            str(cell["method"]), model, task, steps=int(cell["steps"] or 0), device=device
        )
    ]


def draw(result: Result[Config]) -> list[Drawing]:
    """Memory against steps, with the budget."""
    drawings = AXIS.draw(result)
    left = drawings[0].figure.axes[0]
    left.axhline(result.config.budget, color=style.INK, linewidth=1.0, linestyle=(0, (1, 2)))
    left.annotate(
        f"{result.config.budget:g} MB",
        (1, result.config.budget),
        xytext=(0, 3),
        textcoords="offset points",
        color=style.INK,
        fontsize=8.5,
    )
    return drawings


def judge(result: Result[Config]) -> Verdict:
    """FO-B-MAML's memory is flat in K; MAML's is not."""
    steps = sorted(result.config.steps)
    growth = {method: _growth(result, method) for method in m.ESTIMATORS}
    over = next(
        (
            k
            for k in steps
            if memory.memory(result, m.MAML, steps=k) / memory.MB > result.config.budget
        ),
        None,
    )
    first, last = (memory.memory(result, m.MAML, steps=k) for k in (steps[0], steps[-1]))
    per_step = memory.megabytes((last - first) / max(1, steps[-1] - steps[0]))
    fits = (
        f"and is above {result.config.budget:g} MB from K = {over} on"
        if over
        else f"and stays below {result.config.budget:g} MB"
    )
    measured = (
        f"From K = {steps[0]} to {steps[-1]} FO-B-MAML goes from {_peak(result, m.LOSS, steps[0])}"
        f" to {_peak(result, m.LOSS, steps[-1])} MB ({growth[m.LOSS] - 1:+.2%}), its gradient nudge"
        f" {growth[m.GRADIENT] - 1:+.2%}; MAML from {_peak(result, m.MAML, steps[0])} to"
        f" {_peak(result, m.MAML, steps[-1])} MB, {per_step} MB a step, {fits}."
    )
    return Verdict.of(compare(result), measured)


def compare(result: Result[Config]) -> list[Statement]:
    """Who is flat, and that MAML is not."""
    growth = {method: _growth(result, method) for method in m.ESTIMATORS}
    flat = [method for method in (m.LOSS, m.GRADIENT) if growth[method] - 1 <= memory.FLAT]
    grown = ", ".join(f"{method} {growth[method] - 1:+.1%}" for method in (m.LOSS, m.GRADIENT))
    one = Statement(
        len(flat) == 2 and growth[m.MAML] > 2,
        f"FO-B-MAML's is flat ({grown}) where MAML's grows {growth[m.MAML]:.1f}-fold",
        f"FO-B-MAML's is not flat where MAML's grows ({grown}, MAML {growth[m.MAML]:.1f}-fold)",
        "flat",
    )
    return [one]


def _peak(result: Result[Config], method: str, steps: int) -> str:
    return memory.megabytes(memory.memory(result, method, steps=steps))


def _growth(result: Result[Config], method: str) -> float:
    peaks = [memory.memory(result, method, steps=k) for k in sorted(result.config.steps)]
    return max(peaks) / min(peaks) if peaks else math.nan


EXPERIMENT = Experiment(
    name="memory-steps",
    title="Memory against the number of inner steps",
    where="Table 1 and § 5.3, Memory Efficiency",
    claim=(
        "MAML's memory is that of the activations times the number of inner steps; FO-B-MAML's does"
        " not depend on it, since activations are discarded and the two subproblems are solved one"
        " after the other. The paper states this and draws no figure of it; here it is."
    ),
    config=Config,
    cells=cells,
    measure=measure,
    draw=draw,
    table=AXIS.table,
    judge=judge,
    compare=compare,
    unit=("steps",),
    notes=(
        f"Flat means within {memory.FLAT:.0%} between any two numbers of steps. The network is"
        " Conv4 on 28 × 28 images, support and query set of equal size. The budget is a line in"
        " the figure, not a limit of the machine. " + memory.HOW
    ),
)
