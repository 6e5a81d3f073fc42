"""What can be asked of the benchmark. `metanudge bench` and `python -m metanudge_lab.bench` take
the same options.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from metanudge.training.device import Precision


@dataclass(frozen=True)
class BenchConfig:
    """Time, memory and distance to the machine's own limits of every estimator and of every rival
    that is installed, side by side.
    """

    case: tuple[str, ...] = ()
    """Cases: mnist1d, omniglot, omniglot-5shot, sinusoid, transformer; all of them when left out.
    """

    only: tuple[str, ...] = ()
    """Contenders by name, such as maml or 'fobmaml*'; all of them when left out."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""

    precision: Precision = "fp32"
    """Of the arithmetic: fp32, fp32 with TF32 products, or bf16 autocast. --rounding measures them
    all.
    """

    repeats: int = 9
    """Measured calls of each contender, one of each in turn."""

    warmup: int | None = None
    """Calls of each contender before that, reported separately; 3 on a GPU and 1 on a CPU when left
    out.
    """

    limit_seconds: float = 300.0
    """Start no further round of a case that would end after this time. One is always measured."""

    tasks: int | None = None
    """Tasks in a meta-batch, if not the case's own (with --rounding, 8 on a GPU and 2 on a CPU)."""

    steps: int = 5
    """Inner steps."""

    threads: int | None = None
    """CPU threads, if not torch's own choice."""

    compile: bool = True
    """On a GPU, let metanudge build kernels and record meta-steps."""

    quick: bool = False
    """Tiny sizes: shows that everything works, and nothing about speed."""

    first_step: bool = True
    """Also measure how long a fresh process takes to its first meta-step, with empty caches and
    with those of the process before.
    """

    explain: bool = False
    """Instead, say where the time of a meta-step goes: arithmetic, traffic, kernels, operators. Not
    with --scaling or --rounding.
    """

    scaling: bool = False
    """Instead, measure time and memory against the number of tasks, steps and shots. Not with
    --explain or --rounding.
    """

    rounding: bool = False
    """Instead, measure the rounding errors of the meta-gradient, by blocks and layer by layer. Not
    with --explain or --scaling.
    """

    batches: int | None = None
    """With --rounding: models and meta-batches to measure it on; 16 when left out, 3 with --quick.
    """

    draw: tuple[Path, ...] = ()
    """Instead, draw the pictures of results measured before (elsewhere)."""

    out: Path = Path("results/bench")
    """Folder for the results."""
