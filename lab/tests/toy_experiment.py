"""An experiment that takes no time, for tests of what runs and reports experiments."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from metanudge_lab import style
from metanudge_lab.experiments.base import (
    Cell,
    Drawing,
    Experiment,
    Result,
    ResultTable,
    Row,
    Shown,
    Verdict,
)


@dataclass(frozen=True)
class Config:
    factors: tuple[float, ...] = (1.0, 2.0)
    seeds: int = 2

    @classmethod
    def quick(cls) -> Config:
        return cls()

    @classmethod
    def full(cls) -> Config:
        return cls(seeds=3)


def cells(config: Config) -> list[Cell]:
    return [
        {"factor": factor, "seed": seed}
        for seed in range(config.seeds)
        for factor in config.factors
    ]


def measure(cell: Cell, config: Config, device: torch.device) -> list[Row]:
    return [{"x": x, "y": cell["factor"] * x} for x in (1, 2)] + [{"x": 3, "y": math.inf}]


def draw(result: Result[Config]) -> list[Drawing]:
    figure, axes = style.figure()
    axes.plot(result.values("x", seed=0), result.values("y", seed=0), **style.line("MAML"))
    axes.set(xlabel="x", ylabel="y")
    return [
        Drawing(figure, alt="y against x"),
        Drawing(style.figure()[0], alt="nothing & <more>", suffix="empty"),
    ]


def table(result: Result[Config]) -> ResultTable:
    return ResultTable(
        ("factor", "y"),
        [
            (str(f), Shown(max(result.values("y", factor=f, x=2)), f"{f:g} times 2"))
            for f in result.distinct("factor")
        ],
    )


def judge(result: Result[Config]) -> Verdict:
    y = result.values("y", factor=2.0, x=2)
    return Verdict(
        "reproduced" if y == [4.0] * len(y) else "not",
        f"y = {y[0]:g} at x = 2.",
        "It is twice x <as claimed>.",
    )


def toy(watch: Callable[[Cell], Any] = lambda cell: None, **changes: Any) -> Experiment[Config]:
    """The experiment; `watch` sees every cell before it is measured."""

    def watched(cell: Cell, config: Config, device: torch.device) -> list[Row]:
        watch(cell)
        return measure(cell, config, device)

    parts: dict[str, Any] = {
        "name": "toy", "title": "A toy", "where": "Table 0",
        "claim": "y is factor times x & more.", "config": Config, "cells": cells,
        "measure": watched, "draw": draw, "table": table, "judge": judge,
        "notes": "Nothing is random.",
    }  # fmt: skip
    return Experiment(**{**parts, **changes})
