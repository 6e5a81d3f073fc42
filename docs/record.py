"""Run the tutorials' scripts and keep what they print and draw, as the pages show it.

python docs/record.py [NAME …]        # all of them without a name
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
EXAMPLES = DOCS.parent / "examples"
RECORDED = DOCS / "recorded"
NAMES = (
    *("first_learner", "own_images", "penalties", "cleaning", "gradient_quality"),
    *("schools", "intents", "learned_rates", "shards", "serving"),
)
RANKS = {"shards": 2}  # processes, by torchrun


def run(name: str, picture: Path, *, meta_steps: int | None = None) -> str:
    """What a script prints; it draws its picture there. Fewer meta-steps than its own are for
    tests, which have no time.
    """
    source = (EXAMPLES / f"{name}.py").read_text("utf-8")
    if meta_steps is not None:
        source, found = re.subn(
            r"^META_STEPS = \d+$", f"META_STEPS = {meta_steps}", source, flags=re.M
        )
        assert found == 1, name
    return (_on_ranks if name in RANKS else _here)(name, source, picture)


def _here(name: str, source: str, picture: Path) -> str:
    import matplotlib.pyplot as plt
    import torch

    plt.switch_backend("Agg")
    said, arguments = io.StringIO(), sys.argv
    try:
        sys.argv = [name, str(picture)]
        with torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(said):
            exec(compile(source, f"{name}.py", "exec"), {"__name__": "__main__"})
    finally:
        sys.argv = arguments
        plt.close("all")
    return said.getvalue()


def _on_ranks(name: str, source: str, picture: Path) -> str:
    script = picture.with_name(f"{name}_on_ranks.py")
    script.write_text(source, encoding="utf-8")
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS[name]}"]
    try:
        return subprocess.run(
            [sys.executable, *launcher, str(script), str(picture)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"},
            stdout=subprocess.PIPE,
            encoding="utf-8",
            timeout=300,
            check=True,
        ).stdout
    finally:
        script.unlink()


if __name__ == "__main__":
    RECORDED.mkdir(exist_ok=True)
    for name in sys.argv[1:] or NAMES:
        text = run(name, RECORDED / f"{name}.png")
        (RECORDED / f"{name}.txt").write_text(text, encoding="utf-8")
        print(text)
