"""The fixture that puts a `MortalDisk` below the checkpoints."""

from __future__ import annotations

import pytest

from checkpoints import MortalDisk, UseDisk
from metanudge.training.checkpoint import files


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch) -> UseDisk:
    def use(disk: MortalDisk) -> MortalDisk:
        monkeypatch.setattr(files, "disk", disk)
        return disk

    return use
