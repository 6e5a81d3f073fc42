"""Run the tutorials' scripts and keep what they print and draw, as the pages show it.

python docs/record.py [NAME …]        # all of them without a name
"""

from __future__ import annotations

import contextlib
import io
import runpy
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
EXAMPLES = DOCS.parent / "examples"
RECORDED = DOCS / "recorded"
NAMES = ("first_learner", "own_images", "penalties", "cleaning", "gradient_quality")


def run(name: str, picture: Path) -> str:
    """What a script prints; it draws its picture there."""
    import matplotlib.pyplot as plt
    import torch

    plt.switch_backend("Agg")
    said, arguments = io.StringIO(), sys.argv
    try:
        sys.argv = [name, str(picture)]
        with torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(said):
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    finally:
        sys.argv = arguments
        plt.close("all")
    return said.getvalue()


if __name__ == "__main__":
    RECORDED.mkdir(exist_ok=True)
    for name in sys.argv[1:] or NAMES:
        text = run(name, RECORDED / f"{name}.png")
        (RECORDED / f"{name}.txt").write_text(text, encoding="utf-8")
        print(text)
