"""The example of given tasks runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "schools.py"


def test_it_trains_and_compares(script: Callable) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = script(EXAMPLE).main(["--iterations=20"])
    assert found["metanudge"] < found["mean predictor"]
