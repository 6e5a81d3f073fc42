"""How many files a reader passes who follows `metanudge train` above the core."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import metanudge
from metanudge.cli import main

LIMIT = 20
PACKAGE = Path(metanudge.__file__).parent


def test_a_run_passes_few_files_above_the_core(tmp_path: Path) -> None:
    flags = ["sinusoid", "--tasks=2", "--eval-tasks=2", "--test-tasks=2"]
    # A first run loads everything: what a module does while it is loaded is no part of the walk.
    assert main(["train", *flags, "--iterations=1", f"--out={tmp_path / 'first'}"]) == 0
    passed: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(PACKAGE):
            passed.add(file.relative_to(PACKAGE).as_posix())

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        code = main(["train", *flags, "--iterations=2", f"--out={tmp_path / 'second'}"])
    finally:
        sys.setprofile(before)
    assert code == 0
    walk = sorted(file for file in passed if file.startswith(("training/", "cli/")))
    assert "training/loop.py" in walk
    assert len(walk) <= LIMIT, walk
