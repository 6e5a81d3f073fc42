"""The smallest and largest eigenvalue of a symmetric operator, estimated from products alone
(Lanczos, 1950).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from metanudge.params import Params, dot, norm, wide

STEPS = 25


def random_direction(parameters: Mapping[str, Tensor], seed: int) -> Params:
    """A random direction of length 1, with a row axis."""
    generator = torch.Generator().manual_seed(seed)
    v = {}
    for n, p in parameters.items():
        leaf = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        v[n] = leaf.unsqueeze(0).to(p.device, wide(p.dtype))
    length = norm(v)
    return {n: leaf / length.to(leaf.dtype) for n, leaf in v.items()}


def extreme_eigenvalues(matvec: Callable[[Params], Params], start: Params) -> tuple[float, float]:
    """Smallest and largest Ritz value; exact where `STEPS` reaches the number of parameters, inside
    the spectrum otherwise.

    Args:
        matvec: the operator, on dicts with a row axis of length 1.
        start: a direction, best a random one. Memory: three of them.
    """
    size = min(STEPS, sum(leaf.numel() for leaf in start.values()))
    v = {n: leaf / norm(start) for n, leaf in start.items()}
    before: Params | None = None
    diagonal: list[float] = []
    beside: list[float] = []
    for _ in range(size):
        w = matvec(v)
        alpha = float(dot(v, w))
        diagonal.append(alpha)
        w = {n: leaf - alpha * v[n] for n, leaf in w.items()}
        if before is not None:
            w = {n: leaf - beside[-1] * before[n] for n, leaf in w.items()}
        beta = float(norm(w))
        if beta <= 1e-6 * max(map(abs, diagonal)) or len(diagonal) == size:
            break
        beside.append(beta)
        before, v = v, {n: leaf / beta for n, leaf in w.items()}
    off = torch.tensor(beside[: len(diagonal) - 1], dtype=torch.float64)
    main = torch.tensor(diagonal, dtype=torch.float64)
    ritz = torch.linalg.eigvalsh(torch.diag(main) + torch.diag(off, 1) + torch.diag(off, -1))
    return float(ritz[0]), float(ritz[-1])
