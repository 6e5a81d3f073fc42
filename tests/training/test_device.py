"""Where a run or a measurement computes, from a name."""

from __future__ import annotations

import pytest
import torch

from metanudge.training.device import device_called
from metanudge.training.errors import UserError


def test_names_that_lead_nowhere() -> None:
    with pytest.raises(UserError, match="no device that torch knows"):
        device_called("gpu")
    with pytest.raises(UserError, match="--device cuda:99: torch finds"):
        device_called("cuda:99")


@pytest.mark.parametrize(
    ("gpus", "rank", "name", "expected"),
    [
        (0, "0", "auto", "cpu"),
        (2, "0", "auto", "cuda:0"),
        (2, "3", "cuda", "cuda:1"),
        (2, "3", "cuda:0", "cuda:0"),
        (2, "1", "cpu", "cpu"),
    ],
)
def test_every_local_rank_has_a_gpu_of_its_own(
    gpus: int, rank: int, name: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    assert device_called(name) == torch.device(expected)
