"""How many of our files a meta-step passes through, from `learner.backward` to torch and back."""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import metanudge as mn

ROOT = Path(mn.__file__).parent


class Attention(nn.Module):
    """No chain of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Linear(4, 12)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.parts(x).chunk(3, -1)
        return self.head(F.scaled_dot_product_attention(q, k, v).mean(1))


def walk(engine: str, estimator: mn.FOBMAML) -> list[str]:
    torch.manual_seed(0)
    x, y = torch.randn(2, 6, 3, 4), torch.randint(0, 3, (2, 6))
    learner = mn.MetaLearner(Attention(), F.cross_entropy, engine=engine, estimator=estimator)
    tasks = mn.TaskBatch(support=(x, y), query=(x, y))
    learner.backward(tasks)
    passed: dict[str, None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(ROOT):
            passed[file.relative_to(ROOT).as_posix()] = None

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        learner.backward(tasks)
    finally:
        sys.setprofile(before)
    return list(passed)


@pytest.mark.parametrize(("engine", "most"), [("stacked", 22), ("inplace", 20)])
@pytest.mark.parametrize("nudge", ["loss", "gradient"])
def test_a_meta_step_passes_few_files(engine, most, nudge):
    """CONTRIBUTING draws both walks."""
    files = walk(engine, mn.FOBMAML(nu=0.1, nudge=nudge))
    assert {"learner.py", "estimators/fobmaml.py", "engines/inner.py"} <= set(files)
    assert len(files) <= most, files
