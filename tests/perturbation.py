"""An ulp-sized change of every θ the tests draw: other rounding errors, the same mathematics
(`pytest --perturb SEED`).

A tolerance that holds on one CPU by luck falls to one of a few seeds. What is changed: the
parameters that torch's layers draw, and the tensors that the tests' own problems pass through
`perturbed`. Equal draws are changed equally, so that copies stay copies. Processes that a test
starts see the seed in their environment.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VARIABLE = "METANUDGE_TEST_PERTURB"
_seed: int | None = None


def start(seed: int) -> None:
    """From now on, until the process ends."""
    global _seed
    _seed = seed
    os.environ[VARIABLE] = str(seed)
    for name in ("uniform_", "normal_"):
        # Torch's own, whatever is there now: a process that another one has started may begin
        # twice.
        setattr(Tensor, name, _drawing(getattr(torch._C.TensorBase, name)))


def perturbed(x: Tensor) -> Tensor:
    """x (1 + ε u) with u of −1, 0 or 1 for each entry; x itself without `--perturb`."""
    if _seed is None:
        return x
    u = torch.randint(-1, 2, x.shape, generator=torch.Generator().manual_seed(_seed))
    return x * (1 + torch.finfo(x.dtype).eps * u.to(x))


def _drawing(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def drawn(x: Tensor, *args: Any, **options: Any) -> Tensor:
        draw(x, *args, **options)
        return x.copy_(perturbed(x)) if isinstance(x, nn.Parameter) else x

    return drawn


if VARIABLE in os.environ:
    start(int(os.environ[VARIABLE]))
