"""What `mn.plan` says beside what the allocator saw: memory of a meta-step on eight models, in
place and stacked, with several estimators.

python lab/benchmarks/plans.py --out results/bench

On a CUDA device the allocator's own peak counts, on a CPU that of counted allocations.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import metanudge as mn
from metanudge.estimators import Estimator
from metanudge.testing.memory import peak_memory
from metanudge.training.files import write_text
from metanudge_lab.device_memory import release
from metanudge_lab.experiments.transformer_tasks import GPT
from metanudge_lab.provenance import provenance

LOSS, GRADIENT = mn.FOBMAML(nu=0.1), mn.FOBMAML(nu=0.1, nudge="gradient")
MAML, DIFFERENCE = mn.MAML(), mn.MAML(products="difference", epsilon=1e-3)


@dataclass(frozen=True)
class Case:
    """A model, its tasks, and what runs on them.

    Attributes:
        build: makes the model.
        tasks: makes the tasks.
        loss: of a model and a batch, or of outputs and targets.
        runs: estimators and engines.
    """

    build: Callable[[], nn.Module]
    tasks: Callable[[], list[mn.Task]]
    loss: Callable[..., Any]
    runs: tuple[tuple[Estimator, str], ...]


def examples(shape: tuple[int, ...], ways: int, number: int, tasks: int) -> list[mn.Task]:
    """Classification tasks of random numbers."""

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(number, *shape), torch.randint(ways, (number,))

    return [mn.Task(batch(), batch()) for _ in range(tasks)]


def tokens(rows: int, length: int, symbols: int, tasks: int) -> list[mn.Task]:
    """Tasks of random tokens."""

    def batch() -> torch.Tensor:
        return torch.randint(symbols, (rows, length + 1))

    return [mn.Task(batch(), batch()) for _ in range(tasks)]


def next_token(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of every token after the first."""
    return F.cross_entropy(model(batch[:, :-1]).float(), batch[:, 1:])


def perceptron(width: int, layers: int, inputs: int = 256) -> nn.Module:
    """Layers of one width."""
    sizes = [inputs, *[width] * layers]
    inner = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.GELU())]
    return nn.Sequential(*inner, nn.Linear(width, 5))


def convolutions(channels: int) -> nn.Module:
    """Four blocks with normalisation over groups, and a linear head."""
    sizes = [3, *[channels] * 4]
    blocks = [
        layer
        for a, b in pairwise(sizes)
        for layer in (nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.ReLU(), nn.MaxPool2d(2))
    ]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(channels * 4, 5))


BOTH = ((LOSS, "inplace"), (LOSS, "stacked"), (DIFFERENCE, "inplace"), (MAML, "stacked"))


def cases(scale: int) -> dict[str, Case]:
    """Eight of them; sizes grow with the scale."""
    wide, images, text = 256 * scale, 8 * scale, 64 * scale

    def gpt(dtype: torch.dtype) -> nn.Module:
        sizes = {"symbols": 1000, "length": 64, "width": text, "layers": 4, "heads": 4}
        return GPT(**sizes).to(dtype)

    def some() -> list[mn.Task]:
        return examples((256,), 5, 25, 4)

    def pictures() -> list[mn.Task]:
        return examples((3, 32, 32), 5, 25, 4)

    def texts() -> list[mn.Task]:
        return tokens(4, 64, 1000, 2)

    def head_only() -> nn.Module:
        model = perceptron(wide, 4)
        for parameter in model[:6].parameters():
            parameter.requires_grad_(False)
        return model

    def bfloat() -> list[mn.Task]:
        return [
            mn.Task((s[0].bfloat16(), s[1]), (q[0].bfloat16(), q[1]))
            for s, q in ((t.support, t.query) for t in some())
        ]

    cross = F.cross_entropy
    return {
        "perceptron": Case(lambda: perceptron(wide, 4), some, cross, BOTH),
        "deep perceptron": Case(
            lambda: perceptron(wide // 2, 12), some, cross, ((GRADIENT, "inplace"), *BOTH)
        ),
        "bf16 perceptron": Case(
            lambda: perceptron(wide, 4).bfloat16(),
            bfloat,
            cross,
            ((LOSS, "inplace"), (GRADIENT, "inplace"), (LOSS, "stacked")),
        ),
        "frozen layers": Case(head_only, some, cross, BOTH),
        "convolutions": Case(lambda: convolutions(images), pictures, cross, BOTH),
        "Conv4": Case(lambda: mn.models.Conv4(in_channels=3, image_size=32), pictures, cross, BOTH),
        "GPT": Case(
            lambda: gpt(torch.float32), texts, next_token, ((LOSS, "inplace"), (LOSS, "stacked"))
        ),
        "bf16 GPT": Case(
            lambda: gpt(torch.bfloat16),
            texts,
            next_token,
            ((LOSS, "inplace"), (GRADIENT, "inplace")),
        ),
    }


def measure(name: str, case: Case, device: torch.device) -> list[dict[str, Any]]:
    """Planned and seen bytes of each run of a case."""
    torch.manual_seed(0)
    tasks = mn.TaskBatch.of([task.to(device) for task in case.tasks()])
    rows = []
    for estimator, engine in case.runs:
        model = case.build().to(device)
        learner = mn.MetaLearner(
            model,
            case.loss,
            solver=mn.GradientDescent(lr=0.01, steps=3),
            estimator=estimator,
            engine=engine,  # type: ignore[arg-type]
            compile=False,
        )
        row: dict[str, Any] = {"case": name, "engine": engine, "estimator": repr(estimator)}
        try:
            begin = time.perf_counter()
            plan = mn.plan(learner, tasks, estimators=[estimator], engines=[learner.engine])
            row |= {"planned": plan.steps[0].peak, "planning_s": time.perf_counter() - begin}
            row["why"] = plan.steps[0].why

            def meta(learner: mn.MetaLearner = learner) -> None:
                learner.backward(tasks)

            meta()  # kernels are chosen and workspaces taken at the first call
            learner.zero_grad(set_to_none=True)
            gc.collect()
            row["seen"] = peak_memory(meta, device)
            if row["planned"] is not None:
                row["ratio"] = row["planned"] / row["seen"]
        except (RuntimeError, ValueError, TypeError, mn.StackingError) as error:
            row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        print(json.dumps(row), flush=True)
        rows.append(row)
        del model, learner
        release(device)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", type=int, help="of the models: 1 on a CPU, 8 on a GPU")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scale = args.scale or (8 if device.type == "cuda" else 1)
    rows = [row for name, case in cases(scale).items() for row in measure(name, case, device)]
    args.out.mkdir(parents=True, exist_ok=True)
    found = {"machine": provenance(device), "scale": scale, "rows": rows}
    write_text(args.out / "plans.json", json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
