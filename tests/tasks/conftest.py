"""Fixtures for the task sources: a private cache folder, and the real data sets where they are at
hand.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_NAMED = os.environ.get("METANUDGE_DATA")
_DATA = Path(_NAMED) if _NAMED else Path(__file__).resolve().parents[2].parent / "shared" / "data"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, so that no test reads or writes the user's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("METANUDGE_CACHE", str(folder))
    monkeypatch.delenv("METANUDGE_DATA", raising=False)
    return folder


@pytest.fixture
def data() -> Path:
    """The folder with the real data sets."""
    if not _DATA.is_dir():
        pytest.skip(f"the data sets are not at {_DATA}; set METANUDGE_DATA to their folder")
    return _DATA
