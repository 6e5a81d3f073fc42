"""Peak memory of a meta-step of a Transformer block, against its width or the length of its
sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from metanudge.models import TransformerBlock
from metanudge_lab.experiments import memory
from metanudge_lab.experiments import methods as m
from metanudge_lab.experiments.base import Row

SIZE = (
    "A standard block with 8 heads and 512 hidden units as in the paper; the size of a task is"
    " ours: support and query set of 25 sequences each. Attention is written out (no flash kernel)"
    " for all methods, since second derivatives need it. "
)


@dataclass(frozen=True)
class Block:
    """Sizes of the model and of a task, but for width and length."""

    heads: int = 8
    hidden: int = 512
    steps: int = m.STEPS
    ways: int = 5
    shots: int = 5
    queries: int = 5


def measure(
    method: object,
    config: Block,
    *,
    length: int,
    width: int,
    device: torch.device,
) -> list[Row]:
    """Bytes at the peak."""

    def build() -> TransformerBlock:
        return TransformerBlock(
            ways=config.ways,
            d_model=width,
            heads=config.heads,
            hidden=config.hidden,
            length=length,
        )

    task = memory.random_task(
        (length, width), ways=config.ways, shots=config.shots, queries=config.queries, device=device
    )
    model = m.seeded(0, build, device)
    return [memory.measure_step(str(method), model, task, steps=config.steps, device=device)]
